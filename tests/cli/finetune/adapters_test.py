"""`tandem finetune` that trains adapters, or from preferences: what the run ends with and how it is asked, what fits, and what is refused."""
import json
import pathlib
import shutil
import sys
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import CHAT_TEMPLATE, CLI, FinetuneTest, main, records, write_llama  # noqa: E402

# Flags for a model that knows nothing yet.
LORA = ["--lora-rank", "16", "--lora-modules-to-save", "embed_tokens", "--epochs", "30"]
COLOUR = "It is mud."  # an answer that is right for no thing


class AdapterTest(FinetuneTest):
    def answers(self, run):
        asked = [record["conversations"] for record in records()[::23]]
        lines = "".join(f"{question['value']}\n/reset\n" for question, _ in asked)
        done = self.succeed(self.tandem("chat", run, "--temperature", "0", "--max-tokens", "12", text=lines))
        return done.stdout.splitlines(), [answer["value"] for _, answer in asked]

    def check_answers(self, run):
        given, expected = self.answers(run)
        self.assertEqual(given, expected)

    def stage(self, name):
        return json.loads((self.out / "stages" / f"{name}.json").read_text())

    def pairs(self):
        """Preferences for the right answer, as messages."""
        def said(role, text):
            return [{"role": role, "content": text}]
        return self.write_records([{"prompt": said("user", question["value"]), "chosen": said("assistant", answer["value"]),
                                    "rejected": said("assistant", COLOUR)} for question, answer in (r["conversations"] for r in records())], "pairs.json")


