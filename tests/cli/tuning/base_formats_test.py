"""Frozen weights in other formats: one digest wherever they lie, whoever trains, after a kill; what they cost, and what is refused."""
import json
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from adapters_test import floats, read_safetensors  # noqa: E402
from program import ProgramTest, main  # noqa: E402

BITSANDBYTES = pathlib.Path(__file__).parents[2] / "train" / "fixtures"
FORMATS = ["int8", "nf4", "nf4-double", "fp8"]
WORK = ["--device", "host", "--threads", "1", "--seq-len", "32", "--micro-batch", "1", "--grad-accum", "2", "--steps", "4",
        "--lr", "1e-2"]
LORA = ["--lora-rank", "4", "--lora-dropout", "0.1"]
WAYS = {
    "device": ["--policy", "device"],
    "streamed": ["--policy", "host", "--resident-layers", "0", "--prefetch-layers", "1"],
    "some resident": ["--policy", "stream", "--resident-layers", "2", "--accumulation-order", "layer"],
    "recomputed": ["--policy", "interleave:2", "--recompute", "block", "--resident-layers", "1"],
    "two ranks": ["--policy", "host", "--device", "host,host"],
}


class BaseFormats(ProgramTest):
    def train(self, out, *flags):
        return self.run_program("train", "--data", self.text, "--out", self.root / out, *WORK, *LORA, *flags)

    def digest(self, out):
        return self.summary(self.root / out)["state_digest"]

    def test_one_digest_in_each_format(self):
        digests = {}
        for base in ["bf16", *FORMATS]:
            ways = WAYS if base == "nf4" else {way: WAYS[way] for way in ("device", "streamed")}
            for way, flags in ways.items():
                with self.subTest(base=base, way=way):
                    out = f"{base} {way}"
                    self.succeed(self.train(out, "--model", "tiny-llama", "--base", base, *flags))
                    digests.setdefault(base, self.digest(out))
                    self.assertEqual(self.digest(out), digests[base])
            self.assertEqual(self.summary(self.root / f"{base} device")["base_format"], base)
        self.assertEqual(len(set(digests.values())), 1 + len(FORMATS), "a format that changes nothing was not used")

    def test_a_run_goes_on_with_the_same_base(self):
        for base in FORMATS:
            with self.subTest(base=base):
                model = ["--model", "tiny-llama", "--base", base]
                self.succeed(self.train(f"{base} whole", *model, "--checkpoint-every", "2", "--keep", "0"))
                begun = self.root / f"{base} whole" / "checkpoints" / "step-00000002"
                self.succeed(self.train(f"{base} again", *model, "--resume", begun, "--policy", "stream"))
                self.assertEqual(self.digest(f"{base} again"), self.digest(f"{base} whole"))

    def test_the_plan_counts_codes(self):
        def rows(base):
            plan = json.loads(self.succeed(self.run_program("plan", "--model", "tiny-llama", "--json", *WORK, *LORA, "--policy", "host",
                                                            "--resident-layers", "0", "--base", base)).stdout)
            return {(e["name"], e["where"]): e["bytes"] for e in plan["entries"]}
        whole, coded = rows("bf16"), rows("nf4")
        self.assertLess(coded["weights", "pinned"], whole["weights", "pinned"])
        self.assertGreater(coded["weights, decoded", "device"], 0)
        self.assertNotIn(("weights, decoded", "device"), whole)

    def test_what_bitsandbytes_wrote_is_the_base(self):
        ids = self.file("ids.bin", struct.pack("<400H", *(i * 7 % 23 for i in range(400))))
        for name, code in {"nf4": "nf4", "nf4_double": "nf4-double"}.items():
            with self.subTest(name=name):
                work = ["--data", ids, "--device", "host", "--threads", "1", "--seq-len", "16", "--steps", "2", "--lora-rank", "2"]
                self.succeed(self.run_program("train", "--model", BITSANDBYTES / name, "--out", self.root / name, *work))
                self.assertEqual(self.summary(self.root / name)["base_format"], code)
                self.succeed(self.run_program("train", "--resume", self.root / name, "--steps", "3"))
                self.refused(self.run_program("train", "--model", BITSANDBYTES / name, *work[:-2]), 4, "NF4")

    def test_what_bitsandbytes_wrote_is_exported_as_its_values(self):
        ids = self.file("ids.bin", struct.pack("<400H", *(i * 7 % 23 for i in range(400))))
        data = ["--data", ids, "--device", "host", "--threads", "1", "--seq-len", "16"]
        loss = lambda folder: json.loads(self.run_program("eval", "--model", folder, *data, "--json").stdout)["loss"]
        values, _ = read_safetensors(BITSANDBYTES / "values.safetensors")
        for name in ("nf4", "nf4_double"):
            with self.subTest(name=name):
                exported, run, merged = (self.root / f"{name}-{part}" for part in ("exported", "run", "merged"))
                done = self.succeed(self.run_program("export", BITSANDBYTES / name, "--to", exported))
                self.assertIn("NF4 by bitsandbytes", done.stderr)
                self.assertNotIn("quantization_config", (exported / "config.json").read_text())
                tensors, _ = read_safetensors(exported / "model.safetensors")
                coded = [n for n in tensors if f"{n}.{name}" in values]
                self.assertEqual(len(coded), 7)
                for n in coded:
                    self.assertEqual(floats(tensors[n]), floats(values[f"{n}.{name}"]), n)
                self.assertEqual(loss(exported), loss(BITSANDBYTES / name))
                self.succeed(self.run_program("train", "--model", BITSANDBYTES / name, *data, "--steps", "10", "--lora-rank", "2",
                                              "--lr", "1e-2", "--out", run))
                done = self.succeed(self.run_program("export", run, "--merged", "--to", merged))
                self.assertIn("NF4 by bitsandbytes", done.stderr)
                self.assertLess(abs(loss(merged) - loss(run)), 0.005)
                self.assertGreater(abs(loss(merged) - loss(exported)), 0.05, "the adapter does too little to show anything")

    def test_nothing_frozen_has_no_base(self):
        work = ["--data", self.text, "--device", "host", "--steps", "1", "--seq-len", "32", "--model", "tiny-llama"]
        self.refused(self.run_program("train", *work, "--base", "nf4"), 2, "--base", "--lora-rank")
        self.refused(self.run_program("train", *work, "--base", "fp4"), 2, "--base", "nf4")
        self.refused(self.run_program("train", *work, "--base", "nf4", "--freeze", "mlp"), 2, "--base nf4", "--lora-rank")


if __name__ == "__main__":
    main()
