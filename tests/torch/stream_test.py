"""tandem.stream: torch's gradients, one digest under every plan, and placeholders that never lie."""
import contextlib
import copy
import gc
import pickle
import tempfile
import unittest

from sandbox import POLICIES, STATES, tandem, torch

WIDTH, WORDS, ROWS = 24, 53, 11


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.rare = torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)
        self.norm_of = []

    def forward(self, x, *, rare=False, record=None):
        h = torch.nn.functional.gelu(self.wide(self.norm(x)))
        if record is not None:
            record.append(h.pow(2).mean())
        x = x + self.drop(self.narrow(h))
        return x + self.rare(x) if rare else x


class Model(torch.nn.Module):
    """Tied head, a parameter of its own, dropout, a loss that leaves blocks by a list, blocks that only some inputs use."""

    def __init__(self, blocks=3, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.position = torch.nn.Parameter(0.1 * torch.randn(ROWS, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens, rare=False, record=None, repeats=1):
        x = self.embed(tokens) + self.position[:tokens.shape[1]]
        for _ in range(repeats):
            for block in self.blocks:
                x = block(x, rare=rare, record=record)
        return self.head(self.norm(x))

    def loss(self, tokens, **how):
        record = []
        logits = self(tokens[:, :-1], record=record, **how).float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
        return loss + 0.3 * torch.stack(record).sum().float()


def batches(count, seed=5):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, WORDS, (3, ROWS), generator=random) for _ in range(count)]


def stream(model, **options):
    return tandem.stream(model, **{"device_memory": "1MiB", **options})


def streamed(lr=1e-2, dtype=torch.float32, blocks=3, **options):
    model = stream(Model(blocks, dtype), **options)
    return model, model.tandem.optimizer(lr=lr)


def train(model, optimizer, steps=4, first=0, passes=1, clip=None, **how):
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for number, tokens in enumerate(batches(passes, seed=step)):
            torch.manual_seed(1000 * step + number)
            loss = model.loss(tokens, rare=step % 2 == 1, **how) / passes
            loss.backward()
            total += loss.item()
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


class Mathematics(unittest.TestCase):
    def check_gradients(self, how=None, passes=1, **options):
        """The gradients of one step, which first moments have a tenth of, beside PyTorch's."""
        plain = Model()
        model, optimizer = streamed(accumulation=4 * passes, **options)
        for each in (plain, model):
            for number, tokens in enumerate(batches(passes)):
                torch.manual_seed(number)
                each.loss(tokens, **(how or {})).backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        for index, (name, parameter) in enumerate(plain.named_parameters()):
            if parameter.grad is None:
                self.assertNotIn(index, state, name)
            else:
                self.assertLess(relative(state[index]["exp_avg"], 0.1 * parameter.grad), 1e-5, name)

    def test_gradients(self):
        for recompute in ("units", "none"):
            self.check_gradients(recompute=recompute)
            self.check_gradients({"rare": True}, passes=3, recompute=recompute)

    def test_units_that_are_used_several_times_in_a_pass(self):
        for recompute in ("units", "none"):
            self.check_gradients({"repeats": 3}, recompute=recompute)

    def test_training_follows_torch(self):
        plain = Model()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        expected = train(plain, reference, 12, clip=lambda m, _: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0))
        losses = train(*streamed(), 12, clip=lambda _, o: o.clip_grad_norm_(1.0))
        self.assertGreater(expected[0] - expected[-1], 1.0)
        for mine, other in zip(losses, expected, strict=True):
            self.assertAlmostEqual(mine, other, delta=1e-3)

    def test_two_forwards_before_one_backward(self):
        plain = Model()
        model, optimizer = streamed(accumulation=2)
        first, second = batches(2)
        for each in (plain, model):
            each.eval()
            (each.loss(first) * each.loss(second)).backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        for index, (name, parameter) in enumerate(plain.named_parameters()):
            if parameter.grad is not None:
                self.assertLess(relative(state[index]["exp_avg"], 0.1 * parameter.grad), 1e-5, name)

    def test_a_first_unit_with_a_parameter_that_has_no_gradient(self):
        """Nothing of its inputs tells when its backward is done: the end of the whole backward does."""
        class Embedding(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(2)
                self.table, self.unused = torch.nn.Parameter(torch.randn(WORDS, WIDTH)), torch.nn.Parameter(torch.ones(3))

            def forward(self, tokens):
                return self.table[tokens]

        def make():
            return torch.nn.Sequential(Embedding(), torch.nn.Linear(WIDTH, 7), torch.nn.Linear(7, 3))
        plain, model = make(), stream(make())
        optimizer = model.tandem.optimizer()
        for each in (plain, model):
            each(batches(1)[0]).pow(2).mean().backward()
        optimizer.step()
        self.assertLess(relative(optimizer.state_dict()["state"][0]["exp_avg"], 0.1 * plain[0].table.grad), 1e-5)
        self.assertNotIn(1, optimizer.state_dict()["state"])

    def test_statistics_move_once(self):
        def make():
            torch.manual_seed(0)
            return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(3)))
        plain, model = make(), stream(make(), units=["0", "1", "2"])
        optimizer = model.tandem.optimizer()
        data = torch.randn(16, 8)
        for each in (plain, model):
            each(data).pow(2).sum().backward()
        optimizer.step()
        for (name, mine), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            self.assertTrue(torch.equal(mine, other), name)

    def check_autocast(self, forward, backward, tolerance):
        """Gradients beside PyTorch's, of a forward and a backward within these contexts."""
        plain, (model, optimizer) = Model(), streamed()
        for each in (plain, model):
            torch.manual_seed(0)
            with forward():
                loss = each.loss(batches(1)[0])
            with backward():
                loss.backward()
        optimizer.step()
        for index, (name, parameter) in enumerate(plain.named_parameters()):
            if parameter.grad is not None:
                self.assertLess(relative(optimizer.state_dict()["state"][index]["exp_avg"], 0.1 * parameter.grad), tolerance, name)

    def test_autocast(self):
        def within(enabled=True):
            return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
        self.check_autocast(within, contextlib.nullcontext, 1e-2)
        self.check_autocast(contextlib.nullcontext, within, 1e-5)  # computed again in the forward's types, not in backward's
        self.check_autocast(lambda: within(enabled=False), within, 1e-5)


