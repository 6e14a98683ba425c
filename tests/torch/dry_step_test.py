"""reserved_device_memory="auto": what a dry step says of activations is what a real step takes, and it leaves nothing behind."""
import pathlib
import tempfile
import unittest

from sandbox import tandem, torch
from stream_test import ROWS, WIDTH, WORDS, Model, batches, stream, train

from tandem.pytorch.live_bytes import LiveBytes

ROUNDED = 256  # bytes that the plan rounds to


def reserved(model):
    """Bytes that were measured: without the weights of loose parameters."""
    row = next(row.bytes for row in model.tandem.plan.entries if row.name == "reserved by the caller")
    return row - sum(p.numel() * p.element_size() for p in loose(model))


def loose(model):
    return [member.parameter for unit in model.tandem._runtime.units if unit.module is None for member in unit.members]


def counted(model, step):
    """Peak bytes of a real step, its update among them."""
    optimizer = model.tandem.optimizer()
    with LiveBytes(torch.device("cpu")) as live:
        step(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return live.peak


class Bytes(unittest.TestCase):
    """The counter against sums made by hand."""

    def test_known_tensors(self):
        given = torch.zeros(1000)
        with LiveBytes(torch.device("cpu")) as live:
            view = given[10:]
            self.assertEqual(live.now, 0)
            first = view + 1  # 990 floats, in units of 512 bytes
            self.assertEqual(live.now, 4096)
            part = first.view(99, 10)[3]
            del first
            self.assertEqual(live.now, 4096)
            second = torch.cat([given, given])
            del part
            self.assertEqual((live.now, live.peak), (8192, 12288))
            del second
            self.assertEqual(live.now, 0)

    def test_a_backward(self):
        layer = torch.nn.Linear(128, 256, bias=False)
        with LiveBytes(torch.device("cpu")) as live:
            x = torch.randn(64, 128)
            y = layer(x)
            self.assertEqual(live.now, 64 * (128 + 256) * 4)
            y.sum().backward()
            del x, y
            self.assertEqual(live.now, 128 * 256 * 4)  # the gradient
        self.assertGreaterEqual(live.peak, 64 * (128 + 2 * 256) * 4)


class Reserve(unittest.TestCase):
    def check(self, make, step, example=None, **options):
        model = stream(make(), reserved_device_memory="auto", example=step if example is None else example,
                       **{"device_memory": "64MiB", **options})
        told, taken = reserved(model), counted(model, step)
        self.assertGreaterEqual(told, taken)
        self.assertLess(told - taken, ROUNDED)
        return told

    def test_what_it_says_is_taken(self):
        def step(tokens):
            return lambda model: model.loss(tokens)
        short, long = (torch.randint(0, WORDS, (rows, ROWS)) for rows in (8, 64))
        for resident in ((), ("head",)):
            told = {(recompute, len(tokens)): self.check(Model, step(tokens), recompute=recompute, resident=resident)
                    for recompute in ("units", "none") for tokens in (short, long)}
            self.assertGreater(told["none", 64], 1.5 * told["units", 64])
            self.assertGreater(told["units", 64], 4 * told["units", 8])

    def test_autocast(self):
        def step(model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model.loss(torch.zeros(32, ROWS, dtype=torch.int64))
        self.check(Model, step)

    def test_models_of_transformers(self):
        try:
            import transformers
        except ImportError:
            self.skipTest("no transformers")
        common = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "vocab_size": 128, "max_position_embeddings": 64}
        tokens = torch.randint(0, 128, (8, 48))
        batch = {"input_ids": tokens, "labels": tokens}
        for config in (transformers.LlamaConfig(**common, attention_dropout=0.1), transformers.MixtralConfig(**common, num_local_experts=4)):
            def make(config=config):
                torch.manual_seed(0)
                return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for recompute in ("units", "none"):
                self.check(make, lambda model: model.train()(**batch).loss, batch, recompute=recompute)
            with tempfile.TemporaryDirectory() as folder:  # weights that are still in files
                transformers.utils.logging.disable_progress_bar()
                make().save_pretrained(pathlib.Path(folder))
                with tandem.empty_parameters():
                    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
                if config.model_type == "llama":  # experts that tokens go to depend on weights
                    self.check(lambda model=model: model, lambda model: model.train()(**batch).loss, batch, source=folder, device="host",
                               resident=["lm_head"])

    def test_it_leaves_nothing_behind(self):
        class Counts(Model):
            def __init__(self):
                super().__init__()
                self.statistics = torch.nn.BatchNorm1d(ROWS - 1, affine=False)
                self.position.grad = torch.ones_like(self.position)

            def forward(self, *arguments, **how):
                return self.statistics(super().forward(*arguments, **how))
        plain, model = Counts(), Counts().eval()
        state = torch.get_rng_state()
        stream(model, device_memory="8MiB", reserved_device_memory="auto", example=lambda model: model.loss(batches(1)[0]))
        self.assertTrue(torch.equal(torch.get_rng_state(), state))
        self.assertFalse(any(part.training for part in model.modules()))
        for (name, mine), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            self.assertTrue(torch.equal(mine, other), name)
        self.assertTrue(all(p.grad is None for name, p in model.named_parameters() if name != "position"))
        self.assertTrue(torch.equal(model.position.grad, plain.position.grad))
        stream(plain, device_memory="8MiB")
        for each in (model, plain):
            each.train()
            each.position.grad = None
        self.assertEqual(*(train(each, each.tandem.optimizer(lr=1e-2), 3) for each in (model, plain)))

    def test_a_plan_without_room(self):
        def step(model):
            return model.loss(torch.zeros(2000, ROWS, dtype=torch.int64))
        with self.assertRaises(tandem.PlanError) as caught:
            stream(Model(), device_memory="1MiB", reserved_device_memory="auto", example=step)
        self.assertIn("reserved by the caller", caught.exception.table)

    def test_wrong_use(self):
        for options in ({"reserved_device_memory": "auto"}, {"example": batches(1)[0]}):
            with self.assertRaisesRegex(tandem.UsageError, "go together"):
                stream(Model(), **options)
        with self.assertRaisesRegex(tandem.UsageError, "has no gradient"):
            stream(Model(), reserved_device_memory="auto", example=lambda model: torch.zeros(WIDTH))
        model = Model()
        with self.assertRaises(ZeroDivisionError):
            stream(model, reserved_device_memory="auto", example=lambda model: 1 / 0)
        stream(model)  # the module is as it was


if __name__ == "__main__":
    unittest.main()
