"""transformers.Trainer over the engine: PyTorch's losses and norms, and a resume in the middle of an epoch to the bit."""
import contextlib
import io
import pathlib
import tempfile
import unittest
import warnings

from sandbox import tandem, torch

try:
    import accelerate  # noqa: F401
    import transformers
except ImportError:
    print("skipped: no transformers, or no accelerate")
    raise SystemExit(77) from None

from reference import WithMasters

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CONFIG = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                                  vocab_size=64, max_position_embeddings=64, attention_dropout=0.1)


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)


def data(count=50):
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 16, (16,), generator=random) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


MODES = {"optimizer": {"policy": "host"}, "stream": {"stream": True, "policy": "host"}, "stream, interleaved": {"stream": True, "policy": "interleave:2"}}


class Trainer(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def arguments(self, **more):
        """Three passes a step, of which the last of an epoch of 13 batches has one."""
        return transformers.TrainingArguments(**{
            "output_dir": str(self.folder), "max_steps": 12, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "learning_rate": 6e-3, "max_grad_norm": 0.5, "save_strategy": "no",
            "disable_tqdm": True, "seed": 1, "weight_decay": 0.01, "lr_scheduler_type": "cosine", **more})

    def run_one(self, how, resume=None, dtype=torch.bfloat16, **more):
        kind = tandem.hf.trainer(transformers.Trainer)
        trainer = kind(model(dtype), self.arguments(**more), train_dataset=data(), tandem=tandem.hf.Config(device_memory="8MiB", **how))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume)
        logs = [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]
        return trainer, logs

    @staticmethod
    def quietly(call):
        with contextlib.redirect_stdout(io.StringIO()):
            return call()

    def reference(self, dtype, lr, whole):
        plain = model(dtype)
        optimizer = WithMasters(plain, lr=lr, weight_decay=0.01, whole=whole)
        trainer = transformers.Trainer(plain, self.arguments(max_steps=50, learning_rate=lr), train_dataset=data(), optimizers=(optimizer, None))
        trainer.accelerator.clip_grad_norm_ = optimizer.clip
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]

    def test_losses_and_norms_are_those_of_pytorch(self):
        """50 steps with clipping. In bf16 the rounding of one weight of so small a model may fall the other way, and moves norms."""
        for dtype, lr, loss_delta, norm_delta in ((torch.float32, 6e-3, 1e-5, 1e-5), (torch.bfloat16, 2e-3, 1e-3, 1e-3)):
            for name in ("optimizer", "stream"):
                expected = self.reference(dtype, lr, whole=name == "optimizer")
                self.assertGreater(expected[0][0] - expected[-1][0], 1.0)
                self.assertGreater(sum(norm > 0.5 for _, norm in expected), 15)
                _, logs = self.run_one(MODES[name], max_steps=50, dtype=dtype, learning_rate=lr)
                self.assertEqual(len(logs), len(expected))
                for (loss, norm), (other, other_norm) in zip(logs, expected, strict=True):
                    self.assertAlmostEqual(loss, other, delta=loss_delta * other, msg=f"{name} {dtype}")
                    self.assertAlmostEqual(norm, other_norm, delta=norm_delta * other_norm, msg=f"{name} {dtype}")

    def test_resume_in_the_middle_of_an_epoch(self):
        for name, how in MODES.items():
            with self.subTest(name):
                whole, logs = self.run_one(how)
                first, _ = self.run_one(how, save_strategy="steps", save_steps=7)
                digest = whole._engine_optimizer().digest()
                self.assertEqual(first._engine_optimizer().digest(), digest)
                resumed, rest = self.run_one(how, resume=str(self.folder / "checkpoint-7"))
                self.assertEqual(resumed._engine_optimizer().digest(), digest)
                self.assertEqual(rest[-5:], logs[-5:])

    def test_one_digest(self):
        digests = {name: self.run_one(how, max_steps=4)[0]._engine_optimizer().digest() for name, how in MODES.items() if "stream" in name}
        self.assertEqual(len(set(digests.values())), 1, digests)

    def test_gradient_checkpointing_is_left_out(self):
        """Units are computed again as it is: whoever asks for it gets the same bits."""
        how, kind = MODES["stream"], tandem.hf.trainer(transformers.Trainer)
        expected = self.run_one(how, max_steps=2)[0]._engine_optimizer().digest()
        asked = self.run_one(how, max_steps=2, gradient_checkpointing=True)[0]
        self.assertEqual(asked._engine_optimizer().digest(), expected)
        enabled = model()
        enabled.gradient_checkpointing_enable()
        with self.assertRaisesRegex(tandem.MisuseError, r"gradient_checkpointing_disable\(\)"):
            tandem.stream(enabled, device_memory="8MiB")
        trainer = kind(enabled, self.arguments(max_steps=2), train_dataset=data(), tandem=tandem.hf.Config(device_memory="8MiB", **how))
        self.quietly(trainer.train)
        self.assertEqual(trainer._engine_optimizer().digest(), expected)

    def test_evaluation_and_the_best_model(self):
        kind = tandem.hf.trainer(transformers.Trainer)
        arguments = self.arguments(max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
                                   load_best_model_at_end=True, gradient_accumulation_steps=1)
        trainer = kind(model(), arguments, train_dataset=data(), eval_dataset=data(8),
                       tandem=tandem.hf.Config(stream=True, device_memory="8MiB"))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        self.assertEqual(len(losses), 3)
        self.assertAlmostEqual(self.quietly(trainer.evaluate)["eval_loss"], min(losses), delta=1e-5)

    def test_measured_activations(self):
        rows = [row["input_ids"] for row in data(4)]
        batch = {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}
        how = MODES["stream"]
        plain, _ = self.run_one(how, max_steps=2)
        measured, _ = self.run_one({**how, "reserved_device_memory": "auto", "example": batch}, max_steps=2)
        self.assertEqual(measured._engine_optimizer().digest(), plain._engine_optimizer().digest())
        self.assertIn("reserved by the caller", str(measured.model.tandem.plan))
        self.assertNotIn("reserved by the caller", str(plain.model.tandem.plan))

    def test_wrong_use(self):
        kind = tandem.hf.trainer(transformers.Trainer)
        with self.assertRaisesRegex(tandem.MisuseError, "not derived from transformers.Trainer"):
            tandem.hf.trainer(dict)
        plain = model()
        with self.assertRaisesRegex(tandem.MisuseError, "leave out `optimizers`"):
            kind(plain, self.arguments(), train_dataset=data(), optimizers=(torch.optim.SGD(plain.parameters(), lr=1.0), None))
        with self.assertRaises(tandem.PlanError):
            kind(model(), self.arguments(), train_dataset=data(), tandem=tandem.hf.Config(stream=True, device_memory="4KiB"))


if __name__ == "__main__":
    unittest.main()
