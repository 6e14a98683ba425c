"""tandem.optim.AdamW: torch's mathematics, one digest under every plan, torch's interface."""
import copy
import gc
import io
import math
import pickle
import tempfile
import unittest
import unittest.mock

from sandbox import POLICIES, STATES, Reference, Small, batches, bits, held_parameters, make, tandem, torch, train


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


class Mathematics(unittest.TestCase):
    def groups(self, module):
        decayed = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.3, "lr": 2e-2}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6}]

    def test_masters_and_moments_are_those_of_torch(self):
        """Both optimizers get the same gradients, some of them None: 25 steps with groups, a scheduler and clipping."""
        for dtype in (torch.bfloat16, torch.float32):
            ours, theirs = Small(dtype), Small(dtype)
            optimizer = tandem.optim.AdamW(self.groups(ours), lr=1e-2, device_memory="8MiB", policy="interleave:2")
            reference = Reference(theirs, self.groups(theirs), lr=1e-2)
            schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 30) for o in (optimizer, reference.optimizer)]
            before = [m.detach().clone() for m in reference.masters.values()]
            random = torch.Generator().manual_seed(3)
            for step in range(25):
                for number, (mine, other) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
                    mine.grad = other.grad = None
                    if (step + number) % 4:
                        mine.grad = torch.randn(mine.shape, generator=random).to(mine.dtype) * (0.1 + number)
                        other.grad = mine.grad.clone()
                if step % 2:
                    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 3.0) for m in (ours, theirs)]
                    self.assertEqual(*norms)
                optimizer.step()
                reference.step()
                for schedule in schedules:
                    schedule.step()
            state, other = optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
            self.assertEqual(sorted(state), sorted(other))
            for index, start, master in zip(sorted(state), before, reference.masters.values(), strict=True):
                self.assertEqual(state[index]["step"], other[index]["step"])
                self.assertLess(relative(state[index]["exp_avg"], other[index]["exp_avg"]), 1e-6)
                self.assertLess(relative(state[index]["exp_avg_sq"], other[index]["exp_avg_sq"]), 1e-6)
                moved = relative(start, master)
                self.assertLess(relative(state[index]["master"], master), 1e-6)
                self.assertGreater(moved, 1e-2)
            optimizer.close()

    def test_training_follows_torch(self):
        ours, theirs = Small(torch.float32), Small(torch.float32)
        optimizer, reference = make(ours), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
        losses, expected = train(ours, optimizer, 20), train(theirs, reference, 20)
        self.assertGreater(expected[0] - expected[-1], 0.5)
        for mine, other in zip(losses, expected, strict=True):
            self.assertAlmostEqual(mine, other, delta=1e-4)

    def test_a_gradient_of_none_leaves_everything(self):
        module = Small()
        optimizer = make(module)
        start = bits(module.rare.weight)
        names = [n for n, _ in module.named_parameters()]
        rare = names.index("rare.weight")
        module.loss(batches(1)[0]).backward()
        optimizer.step()
        self.assertEqual(bits(module.rare.weight), start)
        self.assertNotIn(rare, optimizer.state_dict()["state"])
        module.loss(batches(1)[0], rare=True).backward()
        optimizer.step()
        self.assertNotEqual(bits(module.rare.weight), start)
        state = optimizer.state_dict()["state"]
        self.assertEqual((state[rare]["step"].item(), state[0]["step"].item()), (1, 2))

    def test_bf16_weights_of_fp32_parameters(self):
        module = Small(torch.float32)
        exact = module.inner.weight.detach().clone()
        optimizer = make(module, weights="bf16")
        self.assertEqual({p.dtype for p in module.parameters()}, {torch.bfloat16})
        name = next(p.full_name for p in optimizer.engine.layout.owned_parameters if p.name == "inner.weight")
        masters = optimizer.engine.read(name)
        self.assertTrue(torch.equal(torch.from_numpy(masters), exact))

    def test_fp32_weights_stay(self):
        module = Small(torch.float32)
        train(module, make(module), 3)
        self.assertEqual({p.dtype for p in module.parameters()}, {torch.float32})


