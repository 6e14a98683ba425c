"""Models and adapters that `tandem finetune` and `tandem chat` are given in the place of one another: an adapter over a base that has changed
since, or over another, and runs and adapters as MODEL. Each is one line, before anything is answered, measured or written."""
import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import CHAT_TEMPLATE, FinetuneTest, main, records, write_llama  # noqa: E402

CHANGED = "model.layers.1.mlp.up_proj.weight"


def flip(folder, name=CHANGED):
    """Changes a value in the middle of a tensor of fp32, by less than its half; a second time puts it back."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + sum(json.loads(data[8:8 + size])[name]["data_offsets"]) // 8 * 4 + 2] ^= 1 << 6
    file.write_bytes(data)


class BaseTest(FinetuneTest):
    def setUp(self):
        super().setUp()
        write_llama(self.model, CHAT_TEMPLATE)

    def train_adapter(self, *flags):
        """A run OUT, over `model`."""
        self.succeed(self.finetune("--lora-rank", "2", "--steps", "1", *flags))

    def train_by_the_program(self, out, *flags):
        """A run of `tandem train` on the tokens of the run OUT."""
        self.succeed(self.run_program("train", "--model", self.model, "--data", self.out / "data" / "train.bin", "--device", "host", "--steps", "1",
                                      "--out", out, *flags))
        return out

    def chat(self, *arguments):
        return self.tandem("chat", *arguments, "--max-tokens", "2", text="Which colour?\n")


class ChangedBase(BaseTest):
    def test_a_chat_over_a_base_that_has_changed(self):
        """By the run and by the folder of its adapter, as MODEL and by --adapter; put back, it answers."""
        self.train_adapter()
        adapter = self.out / "adapter"
        for asked in ([self.out], [adapter], [self.model, "--adapter", adapter], [self.model, "--adapter", self.out]):
            with self.subTest(asked=asked):
                flip(self.model)
                self.refused(self.chat(*asked), 4, str(self.model), str(adapter), f"{CHANGED} has other values")
                flip(self.model)
                self.succeed(self.chat(*asked))

    def test_a_base_that_has_moved(self):
        """--model says where it is now: the adapter answers, and another model there is refused."""
        self.train_adapter()
        adapter = self.out / "adapter"
        moved = self.model.rename(self.root / "moved")
        for asked in ([self.out], [adapter]):
            with self.subTest(asked=asked):
                self.refused(self.chat(*asked), 2, str(self.model), "--model DIR")
                self.succeed(self.chat(*asked, "--model", moved))
                flip(moved)
                self.refused(self.chat(*asked, "--model", moved), 4, str(moved), str(adapter), f"{CHANGED} has other values")
                flip(moved)
        self.refused(self.chat(moved, "--model", moved), 2, "a whole model")

    def test_a_description_that_has_changed(self):
        """A base is compared by what it computes, not by the program that wrote it."""
        self.train_adapter()
        file = self.model / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "rope_theta": 500.0}))
        self.refused(self.chat(self.out), 4, "config.json has rope_theta 500.0, and had null")
        file.write_text(json.dumps({**config, "transformers_version": "9.0"}))
        self.succeed(self.chat(self.out))

    def test_a_base_of_the_hub_that_has_changed(self):
        """A name that stands for another revision since."""
        folder = self.cached("org/small")
        self.succeed(self.finetune("--lora-rank", "2", "--steps", "1", model="org/small"))
        self.succeed(self.chat(self.out))
        flip(folder)
        for asked in ([self.out], ["org/small", "--adapter", self.out]):
            self.refused(self.chat(*asked), 4, "org/small", f"{CHANGED} has other values")

    def test_checkpoints_know_their_base(self):
        """Checks adapters of `tandem train`, and of the run itself."""
        self.train_adapter()
        run = self.train_by_the_program(self.root / "trained", "--lora-rank", "2")
        flip(self.model)
        for asked in (self.chat(run), self.run_program("sample", "--model", self.out, "--chat")):
            self.refused(asked, 4, "the base has changed since its adapters were trained", "up_proj")

    def test_what_is_not_noted_is_not_compared(self):
        """Without a record, of a folder elsewhere or by another program, only shapes are compared."""
        self.train_adapter()
        elsewhere = shutil.copytree(self.out / "adapter", self.root / "elsewhere" / "adapter")
        flip(self.model)
        self.succeed(self.chat(elsewhere))
        wide = write_llama(self.root / "wide", CHAT_TEMPLATE, hidden_size=96)
        self.refused(self.chat(wide, "--adapter", elsewhere), 4, "misshapen", "lora_A")

    def test_a_note_that_is_damaged(self):
        self.train_adapter()
        (self.out / "stages" / "base.json").write_text("{")
        self.refused(self.chat(self.out), 4, "base.json", "missing or damaged")


class GoingOn(BaseTest):
    def finetune_other(self, adapter, *flags):
        return self.tandem("finetune", self.model, self.data, "--out", self.root / "other", "--device", "host", "--steps", "1", "--adapter", adapter,
                           *flags)

    def test_an_adapter_of_another_base_is_found_before_anything_is_measured(self):
        """Checks a base of the same shape, and one of another."""
        self.train_adapter()
        self.measured = None  # no calibration from here on
        flip(self.model)
        for adapter in (self.out, self.out / "adapter"):
            self.refused(self.finetune_other(adapter), 4, f"MODEL {self.model}", str(self.out / "adapter"), f"{CHANGED} has other values")
        shutil.rmtree(self.model)
        write_llama(self.model, CHAT_TEMPLATE, hidden_size=96)
        elsewhere = shutil.copytree(self.out / "adapter", self.root / "elsewhere" / "adapter")
        self.refused(self.finetune_other(elsewhere), 4, "misshapen", "lora_A", "the base that the adapter was made of")
        self.assertFalse((self.root / "other").exists())
        self.assertFalse((self.root / "cache").exists(), "it has measured the machine")

    def test_a_run_of_the_program_over_another_model_is_found_before_anything_is_measured(self):
        """A model of the same shape with other values everywhere; the program compares one matrix with the plan."""
        self.train_adapter()
        run = self.train_by_the_program(self.root / "trained", "--lora-rank", "2")
        self.measured = None
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            flip(self.model, f"model.layers.0.self_attn.{name}.weight")
        self.refused(self.finetune_other(run), 4, "the base has changed since its adapters were trained", "block.0.self_attn.")
        self.assertFalse((self.root / "other").exists())
        self.assertFalse((self.root / "cache").exists(), "it has measured the machine")

    def test_a_checkpoint_of_another_base(self):
        """Where one large matrix differs, the program finds it when it has read the weights: nothing is begun, and the folder may be given again."""
        self.train_adapter()
        run = self.train_by_the_program(self.root / "trained", "--lora-rank", "2")
        flip(self.model)
        done = self.finetune_other(run)
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("the base has changed since its adapters were trained", done.stderr)
        self.assertFalse((self.root / "other" / "finetune.toml").exists())
        flip(self.model)
        self.succeed(self.finetune_other(run))


class AsModel(BaseTest):
    """A run, a checkpoint or an adapter as MODEL of `tandem finetune`."""

    def refuse(self, model, *words):
        done = self.tandem("finetune", model, self.data, "--out", self.root / "other", "--device", "host", "--steps", "1")
        line = self.refused(done, 2, f"MODEL {model}", *words)
        self.assertFalse((self.root / "other").exists(), line)

    def test_adapters(self):
        self.train_adapter()
        name = f"name {self.model} as MODEL"
        self.refuse(self.out, "a run of tandem finetune with an adapter", name, f"--adapter {self.out}")
        self.refuse(self.out / "adapter", "holds an adapter", name, f"--adapter {self.out / 'adapter'}")
        run = self.train_by_the_program(self.root / "trained", "--lora-rank", "2")
        self.refuse(run, "a run of tandem train with an adapter", name, f"--adapter {run}")
        checkpoint, = (run / "checkpoints").iterdir()
        self.refuse(checkpoint, "a checkpoint with an adapter", name, f"--adapter {checkpoint}")
        self.succeed(self.finetune("--lora-rank", "2", "--steps", "1", "--merged"))
        self.refuse(self.out, name, f"--adapter {self.out}", f"or {self.out / 'model'}")
        data = self.write_records(records(20), "few.json")
        for flags in ([self.model, data, "--adapter", self.out], [self.out / "model", data]):  # as the line says
            self.succeed(self.tandem("finetune", *flags, "--out", self.root / "other", "--device", "host", "--steps", "1"))
            shutil.rmtree(self.root / "other")

    def test_whole_models(self):
        self.succeed(self.finetune("--steps", "1"))
        self.refuse(self.out, "a run of tandem finetune", f"name {self.out / 'model'}")
        run = self.train_by_the_program(self.root / "trained")
        self.refuse(run, "a run of tandem train", f"tandem export {run} --to DIR")
        shutil.rmtree(self.out / "model")
        self.refuse(self.out, "no model yet", "its command again")


if __name__ == "__main__":
    main()