class Adapters(AdapterTest):
    def test_an_adapter_that_answers(self):
        """Answers are by a template that the model lacks. The whole model comes by a second call, without any step."""
        write_llama(self.model)
        done = self.succeed(self.finetune(*LORA, "--base", "int8"))
        for words in ("frozen in int8, and adapters of rank 16", "learning rate 0.002 ", f"next: tandem chat {self.out}"):
            self.assertIn(words, done.stdout)
        adapter, size = self.out / "adapter", (self.out / "adapter" / "adapter_model.safetensors").stat().st_size
        self.assertIn(f"adapter: {adapter}, of rank 16, over {self.model} in int8, {size / 1024:.1f} KiB\n", done.stdout)
        config = json.loads((adapter / "adapter_config.json").read_text())
        self.assertEqual((config["r"], config["base_model_name_or_path"]), (16, str(self.model)))
        self.assertFalse((self.out / "model").exists())
        self.check_answers(self.out)
        self.check_answers(adapter)
        before = (adapter / "adapter_model.safetensors").read_bytes()
        again = self.succeed(self.finetune(*LORA, "--base", "int8", "--merged"))
        self.assertNotIn("step ", again.stdout)
        self.assertIn(f"model:  {self.out / 'model'}\n", again.stdout)
        self.assertEqual((adapter / "adapter_model.safetensors").read_bytes(), before)
        shutil.move(self.model, self.root / "moved")
        self.check_answers(self.out)  # by the whole model
        self.refused(self.tandem("chat", adapter, text=""), 2, str(self.model), "--model DIR")
        self.refused(self.finetune(*LORA, "--base", "int8"), 2, str(self.model))

    def test_going_on_from_an_adapter(self):
        """Training goes on from a run's best state; rank and targets are the adapter's own."""
        write_llama(self.model, CHAT_TEMPLATE)
        first = self.root / "first"
        self.succeed(self.tandem("finetune", self.model, self.data, "--out", first, "--device", "host", "--lora-rank", "4", "--lora-targets", "q_proj",
                                 "--steps", "3"))
        self.refused(self.finetune("--adapter", first, "--lora-rank", "5", "--steps", "2"), 2, "--lora-rank 5", "has 4")
        done = self.succeed(self.finetune("--adapter", first, "--steps", "2"))
        self.assertIn(f"and the adapter {first / 'adapter'}; 2 steps", done.stdout)
        config = json.loads((self.out / "adapter" / "adapter_config.json").read_text())
        self.assertEqual((config["r"], config["target_modules"]), (4, ["q_proj"]))
        losses = [self.metrics(run)[0]["loss"] for run in (first, self.out)]
        self.assertLess(losses[1], losses[0])
        self.refused(self.finetune("--steps", "2", "--lora-rank", "4"), 2, "--adapter", "not left out")
        file = first / "adapter" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
        self.refused(self.finetune("--adapter", first, "--steps", "2"), 4, str(file), "has changed since")

    def test_a_base_of_the_hub_is_named_as_there(self):
        """Not by a folder of this machine's cache, but where a revision was asked for, as no one would look for that."""
        folder = self.cached("org/small")
        for flags, base in (([], "org/small"), (["--revision", folder.name], str(folder))):
            shutil.rmtree(self.out, ignore_errors=True)
            self.succeed(self.finetune("--lora-rank", "2", "--steps", "1", *flags, model="org/small"))
            self.assertEqual(json.loads((self.out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"], base)
            self.succeed(self.tandem("chat", self.out / "adapter", "--max-tokens", "2", text="Which colour?\n"))

    def test_a_base_that_is_quantized_already(self):
        """NF4 of bitsandbytes is taken as it is; the whole model is refused with the flag that does so."""
        shutil.copytree(CLI.parent / "train" / "fixtures" / "nf4", self.model)
        words = ["<|end|>", *"the sky is blue grass green what colour has it".split()]
        tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
                     "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [{"id": 0, "content": words[0], "single_word": False, "lstrip": False,
                                                                             "rstrip": False, "normalized": False, "special": True}],
                     "model": {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)}, "unk_token": words[0]}}
        (self.model / "tokenizer.json").write_text(json.dumps(tokenizer))
        (self.model / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[0]}))
        data = self.write_records([{"prompt": "what colour has the sky ", "completion": "blue"}, {"prompt": "what colour has the grass ",
                                                                                               "completion": "green"}] * 20)
        self.refused(self.finetune(data=data), 4, "quantized (bitsandbytes)", "--lora-rank 16")
        done = self.succeed(self.finetune("--lora-rank", "2", "--steps", "9", "--lr", "2e-2", data=data))
        self.assertIn(f"over {self.model} in nf4, ", done.stdout)
        parameters = 2 * 23 * 48 + 2 * 48 * (48 + 16) + 3 * 48 * 77 + 3 * 48  # embedding and head, attention, MLP, norms
        self.assertIn(f"{parameters:,} parameters, frozen, and adapters of rank 2", done.stdout)
        again = self.succeed(self.finetune("--lora-rank", "2", "--steps", "9", "--lr", "2e-2", data=data))
        self.assertIn("going on", again.stdout)
        self.succeed(self.finetune("--lora-rank", "2", "--steps", "9", "--lr", "2e-2", "--merged", data=data))
        self.assertNotIn("quantization_config", json.loads((self.out / "model" / "config.json").read_text()))
        adapted, merged = (self.loss(self.out / name) for name in ("adapter", "model"))
        self.assertLess(abs(adapted - merged), 1e-2)  # bf16 rounds the sum
        self.assertGreater(abs(adapted - self.loss(self.model)), 2e-2)

    def loss(self, model):
        done = self.tandem("eval", "--model", model, "--data", self.out / "data" / "train.bin", "--device", "host", "--json")
        return json.loads(self.succeed(done).stdout)["loss"]

    def test_a_run_that_was_begun_before_there_were_adapters(self):
        write_llama(self.model, CHAT_TEMPLATE)
        self.succeed(self.finetune("--steps", "2"))
        settings, choices = self.out / "finetune.toml", self.out / "stages" / "choices.json"
        settings.write_text("".join(line for line in settings.read_text().splitlines(True) if line.split(" ")[0] not in ("merged", "objective")))
        choices.write_text(json.dumps({name: value for name, value in self.stage("choices").items() if name != "pairs"}))
        self.assertIn("going on", self.succeed(self.finetune("--steps", "2")).stdout)
        self.refused(self.finetune("--steps", "2", "--lora-rank", "2"), 2, "--lora-rank left out, not 2")
        self.refused(self.finetune("--steps", "2", "--objective", "dpo"), 2, "--objective lm, not dpo")


