"""TRL's Trainers over the engine: PyTorch's losses and norms, a resume to the bit, adapters of PEFT, and DPO with its references."""
import pathlib
import tempfile
import unittest
import unittest.mock
import warnings

from sandbox import tandem, torch

try:
    import accelerate  # noqa: F401
    import peft
    import safetensors.torch
    import trl
    from language import model, preferences, quietly, records, tokenizer
except ImportError as error:
    print(f"skipped: {error}")
    raise SystemExit(77) from None

from reference import WithMasters

warnings.simplefilter("ignore")

OPTIMIZER, STREAM = {"policy": "host"}, {"stream": True, "policy": "interleave:2"}


def lora():
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def digest(trainer):
    return trainer._engine_optimizer().digest()


class Case(unittest.TestCase):
    kind, settings = trl.SFTTrainer, trl.SFTConfig

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def arguments(self, **more):
        """Three passes a step, of which the last of an epoch of 13 batches has one."""
        return self.settings(**{
            "output_dir": str(self.folder / "run"), "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "learning_rate": 2e-3, "max_grad_norm": 0.5,
            "save_strategy": "no", "disable_tqdm": True, "seed": 1, "weight_decay": 0.01, "lr_scheduler_type": "cosine", **more})

    def make(self, of, how, data, more=None, **keywords):
        """A Trainer of the engine; `how` None: of PyTorch."""
        kind = self.kind if how is None else tandem.hf.trainer(self.kind)
        engine = {} if how is None else {"tandem": tandem.hf.Config(**{"device_memory": "8MiB", **how})}
        return kind(of, args=self.arguments(**(more or {})), train_dataset=data, processing_class=tokenizer(), **engine, **keywords)

    @staticmethod
    def train(trainer, resume=None):
        quietly(lambda: trainer.train(resume_from_checkpoint=resume))
        return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]

    def assert_follows(self, logs, expected, loss_delta, norm_delta, message):
        self.assertEqual(len(logs), len(expected))
        for (loss, norm), (other, other_norm) in zip(logs, expected, strict=True):
            self.assertAlmostEqual(loss, other, delta=loss_delta * other, msg=message)
            self.assertAlmostEqual(norm, other_norm, delta=norm_delta * other_norm, msg=message)


class Supervised(Case):
    def test_losses_and_norms_are_those_of_pytorch(self):
        for name, how, tied in (("optimizer", OPTIMIZER, False), ("stream", STREAM, False), ("stream", STREAM, True)):
            plain = model(tied=tied)
            optimizer = WithMasters(plain, lr=2e-3, weight_decay=0.01, whole=how is OPTIMIZER)
            reference = self.make(plain, None, records(), {"max_steps": 50}, optimizers=(optimizer, None))
            reference.accelerator.clip_grad_norm_ = optimizer.clip
            expected = self.train(reference)
            self.assertGreater(expected[0][0] - expected[-1][0], 0.5)
            self.assertGreater(sum(norm > 0.5 for _, norm in expected), 15)
            logs = self.train(self.make(model(tied=tied), how, records(), {"max_steps": 50}))
            self.assert_follows(logs, expected, 1e-3, 1e-3, f"{name}, tied: {tied}")
            self.assert_follows(logs[:2], expected[:2], 1e-5, 2e-5, f"{name}, tied: {tied}")  # before roundings of weights differ

    def test_resume_in_the_middle_of_an_epoch(self):
        for how in (OPTIMIZER, STREAM):
            whole = self.make(model(tied=True), how, records(), {"max_steps": 9, "save_strategy": "steps", "save_steps": 7})
            logs = self.train(whole)
            resumed = self.make(model(tied=True), how, records(), {"max_steps": 9})
            rest = self.train(resumed, str(self.folder / "run" / "checkpoint-7"))
            self.assertEqual(digest(resumed), digest(whole))
            self.assertEqual(rest[-2:], logs[-2:])

    def test_a_model_by_name(self):
        model().save_pretrained(self.folder / "model")
        digests = []
        for of in (str(self.folder / "model"), model()):
            trainer = self.make(of, STREAM, records(), {"max_steps": 2, "model_init_kwargs": {"dtype": "bfloat16"} if isinstance(of, str) else None})
            self.train(trainer)
            digests.append(digest(trainer))
        self.assertEqual(*digests)

    def test_evaluation(self):
        plain, mine = (self.make(model(), how, records(), eval_dataset=records(8)) for how in (None, STREAM))
        losses = [quietly(trainer.evaluate)["eval_loss"] for trainer in (plain, mine)]
        self.assertAlmostEqual(*losses, places=5)


