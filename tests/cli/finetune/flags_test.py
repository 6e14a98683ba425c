"""Flags that `tandem finetune` hands on to `tandem train` under the same names: they act, and are refused as there, in the same words."""
import json
import pathlib
import re
import shlex
import shutil
import sys
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import CHAT_TEMPLATE, FinetuneTest, main, records, rounded_tensors, write_llama, write_mixtral  # noqa: E402

FREEZE = r"embed_tokens|layers\.0\."


class FlagTest(FinetuneTest):
    def setUp(self):
        super().setUp()
        write_llama(self.model, CHAT_TEMPLATE)

    def config(self):
        return tomllib.loads((self.out / "config.toml").read_text())

    def pairs(self):
        return self.write_records([{"prompt": f"Which colour has {i}? ", "chosen": f"red {i}", "rejected": "tan"} for i in range(40)], "pairs.json")

    def refuse(self, code, words, *flags, **where):
        line = self.refused(self.finetune(*flags, **where), code, *words)
        self.assertFalse(self.out.exists(), line)
        return line


class Acting(FlagTest):
    def changed(self):
        """Names of the tensors that are not those of the base, as bf16."""
        bits = [rounded_tensors(folder / "model.safetensors") for folder in (self.model, self.out / "model")]
        self.assertEqual(bits[0].keys(), bits[1].keys())
        return {name for name, values in bits[1].items() if values != bits[0][name]}

    def test_a_part_of_the_model(self):
        """With the other part as it is, and in fewer bits: what is written are the base's own values."""
        for more in ([], ["--base", "nf4"]):
            with self.subTest(more=more):
                shutil.rmtree(self.out, ignore_errors=True)
                done = self.succeed(self.finetune("--steps", "3", "--freeze", FREEZE, *more))
                self.assertIn(f"without those that --freeze {FREEZE} finds", done.stdout)
                self.assertEqual(self.config()["freeze"], FREEZE)
                changed = self.changed()
                self.assertIn("model.layers.1.mlp.up_proj.weight", changed)
                self.assertEqual({name for name in changed if re.search(FREEZE, name)}, set())
                self.succeed(self.tandem("chat", self.out, "--max-tokens", "2", text="Which colour?\n"))
        again = self.finetune("--steps", "3", "--freeze", "embed_tokens", "--base", "nf4")
        self.refused(again, 2, f"--freeze {FREEZE}, not embed_tokens")

    def test_the_type_that_is_computed_in(self):
        losses = {}
        for compute in ("fp32", "bf16"):
            shutil.rmtree(self.out, ignore_errors=True)
            self.succeed(self.finetune("--steps", "1", "--compute", compute))
            self.assertEqual(self.config()["compute"], compute)
            losses[compute] = self.metrics(self.out)[0]["loss"]
        self.assertNotEqual(losses["fp32"], losses["bf16"])
        self.assertAlmostEqual(losses["fp32"], losses["bf16"], delta=0.05)
        self.refused(self.finetune("--steps", "1", "--compute", "fp32"), 2, "--compute bf16, not fp32")

    def test_adapters_of_experts(self):
        shutil.rmtree(self.model)
        write_mixtral(self.model, CHAT_TEMPLATE)
        self.succeed(self.finetune("--steps", "1", "--lora-rank", "2", "--lora-experts", "down_proj", "--lora-targets", "none"))
        config = json.loads((self.out / "adapter" / "adapter_config.json").read_text())
        self.assertEqual(config["target_parameters"], ["mlp.experts.down_proj"])
        self.succeed(self.tandem("chat", self.out, "--max-tokens", "2", text="Which colour?\n"))

    def test_when_the_reference_is_computed(self):
        """The result is the same, so another call may choose otherwise, as far as `tandem train` goes on so."""
        flags, weights = ["--objective", "dpo", "--lora-rank", "2", "--steps", "2"], {}
        for way in ("before", "step"):
            shutil.rmtree(self.out, ignore_errors=True)
            self.succeed(self.finetune(*flags, "--dpo-reference", way, data=self.pairs()))
            self.assertEqual(self.summary(self.out)["dpo_reference"], way)
            weights[way] = (self.out / "adapter" / "adapter_model.safetensors").read_bytes()
        self.assertEqual(weights["before"], weights["step"])
        self.assertIn("all of which is done already", self.succeed(self.finetune(*flags, data=self.pairs())).stdout)