class Preferences(AdapterTest):
    def test_what_is_preferred_is_learnt(self):
        write_llama(self.model, CHAT_TEMPLATE)
        for name, flags, steps in (("model", [], 24), ("adapter", ["--lora-rank", "8", "--base", "nf4"], 24)):
            with self.subTest(name):
                shutil.rmtree(self.out, ignore_errors=True)
                done = self.succeed(self.finetune("--objective", "dpo", "--lr", "2e-3", *flags, data=self.pairs()))
                self.assertIn("of 100% of the pairs that were held out, the chosen answer has the larger reward\n", done.stdout)
                self.assertIn("190 pairs, ", done.stdout)
                summary, schedule = self.summary(self.out), self.stage("schedule")
                self.assertLess(summary["final_loss"], 0.3)
                self.assertEqual(summary["steps"], steps)  # an epoch of 190 pairs, 8 of them a step
                self.assertEqual(schedule["micro_batch"] * schedule["accumulation"], 16)
                self.assertTrue((self.out / name).is_dir())
                self.assertNotIn("mud", "".join(self.answers(self.out)[0]))

    def test_rows_are_as_long_as_the_longest_answer(self):
        """The longest answer may come behind the records that are looked at first."""
        write_llama(self.model, CHAT_TEMPLATE, num_hidden_layers=1)
        pairs = [{"prompt": "a ", "chosen": "b", "rejected": "c"}] * 2000 + [{"prompt": "a ", "chosen": "b " * 20, "rejected": "c"}]
        self.succeed(self.finetune("--objective", "dpo", "--steps", "1", "--validation", "0", data=self.write_records(pairs)))
        length = json.loads((self.out / "data" / "train.json").read_text())["row_length"]
        self.assertGreater(length, 20)
        self.assertEqual((self.stage("choices")["row_length"], tomllib.loads((self.out / "config.toml").read_text())["seq-len"]), (length, length - 1))

    def test_rates_that_are_not_given(self):
        write_llama(self.model, CHAT_TEMPLATE)
        for rate, flags in ((1e-6, []), (1e-5, ["--lora-rank", "2", "--dpo-beta", "0.3"])):
            shutil.rmtree(self.out, ignore_errors=True)
            self.succeed(self.finetune("--objective", "dpo", "--steps", "1", *flags, data=self.pairs()))
            self.assertEqual(self.stage("schedule")["lr"], rate)


class Refusals(AdapterTest):
    def setUp(self):
        super().setUp()
        write_llama(self.model, CHAT_TEMPLATE)

    def refuse(self, code, words, *flags, **where):
        line = self.refused(self.finetune(*flags, **where), code, *words)
        self.assertFalse(self.out.exists(), line)

    def test_flags_of_adapters(self):
        for flags, why in ((["--lora-alpha", "8"], "no adapter is trained"), (["--base", "nf4"], "all weights are trained"),
                           (["--merged"], "for adapters"), (["--lora-rslora"], "no adapter is trained")):
            self.refuse(2, [flags[0], why, "--lora-rank 16"], *flags)
        self.refuse(2, ["--lora-rank", "0 is not from 1"], "--lora-rank", "0")
        self.refuse(2, ["--lora-rank 999"], "--lora-rank", "999")
        self.refuse(2, ["q_prj", "perhaps q_proj"], "--lora-rank", "2", "--lora-targets", "q_prj")
        self.refuse(2, ["--lora-targets", "no linear layer"], "--lora-rank", "2", "--lora-targets", ".*zzz")
        self.refuse(2, ["--lora-targets", "''"], "--lora-rank", "2", "--lora-targets", "")
        self.refuse(2, ["--base", "nf3"], "--lora-rank", "2", "--base", "nf3")
        self.refuse(2, ["--adapter", "no such folder"], "--adapter", self.root / "none")
        self.refuse(2, ["--lora-rank", "--engine torch"], "--lora-rank", "2", "--engine", "torch")

    def test_models_that_adapters_are_not_trained_over(self):
        file = self.model / "config.json"
        config = json.loads(file.read_text())
        for method in ("gptq", "awq", "mxfp4"):
            file.write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
            self.refuse(2, [method], "--lora-rank", "2")
        file.write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
        self.refuse(2, ["'FooForCausalLM' is not supported"], "--lora-rank", "2")

    def test_an_adapter_as_model(self):
        (self.model / "adapter_config.json").write_text("{}")
        self.refuse(2, ["a model and an adapter (adapter_config.json)", "--adapter"], "--lora-rank", "2")

    def test_an_adapter_of_another_model(self):
        """The mismatch is found before anything is prepared."""
        other = write_llama(self.root / "wide", CHAT_TEMPLATE, hidden_size=96)
        self.succeed(self.tandem("finetune", other, self.data, "--out", self.root / "first", "--device", "host", "--lora-rank", "2", "--steps", "1"))
        self.refuse(4, [str(other), "other values"], "--adapter", self.root / "first")
        copied = shutil.copytree(self.root / "first" / "adapter", self.root / "copied")  # which says nothing of its base but the shapes
        self.refuse(4, ["misshapen", "lora_A", "the base that the adapter was made of"], "--adapter", copied)

    def test_preferences(self):
        pairs = self.pairs()
        self.refuse(4, ["preferences", "--objective dpo"], data=pairs)
        self.refuse(4, ["--objective dpo", "no preferences"], "--objective", "dpo")
        self.refuse(2, ["--dpo-beta", "--objective dpo"], "--dpo-beta", "0.2")
        self.refuse(2, ["--dpo-beta", "0 is not above 0"], "--objective", "dpo", "--dpo-beta", "0", data=pairs)
        self.refuse(2, ["--micro-batch 3", "even"], "--objective", "dpo", "--micro-batch", "3", data=pairs)
        self.refuse(2, ["mixed"], pairs, "--objective", "dpo")
        for record, words in (({"prompt": "a", "chosen": "b"}, ["line 2", "rejected is missing"]),
                              ({"prompt": "a", "chosen": "b", "rejected": "b"}, ["line 2", "the same"]),
                              ({"prompt": "a", "chosen": "b", "rejected": " "}, ["line 2", "empty"])):
            good = {"prompt": "a ", "chosen": "b", "rejected": "c"}
            data = self.file("bad.jsonl", "".join(json.dumps(r) + "\n" for r in (good, record)))
            self.refuse(2, words, "--objective", "dpo", data=data)
        long = self.write_records([{"prompt": "Which colour? ", "chosen": "red " * 400, "rejected": "tan"}], "long.json")
        self.refuse(2, ["tokens", "256 positions"], "--objective", "dpo", data=long)