class Adapters(Case):
    def test_losses_and_norms_are_those_of_pytorch(self):
        """The adapters are fp32, their base bf16 and frozen, without state."""
        expected = self.train(self.make(model(), None, records(), {"max_steps": 10}, peft_config=lora()))
        for how in (OPTIMIZER, STREAM):
            trainer = self.make(model(), how, records(), {"max_steps": 10}, peft_config=lora())
            self.assert_follows(self.train(trainer), expected, 1e-4, 1e-3, str(how))
            trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
            self.assertEqual(sum(entry["exp_avg"].numel() for entry in trainer._engine_optimizer().state_dict()["state"].values()), trained)

    def test_the_base_stays_and_the_adapter_is_saved(self):
        for made in ("by TRL", "before"):
            of, how = (model(), {"peft_config": lora()}) if made == "by TRL" else (peft.get_peft_model(model(), lora()), {})
            trainer = self.make(of, STREAM, records(), **how)
            self.train(trainer)
            trainer.save_model(str(self.folder / made))
            state = trainer.model.state_dict()
            saved = safetensors.torch.load_file(self.folder / made / "adapter_model.safetensors")
            self.assertEqual({name.replace(".default.", "."): value.shape for name, value in state.items() if "lora_" in name},
                             {name: value.shape for name, value in saved.items()})
            again = peft.PeftModel.from_pretrained(model(), self.folder / made)
            tokens = torch.arange(20).view(2, 10)
            with torch.no_grad():
                self.assertTrue(torch.equal(again.eval()(tokens).logits, trainer.model.eval()(tokens).logits))
            for name, value in model().state_dict().items():
                held = next(v for key, v in state.items() if key.replace(".base_layer", "").endswith("base_model.model." + name))
                self.assertTrue(torch.equal(held, value), name)

    def test_resume(self):
        trainers = [self.make(model(), STREAM, records(), {"save_strategy": "steps", "save_steps": 4}, peft_config=lora()) for _ in range(2)]
        logs = self.train(trainers[0])
        self.assertEqual(self.train(trainers[1], str(self.folder / "run" / "checkpoint-4"))[-2:], logs[-2:])
        self.assertEqual(digest(trainers[1]), digest(trainers[0]))


class Preferences(Case):
    kind, settings = trl.DPOTrainer, trl.DPOConfig

    def cases(self):
        """Sources of the reference: keywords of a Trainer, and arguments."""
        def named():
            made = model()
            made.config._name_or_path = str(self.folder / "model")
            return made
        model().save_pretrained(self.folder / "model")
        return {"given": lambda: (model(), {"ref_model": model()}, {}), "by its name": lambda: (named(), {}, {}),
                "before training": lambda: (named(), {}, {"precompute_ref_log_probs": True}),
                "without adapter": lambda: (model(), {"peft_config": lora()}, {}),
                "an adapter": lambda: (peft.get_peft_model(model(), lora()), {}, {})}

    def test_losses_are_those_of_pytorch(self):
        for name, case in self.cases().items():
            of, keywords, more = case()
            expected = self.train(self.make(of, None, preferences(), {"max_steps": 4, **more}, **keywords))
            for how in (OPTIMIZER, STREAM):
                of, keywords, more = case()
                trainer = self.make(of, how, preferences(), {"max_steps": 4, **more}, **keywords)
                self.assert_follows(self.train(trainer), expected, 5e-3, 1e-2, f"{name}, {how}")  # PyTorch's has no masters
                if how is STREAM and trainer.ref_model is not None:
                    self.assertTrue(hasattr(trainer.ref_model, "tandem"), name)

    def test_the_reference_stays_and_takes_little(self):
        trainer = self.make(model(), STREAM, preferences(), ref_model=model())
        self.train(trainer)
        for (name, mine), other in zip(trainer.ref_model.state_dict().items(), model().state_dict().values(), strict=True):
            self.assertTrue(torch.equal(mine, other), name)
        self.assertLess(trainer.ref_model.tandem.engine.device.peak_bytes, sum(2 * p.numel() for p in model().parameters()))

    def test_a_reference_that_is_written(self):
        with self.assertRaisesRegex(tandem.MisuseError, r"sync_ref_model=True .*stream=False") as caught:
            self.make(model(), STREAM, preferences(), {"sync_ref_model": True}, ref_model=model())
        self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
