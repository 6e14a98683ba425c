"""Wrong input of `tandem finetune`: each is one line with what to do and its exit code, and leaves nothing behind."""
import json
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import CHAT_TEMPLATE, FinetuneTest, main, records, write_llama  # noqa: E402


class Refusals(FinetuneTest):
    def setUp(self):
        super().setUp()
        write_llama(self.model, CHAT_TEMPLATE)

    def refuse(self, code, words, *flags, **where):
        line = self.refused(self.finetune(*flags, **where), code, *words)
        self.assertFalse(self.out.exists(), line)
        return line

    def change(self, name, **values):
        """Changes a file of JSON in the model's folder."""
        file = self.model / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def test_models(self):
        self.refuse(2, ["modle", "did you mean", str(self.model)], model=self.root / "modle")
        self.refuse(2, ["org/thing", "hf download org/thing"], model="org/thing")
        adapter = self.root / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        self.refuse(2, ["adapter_config.json", "--adapter"], model=adapter)
        self.change("config.json", quantization_config={"quant_method": "gptq"})
        self.refuse(4, ["quantized", "gptq"])
        for config in ({"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}):
            self.change("config.json", quantization_config={"quant_method": "bitsandbytes", **config})
            self.assertNotIn("--lora-rank", self.refuse(4, ["quantized (bitsandbytes)", "that it was made of"]))  # refused there, too

    def test_an_architecture_of_another(self):
        self.change("config.json", architectures=["FooForCausalLM"])
        self.refuse(2, ["'FooForCausalLM' is not supported"], "--engine", "native")

    def test_data(self):
        self.refuse(2, ["'foo' 'bar'", "--format"], data=self.write_records([{"foo": 1, "bar": 2}], "other.json"))
        self.refuse(2, ["chats.jsn", "did you mean", "chats.json"], data=self.root / "chats.jsn")
        self.refuse(2, ["no record"], data=self.file("empty.jsonl", ""))

    def test_data_that_can_be_read_once_alone(self):
        """A pipe, which a shell puts in the place of <(...)."""
        pipe = self.root / "pipe"
        os.mkfifo(pipe)
        self.refuse(2, ["no regular file", "write what it gives to a file"], data=pipe)

    def test_out_within_the_data(self):
        folder = self.root / "texts"
        folder.mkdir()
        shutil.copy(self.data, folder)
        inside = folder / "runs" / "first"
        done = self.tandem("finetune", self.model, folder, "--out", inside, "--device", "host", "--steps", "1")
        self.refused(done, 2, f"it lies in {folder}, which is data", "elsewhere")
        self.assertEqual([path.name for path in folder.iterdir()], [self.data.name])

    def test_chats(self):
        for flag, value in (("--max-tokens", "0"), ("--temperature", "nan"), ("--temperature", "-1")):
            self.refused(self.tandem("chat", self.model, flag, value, text=""), 2, flag, f"{value} is not from")

    def test_a_record_that_is_found_late_may_be_mended(self):
        """The bad record comes late: nothing of the run is left, and it begins with the mended file."""
        good = records(25) * 90
        self.refuse(2, ["record 2251", "'foo'"], "--steps", "1", data=self.write_records([*good, {"foo": 1}]))
        self.succeed(self.finetune("--steps", "1", data=self.write_records(good)))

    def test_chats_that_nothing_could_end(self):
        (self.model / "chat_template.jinja").unlink()
        tokenizer = json.loads((self.model / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = []
        (self.model / "tokenizer.json").write_text(json.dumps(tokenizer))
        (self.model / "tokenizer_config.json").write_text("{}")
        self.refuse(2, ["no chat template", "eos_token"])

    def test_flags(self):
        self.refuse(2, ["--row-length 500", "256 positions", "--row-length 257"], "--row-length", "500")
        self.refuse(2, ["--device-memory", "8GiB"], "--device-memory", "lots")
        self.refuse(2, ["--steps and --epochs"], "--steps", "3", "--epochs", "1")
        self.refuse(2, ["--steps", "--help"], "--steps", "many")
        self.refuse(2, ["--validation", "not from 0 to 0.9"], "--validation", "1")
        for flag in ("--epochs", "--lr"):  # no other word for a default
            self.refuse(2, [flag, "0 is not above 0"], flag, "0")
        self.refuse(2, ["--steps", "invalid whole number"], "--steps", "2.5")
        self.refuse(2, ["~no-such-user/cache", "home folder"], "--state-dir", "~no-such-user/cache")
        self.refuse(2, ["--rank", "--help"], "--rank", "8")
        self.refuse(5, ["cuda:7"], "--device", "cuda:7")

    def test_another_out(self):
        self.out.mkdir()
        (self.out / "notes.txt").write_text("mine")
        self.refused(self.finetune(), 2, "other files (notes.txt)", "another folder")
        (self.out / "data").mkdir()
        self.refused(self.finetune(), 2, "other files (data)")
        (self.out / "data").rmdir()
        (self.out / "notes.txt").rename(self.out / "metrics.jsonl")
        self.refused(self.finetune(), 2, "a run of tandem train")
        self.assertEqual([path.name for path in self.out.iterdir()], ["metrics.jsonl"])

    def test_what_a_run_was_not_begun_with(self):
        self.succeed(self.finetune("--steps", "2"))
        before = self.tensors()
        self.refused(self.finetune("--steps", "3"), 2, "a run with --steps 2, not 3")
        self.refused(self.finetune("--steps", "2", "--lr", "1e-3"), 2, "--lr left out, not 0.001")
        other = shutil.copy(self.data, self.root / "copy.json")
        self.refused(self.finetune("--steps", "2", data=other), 2, "DATA", "copy.json")
        self.succeed(self.finetune("--steps", "2", "--policy", "host", "--device-memory", "1GiB"))
        text = self.data.read_text()
        self.data.write_text(text.replace("red", "tan"))
        self.refused(self.finetune("--steps", "2"), 4, "chats.json", "has changed since", "put it back")
        self.data.write_text(text)
        self.change("tokenizer_config.json", eos_token="<|end|>", model_max_length=7)
        self.refused(self.finetune("--steps", "2"), 4, "tokenizer_config.json", "has changed since")
        self.assertEqual(self.tensors(), before)

    def test_a_stage_that_was_damaged(self):
        self.succeed(self.finetune("--steps", "2"))
        (self.out / "stages" / "choices.json").write_text("{")
        self.refused(self.finetune("--steps", "2"), 4, "choices.json", "missing or damaged")


class NotFitting(FinetuneTest):
    def host_bytes(self, *flags):
        plan = self.tandem("plan", "--model", self.model, "--device", "host", "--seq-len", "100", *flags, "--json")
        return json.loads(self.succeed(plan).stdout)["host_bytes"]

    def test_commands_that_fit_are_named(self):
        write_llama(self.model, CHAT_TEMPLATE, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
        device = ["--device-memory", "48MiB"]
        large, small = (self.host_bytes(*device, "--state", state) for state in ("split", "8bit-moments"))
        done = self.finetune(*device, "--host-memory", f"{(large + small) // 2 >> 20}MiB")
        line = self.refused(done, 3, "does not fit", "take --state")
        self.assertFalse(self.out.exists(), line)
        named = [text.partition(": ")[2].split() for text in done.stderr.splitlines() if text.startswith("would fit in ")]
        self.assertTrue(any(words[-2] == "--state" for words in named), done.stderr)
        self.assertTrue(any(words[-2:] == ["--state-dir", "DIR"] for words in named), done.stderr)
        fitting = next(words for words in named if words[-2] == "--state")
        self.assertEqual(fitting[:4], ["tandem", "finetune", str(self.model), str(self.data)])
        self.succeed(self.tandem(*fitting[1:], "--steps", "1"))

    def test_commands_that_fit_have_the_rows_that_are_asked_for(self):
        """A hundred thousand rows are refused for their number alone: no other flag is named."""
        write_llama(self.model, CHAT_TEMPLATE)
        done = self.finetune("--micro-batch", "100000", "--device-memory", "64MiB")
        self.refused(done, 3, "does not fit", "take --micro-batch 1")
        named = [text for text in done.stderr.splitlines() if text.startswith("would fit in ")]
        self.assertEqual([text.split()[-2:] for text in named], [["--micro-batch", "1"]])


if __name__ == "__main__":
    main()