class Bits(unittest.TestCase):
    def test_one_digest_under_every_plan(self):
        for state in STATES:
            digests = {}
            for policy in POLICIES:
                for gradients in ("keep", "take"):
                    module = Small()
                    optimizer = make(module, policy=policy, state=state, gradients=gradients, module=module if policy == "host" else None)
                    train(module, optimizer)
                    digests[policy, gradients] = optimizer.digest()
                    self.assertLessEqual(optimizer.engine.device.peak_bytes, 8 << 20)
                    optimizer.close()
            self.assertEqual(len(set(digests.values())), 1, digests)

    def test_taken_gradients_add_up_over_passes(self):
        digests = set()
        for policy in ("device", "host", "interleave:2"):
            module = Small()
            optimizer = make(module, policy=policy, gradients="take", accumulation=3)
            for step in range(4):
                for tokens in batches(1 + step % 3, seed=step):
                    (module.loss(tokens, rare=step == 2) / 3).backward()
                optimizer.clip_grad_norm_(0.25)
                optimizer.step()
                optimizer.zero_grad()
            digests.add(optimizer.digest())
        self.assertEqual(len(digests), 1)

    def test_passes_that_use_other_parts(self):
        """A pass that begins with a parameter which the one before did not use: every gradient counts once."""
        ours, theirs = Small(torch.float32), Small(torch.float32)
        optimizer = make(ours, gradients="take", accumulation=4)
        for rare in (False, True, False):
            for module in (ours, theirs):
                module.loss(batches(1)[0], rare).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        self.assertAlmostEqual(optimizer.clip_grad_norm_(0.01).item(), expected.item(), delta=1e-5 * expected.item())
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        for index, parameter in enumerate(theirs.parameters()):
            self.assertLess(relative(optimizer.state_dict()["state"][index]["exp_avg"], 0.1 * parameter.grad), 1e-5)

    def test_resume_under_another_plan(self):
        for state in STATES:
            whole = Small()
            optimizer = make(whole, state=state)
            train(whole, optimizer, 6)
            expected = optimizer.digest()
            for way in ("save", "state_dict"):
                first = Small()
                begun = make(first, state=state, policy="host")
                train(first, begun, 3)
                second = Small()
                with tempfile.TemporaryDirectory() as folder:
                    if way == "save":
                        begun.save(folder)
                        resumed = make(second, state=state, lr=7.0, policy="interleave:2")
                        resumed.load(folder)
                        self.assertEqual(resumed.param_groups[0]["lr"], 1e-2)
                    else:
                        file = io.BytesIO()
                        torch.save([first.state_dict(), begun.state_dict()], file)
                        file.seek(0)
                        weights, told = torch.load(file)
                        resumed = make(second, state=state, policy="interleave:2")
                        resumed.load_state_dict(told)
                        second.load_state_dict(weights)
                self.assertEqual(resumed.digest(), begun.digest(), (state, way))
                train(second, resumed, 3, first=3)
                self.assertEqual(resumed.digest(), expected, (state, way))

    def test_a_group_that_comes_later_keeps_the_state(self):
        module = Small()
        optimizer = tandem.optim.AdamW([module.inner.weight, module.outer.weight], lr=1e-2, device_memory="8MiB")
        train(module, optimizer, 3)
        before = optimizer.state_dict()["state"]
        optimizer.add_param_group({"params": [module.norm.weight], "lr": 1e-3})
        after = optimizer.state_dict()["state"]
        self.assertEqual(sorted(before), sorted(after))
        for index, entry in before.items():
            for name in entry:
                self.assertTrue(torch.equal(entry[name], after[index][name]), (index, name))
        start = bits(module.norm.weight)
        train(module, optimizer, 1)
        self.assertNotEqual(bits(module.norm.weight), start)


