"""Modules that stay on the device: others read their weights, and a tie is one parameter with one gradient."""
import unittest

from sandbox import POLICIES, tandem, torch
from stream_test import ROWS, WIDTH, WORDS, Model, batches, relative, stream, train


class Reads(Model):
    """Computes with the weights of its head outside of it, as fused losses do. `tied`: they are the embedding's, too."""

    def __init__(self, tied=True, dtype=torch.float32, blocks=3):
        super().__init__(blocks, dtype)
        if not tied:
            torch.manual_seed(3)
            self.head.weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH, dtype=dtype))

    def forward(self, tokens, rare=False, record=None):
        x = self.embed(tokens) + self.position[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rare=rare, record=record)
        return torch.nn.functional.linear(self.norm(x), self.head.weight)


class Resident(unittest.TestCase):
    def test_gradients(self):
        for tied in (True, False):
            for recompute in ("units", "none"):
                plain, model = Reads(tied), stream(Reads(tied), resident=["head"], recompute=recompute, accumulation=2)
                optimizer = model.tandem.optimizer()
                for each in (plain, model):
                    for number, tokens in enumerate(batches(2)):
                        torch.manual_seed(number)
                        each.loss(tokens).backward()
                optimizer.step()
                state = optimizer.state_dict()["state"]
                self.assertEqual([name for name, _ in model.named_parameters()], [name for name, _ in plain.named_parameters()])
                for index, (name, parameter) in enumerate(plain.named_parameters()):
                    if parameter.grad is not None:
                        self.assertLess(relative(state[index]["exp_avg"], 0.1 * parameter.grad), 1e-5, (name, tied, recompute))

    def test_without_it_the_weights_are_not_there(self):
        model = stream(Reads(tied=False))
        with self.assertRaisesRegex(tandem.MisuseError, r"'head.weight' is used outside .* by resident=\["):
            model.loss(batches(1)[0])

    def test_one_digest_under_every_plan(self):
        for tied in (True, False):
            digests = {}
            for policy in POLICIES:
                model = stream(Reads(tied, torch.bfloat16), resident=["head", "blocks.1.rare"], policy=policy, accumulation=2)
                optimizer = model.tandem.optimizer(lr=1e-2)
                train(model, optimizer, 3, passes=2, clip=lambda _, o: o.clip_grad_norm_(0.5))
                digests[policy] = optimizer.digest()
                model.tandem.close()
            self.assertEqual(len(set(digests.values())), 1, digests)

    def test_parts_of_units(self):
        """A resident part of a block is used by the block, whose other parameters come and go."""
        plain, model = Reads(), stream(Reads(), resident=["blocks.1.rare", "head"])
        self.assertIn("blocks.1", model.tandem.units)
        reference, optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2), model.tandem.optimizer(lr=1e-2)
        for mine, other in zip(train(model, optimizer, 6), train(plain, reference, 6), strict=True):
            self.assertAlmostEqual(mine, other, delta=1e-4)
        self.assertFalse(torch.equal(model.blocks[1].rare.weight, Reads().blocks[1].rare.weight))

    def test_weights_between_steps_are_the_new_ones(self):
        model = stream(Reads(dtype=torch.bfloat16), resident=["head"], policy="host")
        optimizer = model.tandem.optimizer(lr=1e-2)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            now = torch.from_numpy(model.tandem.engine.read("loose.embed.weight")).view(WORDS, WIDTH)
            self.assertLess(relative(model.head.weight.detach().float(), now), 4e-3)
            self.assertTrue(torch.equal(model.head.weight, model.state_dict()["head.weight"]))
        self.assertIs(model.head.weight, model.embed.weight)
        state = model.state_dict()
        self.assertEqual(state["head.weight"].data_ptr(), state["embed.weight"].data_ptr())

    def test_writes_are_taken_over(self):
        model = stream(Reads(), resident=["head"])
        with torch.no_grad():
            model.head.weight.mul_(2.0)
        optimizer = model.tandem.optimizer(lr=0.0)
        train(model, optimizer, 1)
        self.assertTrue(torch.equal(model.state_dict()["embed.weight"], 2 * Reads().embed.weight))

    def test_its_memory_is_planned(self):
        def reserved(**options):
            rows = stream(Reads(), **options).tandem.plan.entries
            return next(row.bytes for row in rows if "reserved" in row.name or "caller" in row.name)
        position, head = ROWS * WIDTH * 8, WORDS * WIDTH * 8  # weights and gradients in fp32
        for options, expected in (({}, position), ({"resident": ["head"]}, position + head), ({"reserved_device_memory": 1000}, position + 1000)):
            self.assertEqual(reserved(**options), -(-expected // 256) * 256)  # the plan rounds up so

    def test_a_frozen_module_in_the_least_memory(self):
        model, plain = stream(Reads(blocks=9).requires_grad_(False), resident=["head"], device_memory="least"), Reads(blocks=9)
        with torch.no_grad():
            self.assertTrue(torch.equal(model.eval()(batches(1)[0]), plain.eval()(batches(1)[0])))
        weights = sum(p.numel() for p in plain.parameters()) * 4
        self.assertLess(model.tandem.engine.device.peak_bytes, 0.4 * weights)

    def test_names_that_will_not_do(self):
        with self.assertRaisesRegex(tandem.MisuseError, "resident: the module has no part 'foot'"):
            stream(Reads(), resident=["foot"])
        with self.assertRaisesRegex(tandem.UsageError, "resident='head': a list"):
            stream(Reads(), resident="head")


if __name__ == "__main__":
    unittest.main()