class Bits(unittest.TestCase):
    def test_one_digest_under_every_plan(self):
        for dtype in (torch.float32, torch.bfloat16):
            for state in STATES if dtype is torch.bfloat16 else ("split",):
                digests = {}
                for policy in POLICIES:
                    for recompute in ("units", "none"):
                        model, optimizer = streamed(dtype=dtype, policy=policy, state=state, recompute=recompute, accumulation=2)
                        train(model, optimizer, 3, passes=2, clip=lambda _, o: o.clip_grad_norm_(0.5))
                        digests[policy, recompute] = optimizer.digest()
                        self.assertLessEqual(model.tandem.engine.device.peak_bytes, 1 << 20)
                        model.tandem.close()
                self.assertEqual(len(set(digests.values())), 1, digests)

    def test_resume(self):
        expected = (whole := streamed())[1]
        train(*whole, 6)
        for way in ("save", "state_dict"):
            begun = streamed(policy="host")
            train(*begun, 3)
            resumed = streamed(policy="interleave:2", lr=5.0)
            with tempfile.TemporaryDirectory() as folder:
                if way == "save":
                    begun[1].save(folder)
                    resumed[1].load(folder)
                else:
                    resumed[0].load_state_dict(begun[0].state_dict())
                    resumed[1].load_state_dict(begun[1].state_dict())
            self.assertEqual(resumed[1].digest(), begun[1].digest())
            train(*resumed, 3, first=3)
            self.assertEqual(resumed[1].digest(), expected.digest(), way)

    def test_groups(self):
        plain = Model()
        model = stream(Model(), policy="host")
        def groups(of):
            return [{"params": [p for p in of.parameters() if p.dim() > 1], "weight_decay": 0.3},
                    {"params": [p for p in of.parameters() if p.dim() == 1], "lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.0}]
        optimizer, reference = model.tandem.optimizer(groups(model), lr=1e-2), torch.optim.AdamW(groups(plain), lr=1e-2)
        train(plain, reference, 5), train(model, optimizer, 5)
        for (name, mine), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            self.assertLess(relative(mine, other), 1e-5, name)

    def test_parameters_that_are_not_given_stay(self):
        model = stream(Model())
        start = model.state_dict()
        optimizer = model.tandem.optimizer([model.blocks[1].wide.weight, model.position])
        train(model, optimizer, 3)
        for name, value in model.state_dict().items():
            self.assertEqual(torch.equal(value, start[name]), name not in ("blocks.1.wide.weight", "position"), name)
        self.assertTrue(model.tandem.engine.read("blocks.1.wide.weight", "m").any())
        self.assertFalse(model.tandem.engine.read("blocks.0.wide.weight", "m").any())


class Modules(unittest.TestCase):
    def test_evaluation_and_training_alternate(self):
        model, optimizer = streamed(policy="host")
        plain = Model()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            train(model, optimizer, 1, first=step), train(plain, reference, 1, first=step)
            for each in (model, plain):
                each.eval()
            with torch.no_grad():
                self.assertAlmostEqual(model.loss(batches(1)[0]).item(), plain.loss(batches(1)[0]).item(), delta=1e-4)
            for each in (model, plain):
                each.train()
        loss = model.loss(batches(1)[0])
        with torch.no_grad():
            model.loss(batches(1)[0])  # inside a step
        loss.backward()
        optimizer.step()

    def test_a_part_alone(self):
        model, _ = streamed()
        plain = Model()
        x = torch.randn(2, WIDTH)
        model.eval(), plain.eval()
        with torch.no_grad():
            self.assertTrue(torch.equal(model.blocks[0](x), plain.blocks[0](x)))

    def test_state_dict_has_the_weights(self):
        model, optimizer = streamed(dtype=torch.bfloat16, policy="stream")
        plain = Model(dtype=torch.bfloat16)
        mine, other = model.state_dict(), plain.state_dict()
        self.assertEqual(list(mine), list(other))
        for name in mine:
            self.assertTrue(torch.equal(mine[name], other[name]), name)
        self.assertEqual(mine["head.weight"].data_ptr(), mine["embed.weight"].data_ptr())
        train(model, optimizer, 2)
        second = stream(Model(dtype=torch.bfloat16))
        second.load_state_dict(model.state_dict())
        for name, value in second.state_dict().items():
            self.assertTrue(torch.equal(value, model.state_dict()[name]), name)
            self.assertFalse(torch.equal(value, other[name]) and "rare" not in name, name)

    def test_generation_between_steps(self):
        transformers = self.transformers()
        config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64,
                                          max_position_embeddings=64)
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(transformers.AutoModelForCausalLM.from_config(config))
        plain, model = models[0], stream(models[1], policy="host")
        tokens = torch.arange(20).view(2, 10)
        for each, optimizer in ((plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)), (model, model.tandem.optimizer(lr=1e-2))):
            for _ in range(3):
                each.train()(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        made = [each.eval().generate(tokens[:, :4], max_new_tokens=12, do_sample=False) for each in models]
        self.assertTrue(torch.equal(*made))

    def transformers(self):
        try:
            import transformers
        except ImportError:
            self.skipTest("no transformers")
        return transformers

    def test_compiled_units(self):
        plain, compiled = Model(), Model()
        for i, block in enumerate(compiled.blocks):
            compiled.blocks[i] = torch.compile(block, backend="aot_eager")
        model = stream(compiled)
        optimizer = model.tandem.optimizer()
        losses = []
        for each in (plain.eval(), model.eval()):
            logits = each(batches(1)[0])
            losses.append(logits.pow(2).mean())
            losses[-1].backward()
        self.assertAlmostEqual(losses[0].item(), losses[1].item(), places=5)
        optimizer.step()
        gradients = optimizer.state_dict()["state"]
        for index, (name, parameter) in enumerate(plain.named_parameters()):
            if parameter.grad is not None:
                self.assertLess(relative(gradients[index]["exp_avg"], 0.1 * parameter.grad), 1e-4, name)

    def test_gathered(self):
        model, optimizer = streamed(dtype=torch.bfloat16)
        for name in ("blocks.1.wide.weight", "position", "head.weight"):
            with model.tandem.gathered(name) as values:
                values[0] = 2.5
            with model.tandem.gathered(name) as values:
                self.assertTrue((values[0] == 2.5).all())
        self.assertTrue((model.state_dict()["embed.weight"][0] == 2.5).all())
        train(model, optimizer, 1)

    def test_what_is_known_without_weights(self):
        model, _ = streamed()
        plain = Model()
        self.assertEqual(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in plain.parameters()))
        self.assertEqual([n for n, _ in model.named_parameters()], [n for n, _ in plain.named_parameters()])
        self.assertEqual({p.dtype for p in model.parameters()}, {torch.float32})
        self.assertEqual(model.tandem.units, ["loose", "embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"])
        self.assertIn("StreamedParameter", repr(model.embed.weight))

    def test_frozen_parts(self):
        plain, other = Model(), Model()
        for each in (plain, other):
            each.embed.requires_grad_(False)
            each.blocks[0].requires_grad_(False)
        model = stream(other, policy="host")
        start = model.state_dict()
        optimizer, reference = model.tandem.optimizer(lr=1e-2), torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
        train(plain, reference, 3), train(model, optimizer, 3)
        for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            self.assertLess(relative(mine, theirs), 1e-5, name)
            if name.startswith(("embed", "blocks.0", "head")):
                self.assertTrue(torch.equal(mine, start[name]), name)

    def test_nothing_is_left_behind(self):
        counts = []
        for _ in range(4):
            model, optimizer = streamed()
            train(model, optimizer, 20)
            del model, optimizer
            gc.collect()
            gc.collect()  # first frees modules, then what only their graphs kept
            counts.append(tandem._core._live())
        self.assertEqual(counts[1:], counts[:1] * 3)

    def test_an_exception_in_forward_or_backward_drops_the_step_alone(self):
        for place in ("forward", "backward", "the end of backward"):
            model, optimizer = streamed(policy="interleave:2")
            expected = streamed(policy="host")
            train(model, optimizer, 1), train(*expected, 1)
            part = model.blocks[1].wide

            def fail(*_, error=KeyboardInterrupt if place == "backward" else ZeroDivisionError):
                raise error
            handle = {"forward": part.register_forward_hook, "backward": part.register_full_backward_hook,
                      "the end of backward": model.embed.register_full_backward_hook}[place](fail)
            kept = None
            try:
                model.loss(batches(1)[0]).backward()
            except (ZeroDivisionError, KeyboardInterrupt) as error:
                kept = error  # a notebook keeps the last error
            handle.remove()
            self.assertIsNotNone(kept)
            optimizer.zero_grad()
            self.assertEqual(optimizer.digest(), expected[1].digest(), place)
            train(model, optimizer, 2, first=1), train(*expected, 2, first=1)
            self.assertEqual(optimizer.digest(), expected[1].digest(), place)