class Interface(unittest.TestCase):
    def test_state_is_empty_before_the_first_step_and_on_the_host_after(self):
        module = Small()
        optimizer = make(module, policy="device")
        self.assertEqual(optimizer.state_dict()["state"], {})
        self.assertEqual(optimizer.state_dict()["param_groups"][0]["lr"], 1e-2)
        train(module, optimizer, 2)
        for entry in optimizer.state_dict()["state"].values():
            self.assertEqual({v.device.type for v in entry.values()}, {"cpu"})
            self.assertEqual({v.dtype for v in entry.values()}, {torch.float32})

    def test_state_of_torch_goes_on(self):
        theirs = Small(torch.float32)
        reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
        train(theirs, reference, 5)
        ours = copy.deepcopy(theirs)
        optimizer = make(ours)
        optimizer.load_state_dict(reference.state_dict())
        self.assertFalse(optimizer.param_groups[0]["amsgrad"])
        losses, expected = train(ours, optimizer, 5, first=5), train(theirs, reference, 5, first=5)
        for mine, other in zip(losses, expected, strict=True):
            self.assertAlmostEqual(mine, other, delta=1e-4)

    def test_closures_hooks_and_scaler(self):
        module = Small(torch.float32)
        optimizer = make(module)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure():
            optimizer.zero_grad()
            loss = module.loss(batches(1)[0])
            loss.backward()
            return loss

        self.assertGreater(optimizer.step(closure).item(), 1)
        self.assertEqual(seen, ["before", "after"])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        ours, theirs = Small(torch.float32), Small(torch.float32)
        plain, scaled = make(theirs), make(ours)
        for tokens in batches(3):
            theirs.loss(tokens).backward()
            plain.step()
            plain.zero_grad()
            scaler.scale(ours.loss(tokens)).backward()
            scaler.unscale_(scaled)
            scaler.step(scaled)
            scaler.update()
            scaled.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            self.assertLess(relative(a, b), 1e-6)

    def test_what_is_not_finite_changes_nothing(self):
        module = Small()
        optimizer = make(module)
        train(module, optimizer, 2)
        digest = optimizer.digest()
        module.loss(batches(1)[0]).backward()
        module.inner.weight.grad[3, 5] = float("nan")
        with self.assertLogs("tandem", "WARNING") as told:
            optimizer.step()
        self.assertIn("not finite", told.output[0])
        self.assertEqual((optimizer.digest(), optimizer.skipped_steps), (digest, 1))

    def test_a_graph_of_older_weights_is_refused(self):
        module = Small()
        optimizer = make(module)
        loss = module.loss(batches(1)[0])
        loss.backward(retain_graph=True)
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_what_is_written_into_weights_is_taken_over(self):
        for policy in ("device", "host"):
            for state in ("split", "fp32"):
                module = Small()
                optimizer = make(module, policy=policy, state=state)
                train(module, optimizer, 2)
                names = [n for n, _ in module.named_parameters()]
                table = names.index("table.weight")
                kept = optimizer.state_dict()["state"][table]["master"]
                with torch.no_grad():
                    module.inner.bias.fill_(0.5)
                module.outer.weight.data[0].zero_()
                module.norm.weight.data = torch.full((31,), 3.0)
                state_now = optimizer.state_dict()["state"]
                self.assertTrue(torch.equal(state_now[names.index("inner.bias")]["master"].bfloat16(), torch.full((77,), 0.5).bfloat16()))
                self.assertEqual(state_now[names.index("outer.weight")]["master"][0].bfloat16().abs().max(), 0)
                self.assertTrue(torch.equal(state_now[names.index("norm.weight")]["master"], torch.full((31,), 3.0)))
                self.assertTrue(torch.equal(state_now[table]["master"], kept))
                losses = train(module, optimizer, 3)
                self.assertTrue(all(math.isfinite(loss) for loss in losses))

    def test_a_step_without_writes_reads_no_state(self):
        module = Small()
        optimizer = make(module)
        train(module, optimizer, 1)
        with unittest.mock.patch.object(held_parameters.HeldParameters, "_take_write") as take:
            train(module, optimizer, 3, first=1)
            optimizer.digest()
            take.assert_not_called()

    def test_writes_leave_one_digest(self):
        digests = set()
        for policy in ("device", "host", "interleave:2"):
            module = Small()
            optimizer = make(module, policy=policy)
            train(module, optimizer, 2)
            module.inner.weight.data.mul_(0.5)
            module.outer.weight.data[:, ::2] = 0
            train(module, optimizer, 2)
            digests.add(optimizer.digest())
        self.assertEqual(len(digests), 1)

    def test_a_step_takes_over_what_data_was_given(self):
        """A write that no version tells of is found while gradients are given, and leaves the bits of one that it does tell of."""
        for policy in ("device", "host"):
            digests = set()
            for write in (lambda p: p.data.mul_(0.5), lambda p: p.mul_(0.5)):
                module = Small()
                optimizer = make(module, policy=policy)
                train(module, optimizer, 2)
                with torch.no_grad():
                    write(module.inner.weight)
                train(module, optimizer, 2, first=2)
                digests.add(optimizer.digest())
            self.assertEqual(len(digests), 1)

    def test_modules_wait_for_updates_that_run_on(self):
        """With a CPU update of a few thousand parameters a second, step returns long before its end."""
        device = tandem.open_device("host", memory="8MiB", threads=1, update_parameters_per_second=50_000)
        slow, quick = Small(), Small()
        late, prompt = make(slow, policy="host", module=slow, device=device), make(quick, policy="host")
        for tokens in batches(3):
            outputs = []
            for module, optimizer in ((slow, late), (quick, prompt)):
                module.loss(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                outputs.append(module(tokens))
            self.assertTrue(torch.equal(*outputs))
        slow.loss(batches(1)[0]).backward()
        late.step()
        quick.loss(batches(1)[0]).backward()
        prompt.step()
        weights = slow.state_dict()
        for name, value in quick.state_dict().items():
            self.assertTrue(torch.equal(weights[name], value), name)
        self.assertEqual(late.digest(), prompt.digest())

    def test_parameters_have_memory_of_their_own_after_close(self):
        module = Small()
        optimizer = make(module)
        train(module, optimizer, 2)
        values = bits(module.inner.weight)
        optimizer.close()
        optimizer.close()
        self.assertEqual(bits(module.inner.weight), values)
        with self.assertRaisesRegex(tandem.MisuseError, "closed"):
            optimizer.step()
        taking = make(module, gradients="take")
        train(module, taking, 1)
        taking.close()
        module.loss(batches(1)[0]).backward()
        self.assertIs(type(module.inner.weight.grad), torch.Tensor)
        module.zero_grad()
        train(module, make(module), 1)

    def test_weights_outlive_their_optimizer(self):
        module = Small()
        optimizer = make(module, gradients="take", module=module)
        train(module, optimizer, 2)
        optimizer.synchronize()
        values = bits(module.inner.weight)
        del optimizer
        gc.collect()
        self.assertEqual(bits(module.inner.weight), values)
        module.loss(batches(1)[0]).backward()
        module.zero_grad()
        train(module, make(module), 1)

    def test_nothing_is_left_behind(self):
        counts = []
        for _ in range(4):
            module = Small()
            optimizer = make(module, gradients="take", module=module)
            train(module, optimizer, 30)
            del optimizer, module
            gc.collect()
            counts.append(tandem._core._live())
        self.assertEqual(counts[1:], counts[:1] * 3)


class Accelerate(unittest.TestCase):
    def test_ceilings_hold_through_prepare_saving_and_loading(self):
        try:
            from accelerate import Accelerator
        except ImportError:
            self.skipTest("no accelerate")
        digests = []
        for _ in range(2):
            module = Small()
            optimizer = make(module, policy="host")
            device = optimizer.engine.device
            accelerator = Accelerator(cpu=True)
            prepared, wrapped = accelerator.prepare(module, optimizer)
            for step, tokens in enumerate(batches(4)):
                if step == 2:
                    with tempfile.TemporaryDirectory() as folder:
                        accelerator.save_state(folder)
                        for p in module.parameters():
                            p.data.add_(1.0)
                        accelerator.load_state(folder)
                accelerator.backward(prepared.loss(tokens))
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad()
            digests.append(optimizer.digest())
            self.assertLessEqual(device.peak_bytes, 8 << 20)
            optimizer.close()
        straight = Small()
        optimizer = make(straight)
        for tokens in batches(4):
            straight.loss(tokens).backward()
            torch.nn.utils.clip_grad_norm_(straight.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.assertEqual(set(digests), {optimizer.digest()})


class Misuse(unittest.TestCase):
    def refuses(self, call, text, error=tandem.MisuseError):
        with self.assertRaisesRegex(error, text) as caught:
            call()
        self.assertNotIn("\n", str(caught.exception))

    def test_making_one(self):
        module = Small()
        self.refuses(lambda: make(module, lr=-1.0), "lr is -1", ValueError)
        self.refuses(lambda: make(module, betas=(0.9, 1.0)), "betas", ValueError)
        self.refuses(lambda: make(module, amsgrad=True), "no amsgrad", tandem.UsageError)
        self.refuses(lambda: make(module, gradients="give"), "'keep' or 'take'", tandem.UsageError)
        self.refuses(lambda: make(module, accumulation=2), "accumulation=2", tandem.UsageError)
        self.refuses(lambda: make(module, device_memory="16KiB"), "MiB stay on the device", tandem.PlanError)
        self.refuses(lambda: make(module, state="fp16"), "fp16", tandem.UsageError)
        self.refuses(lambda: make(Small(torch.float16)), "float16.*to\\(torch.bfloat16\\)")
        self.refuses(lambda: make(torch.nn.Linear(3, 4, device="meta")), "load its weights first")
        self.refuses(lambda: make(module.requires_grad_(False)), "no parameter requires a gradient")
        one = torch.nn.Parameter(torch.zeros(8))
        self.refuses(lambda: tandem.optim.AdamW([one, torch.nn.Parameter(one.detach()[2:5])]), "share memory")
        complex_one = torch.nn.Parameter(torch.zeros(8, dtype=torch.complex64))
        self.refuses(lambda: tandem.optim.AdamW([complex_one]), "complex64")

    def test_two_optimizers_of_one_parameter(self):
        module = Small()
        first = make(module)
        self.refuses(lambda: make(module), "belongs to another optimizer")
        first.close()
        make(module).close()

    def test_parameters_that_change(self):
        for change, text in ((lambda m: m.float(), "float32.*make the optimizer"), (lambda m: m.half(), "float16")):
            module = Small()
            optimizer = make(module)
            module.loss(batches(1)[0]).backward()
            digest = optimizer.digest()
            change(module)
            self.refuses(optimizer.step, text)
            self.assertEqual(optimizer.engine.state_digest(), digest)

    def test_steps(self):
        module = Small()
        optimizer = make(module)
        self.refuses(optimizer.step, "call backward first")
        module.loss(batches(1)[0]).backward()
        optimizer.param_groups[0]["betas"] = (0.9, 1.5)
        digest = optimizer.digest()
        self.refuses(optimizer.step, "betas 0.9 and 1.5")
        self.assertEqual(optimizer.digest(), digest)
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        optimizer.step()
        sparse = torch.nn.Embedding(9, 5, sparse=True)
        other = make(sparse)
        sparse(torch.tensor([1, 2])).sum().backward()
        self.refuses(other.step, "sparse")

    def test_copies(self):
        optimizer = make(Small())
        self.refuses(lambda: copy.deepcopy(optimizer), "state_dict\\(\\), or save")
        self.refuses(lambda: pickle.dumps(optimizer), "state_dict\\(\\), or save")

    def test_state_of_another_optimizer(self):
        module = Small(torch.float32)
        optimizer = make(module)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        train(module, sgd, 1)
        self.refuses(lambda: optimizer.load_state_dict(sgd.state_dict()), "not one of AdamW", ValueError)

    def test_taken_gradients(self):
        module = Small()
        optimizer = make(module, gradients="take")
        self.refuses(optimizer.step, "call backward first")
        module.loss(batches(1)[0]).backward()
        for use in (lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0), lambda: module.inner.weight.grad.sum(),
                    lambda: module.inner.weight.grad.mul_(0.5), lambda: torch.amp.GradScaler("cpu").unscale_(optimizer)):
            try:
                use()
            except tandem.MisuseError as error:
                self.assertIn("has been taken", str(error))
            except AssertionError as error:  # the scaler asks for a scaled loss first
                self.assertIn("scale", str(error))
            else:
                self.fail("a taken gradient was used")
        self.refuses(lambda: module.loss(batches(1)[0]).backward(), "accumulation=2")
        self.refuses(optimizer.step, "call backward first")
        digest = optimizer.digest()
        module.loss(batches(1)[0]).backward()
        optimizer.zero_grad()
        self.assertEqual(optimizer.digest(), digest)
        train(module, optimizer, 2)

    def test_an_exception_in_backward_drops_nothing_but_the_step(self):
        module = Small()
        optimizer = make(module, gradients="take")
        expected = make(Small())
        optimizer.zero_grad()
        handle = module.inner.register_full_backward_hook(lambda *_: 1 / 0)
        with self.assertRaises(ZeroDivisionError):
            module.loss(batches(1)[0]).backward()
        handle.remove()
        optimizer.zero_grad()
        self.assertEqual(optimizer.digest(), expected.digest())
        train(module, optimizer, 1)


if __name__ == "__main__":
    unittest.main()