class Refused(FlagTest):
    def said_by_train(self, *flags):
        done = self.run_program("plan", "--model", self.model, "--device", "host", *flags)
        return self.refused(done, 2)

    def test_as_tandem_train_does(self):
        for flags in (["--lora-experts", "all"], ["--lora-alpha", "8"], ["--lora-rslora"], ["--dpo-reference", "step"], ["--dpo-beta", "0.3"],
                      ["--freeze", "embed", "--lora-rank", "2"], ["--freeze", "no_such"], ["--freeze", "("],
                      ["--freeze", "norm", "--base", "nf4"], ["--lora-rank", "2", "--lora-experts", "all"],
                      ["--lora-rank", "2", "--lora-experts", "up"]):
            with self.subTest(flags=flags):
                self.assertEqual(self.refuse(2, [], *flags), self.said_by_train(*flags))

    def test_a_reference_in_steps_that_nothing_leaves_as_it_was(self):
        self.refuse(2, ["--dpo-reference step"], "--objective", "dpo", "--dpo-reference", "step", data=self.pairs())

    def test_values(self):
        self.refuse(2, ["--freeze ''", "finds nothing"], "--freeze", "")
        self.refuse(2, ["--compute", "'fp64'"], "--compute", "fp64")
        self.refuse(2, ["--dpo-reference", "'late'"], "--objective", "dpo", "--dpo-reference", "late")
        self.refuse(2, ["--base", "--lora-rank 16 or --freeze"], "--base", "nf4")
        self.refuse(2, ["--merged", "adapters"], "--merged", "--freeze", "embed")

    def test_with_a_module_of_pytorch(self):
        for flags in (["--freeze", "embed"], ["--compute", "bf16"], ["--lora-rank", "2", "--lora-experts", "all"],
                      ["--objective", "dpo", "--dpo-reference", "before"]):
            self.refuse(2, ["--engine torch", "leave one of them out"], *flags, "--engine", "torch")
        file = self.model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["FooForCausalLM"]}))
        self.refuse(2, ["--compute", "'FooForCausalLM' is not supported", "leave it out"], "--compute", "bf16")


class NotFitting(FlagTest):
    MEMORY = ["--device-memory", "48MiB", "--host-memory", "62MiB"]

    def setUp(self):
        super().setUp()
        shutil.rmtree(self.model)
        write_llama(self.model, CHAT_TEMPLATE, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)

    def run_as_printed(self, done, *expected):
        """Runs the command that a refusal names, as a shell reads it."""
        lines = [line.split(": ", 1)[1] for line in done.stderr.splitlines() if line.startswith("would fit in ")]
        found = [shlex.split(line) for line in lines if "--lora-rank" in line or "--base" in line]
        self.assertEqual(len(found), 1, done.stderr)
        self.assertEqual(found[0][len(found[0]) - len(expected):], list(expected))
        self.succeed(self.tandem(*found[0][1:]))
        return found[0]

    def test_the_adapters_that_are_named_are_trained_as_printed(self):
        """Also where a part of the model is frozen, which adapters have no use for."""
        few = self.write_records(records(20), "few chats.json")
        for flags in (["--compute", "bf16"], ["--freeze", FREEZE], [f"--freeze={FREEZE}", "--compute", "bf16"]):
            with self.subTest(flags=flags):
                shutil.rmtree(self.out, ignore_errors=True)
                done = self.finetune(*flags, "--steps", "1", *self.MEMORY, data=few)
                line = self.refused(done, 3, "does not fit", "take --lora-rank 16 for adapters")
                self.assertEqual("without --freeze" in line, FREEZE in " ".join(flags))
                words = self.run_as_printed(done, "--lora-rank", "16")
                self.assertEqual("bf16" in words, "bf16" in flags)
                self.assertTrue((self.out / "adapter" / "adapter_model.safetensors").is_file())

    def test_adapters_for_preferences(self):
        done = self.finetune("--objective", "dpo", "--dpo-reference", "before", "--steps", "1", *self.MEMORY, data=self.pairs())
        self.refused(done, 3, "does not fit", "take --lora-rank 16 for adapters")
        self.run_as_printed(done, "--lora-rank", "16")

    def test_a_smaller_base_of_what_is_frozen(self):
        done = self.finetune("--freeze", "embed|layers", "--steps", "1", "--device-memory", "20MiB", "--host-memory", "44MiB")
        self.refused(done, 3, "does not fit", "take --base ")
        self.run_as_printed(done)


if __name__ == "__main__":
    main()