class Misuse(unittest.TestCase):
    def refuses(self, call, text, error=tandem.MisuseError):
        with self.assertRaisesRegex(error, text) as caught:
            call()
        self.assertNotIn("\n", str(caught.exception))

    def test_placeholders_never_lie(self):
        model, _ = streamed()
        weight = model.embed.weight
        for use in (lambda: weight.sum(), lambda: weight + 1, lambda: weight[0], lambda: weight.mean(),
                    lambda: weight.clone(), lambda: weight.cpu() + 0, lambda: torch.nn.functional.embedding(torch.tensor([1]), weight),
                    lambda: model.double(), lambda: torch.equal(weight, weight), lambda: weight.data.mul_(2)):
            self.refuses(use, "'embed.weight'")
        self.refuses(lambda: copy.deepcopy(model), "not copied")
        self.refuses(lambda: pickle.dumps(model.embed), "not pickled")

    def test_what_cannot_be_streamed(self):
        self.refuses(lambda: tandem.stream(torch.nn.Linear(3, 4)), "no parts")
        self.refuses(lambda: stream(Model(), units=["blocks.0", "blocks.0.wide"]), "have a module in common")
        self.refuses(lambda: stream(Model(), units=["blocks.9"]), "no part 'blocks.9'")
        self.refuses(lambda: stream(Model(), units="all"), "'auto', or a list", tandem.UsageError)
        self.refuses(lambda: stream(Model(), recompute="some"), "'units' or 'none'", tandem.UsageError)
        self.refuses(lambda: stream(Model(dtype=torch.float16)), "float16")
        self.refuses(lambda: stream(torch.nn.DataParallel(Model())), "DataParallel")
        self.refuses(lambda: stream(Model(), device_memory="1KiB"), "", tandem.PlanError)
        model = stream(Model())
        self.refuses(lambda: stream(model), "streamed already")
        self.refuses(lambda: stream(torch.compile(Model())), "the module is compiled")
        inside = Model()
        inside.blocks[1].compile()
        self.refuses(lambda: stream(inside), "unit 'blocks.1' was compiled")

    def test_units_that_keep_weights(self):
        class Keeps(Block):
            def forward(self, x, **_):
                self.kept = self.wide.weight.t()
                return x + self.narrow(x @ self.kept)
        plain = Model()
        plain.blocks[1] = Keeps()
        model = stream(plain)
        self.refuses(lambda: model.loss(batches(1)[0]), "unit 'blocks.1' keeps its weights")

    def test_weights_of_another_unit(self):
        class Borrows(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

            def forward(self, x):
                return self.blocks[1](self.blocks[0](x)) @ self.blocks[0].wide.weight.t()
        model = stream(Borrows())
        self.refuses(lambda: model(torch.randn(2, WIDTH)), "'blocks.0.wide.weight' is used outside of the forward of its unit")

    def test_units_that_compute_something_else(self):
        class Counts(Block):
            calls = 0

            def forward(self, x, **_):
                self.calls += 1
                return x + self.narrow(torch.tanh(self.wide(x))) if self.calls % 2 else x + self.narrow(self.wide(x).exp().sin())
        plain = Model()
        plain.blocks[1] = Counts()
        model = stream(plain)
        self.refuses(lambda: model.loss(batches(1)[0]).backward(), "unit 'blocks.1' computes something else")

    def test_inputs_that_change(self):
        class Spoils(Block):
            def forward(self, x, *, record=None, **_):
                out = x + self.narrow(self.wide(x))
                return out
        plain = Model()
        plain.blocks[1] = Spoils()
        model = stream(plain)
        mask = torch.ones(3, ROWS - 1, WIDTH)
        inner = model.blocks[1]
        out = inner(mask)
        mask.mul_(2)
        self.refuses(out.sum().backward, "input 0 of unit 'blocks.1' was changed in place")

    def test_steps(self):
        model, optimizer = streamed()
        self.refuses(optimizer.step, "call backward first")
        loss = model.loss(batches(1)[0])
        self.refuses(optimizer.step, "call backward first")
        loss.backward()
        self.refuses(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), "has been taken by the engine")
        for one in (model.position, model.blocks[0].wide.weight):
            self.refuses(lambda one=one: torch.nn.utils.clip_grad_norm_([one], 1.0), "has been taken by the engine")
        with self.assertRaisesRegex(RuntimeError, "second time"):
            loss.backward()
        optimizer.zero_grad()
        late = model.loss(batches(1)[0])
        optimizer.zero_grad()
        self.refuses(late.backward, "outside")
        optimizer.zero_grad()
        train(model, optimizer, 1)
        model.loss(batches(1)[0]).backward()
        self.refuses(lambda: model.loss(batches(1)[0]).backward(), "accumulation=2")
        optimizer.zero_grad()
        self.refuses(lambda: model.tandem.optimizer(), "has an optimizer already")
        model.loss(batches(1)[0]).backward()
        self.refuses(optimizer.digest, "inside a step")
        # The error is load_state_dict's, with a line for each parameter.
        with self.assertRaisesRegex(RuntimeError, "is written inside a step"):
            model.load_state_dict(Model().state_dict())
        optimizer.zero_grad()

    def test_after_close(self):
        model, optimizer = streamed()
        train(model, optimizer, 1)
        weights = model.state_dict()
        model.tandem.close()
        self.refuses(optimizer.step, "closed")
        self.refuses(lambda: model.embed.weight.sum(), "'embed.weight'")
        self.assertEqual(len(weights), len(Model().state_dict()))

    def test_another_parameter(self):
        model = stream(Model())
        self.refuses(lambda: model.tandem.optimizer([torch.nn.Parameter(torch.zeros(3))]), "not one of the streamed module")


if __name__ == "__main__":
    unittest.main()