class NotFitting(AdapterTest):
    MEMORY = ["--device-memory", "48MiB", "--host-memory", "62MiB"]

    def setUp(self):
        super().setUp()
        write_llama(self.model, CHAT_TEMPLATE, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)

    def named(self, done):
        """Commands that fit, and what each is said to take."""
        lines = [line.removeprefix("would fit in ").split(": ", 1) for line in done.stderr.splitlines() if line.startswith("would fit in ")]
        return [(command.split(), taken) for taken, command in lines]

    def test_adapters_fit_where_the_model_does_not(self):
        done = self.finetune(*self.MEMORY)
        line = self.refused(done, 3, "does not fit", "take --lora-rank 16 for adapters, with ")
        (words, taken), = self.named(done)
        self.assertEqual(words[-2:], ["--lora-rank", "16"])
        self.assertIn(f"with {taken}", line)
        self.assertTrue(taken.startswith(f"{self.planned() / (1 << 20):.1f} MiB of the device and "), taken)
        self.assertFalse(self.out.exists(), line)
        self.succeed(self.tandem(*words[1:], "--steps", "1"))

    def planned(self):
        """Bytes on the device of the plan that the refusal speaks of, whose rows are those of a run that fits."""
        other = self.root / "other"
        self.succeed(self.tandem("finetune", self.model, self.data, "--out", other, "--device", "host", "--steps", "1", "--lora-rank", "1"))
        length = json.loads((other / "stages" / "choices.json").read_text())["row_length"] - 1
        plan = self.tandem("plan", "--model", self.model, "--device", "host", *self.MEMORY, "--lora-rank", "16", "--grad-accum", "2", "--seq-len", length,
                           "--json")
        return json.loads(self.succeed(plan).stdout)["device_bytes"]

    def test_a_smaller_base_fits_where_adapters_do_not(self):
        done = self.finetune("--device-memory", "20MiB", "--host-memory", "44MiB", "--lora-rank", "8")
        self.refused(done, 3, "does not fit", "take --base nf4, with ")
        self.assertEqual([words[-2:] for words, _ in self.named(done)], [["--base", "nf4"]])


if __name__ == "__main__":
    main()
