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


def read_tensors(path):
    """Bytes of each tensor of a safetensors file, by name."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    return {n: content[8 + length:][slice(*t["data_offsets"])] for n, t in header.items()}


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
                refused = [self.refused(self.run_program(command, "--model", BITSANDBYTES / name, *work[:-2]), 4, "NF4")
                           for command in ("train", "plan")]
                self.assertEqual(*refused)

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
        self.refused(self.run_program("train", *work, "--base", "nf4"), 2, "--base nf4", "--lora-rank", "--freeze")
        self.refused(self.run_program("train", *work, "--base", "fp4"), 2, "--base", "nf4")
        self.refused(self.run_program("train", *work, "--base", "nf4", "--freeze", "norm|embed"), 2, "--base nf4", "--lora-rank")

    def test_bench_compares_digests_over_codes(self):
        report = json.loads(self.succeed(self.run_program(
            "bench", "--model", "tiny-llama", *WORK[:-4], *LORA, "--base", "nf4", "--steps", "1", "--policies", "host", "stream",
            "--json")).stdout)
        digests = {row["state_digest"] for row in report["policies"]}
        self.assertEqual((len(report["policies"]), len(digests)), (2, 1))


def more_steps(run, steps):
    return ["train", "--resume", run, "--steps", steps]


class FrozenParts(ProgramTest):
    """--base with --freeze alone: checkpoints leave out what is frozen."""
    FREEZE = ["--freeze", r"layers\.[01]\.|embed"]

    def train(self, out, model, *flags):
        return self.run_program("train", "--model", model, "--data", self.text, "--out", self.root / out, *WORK, *flags)

    def begun(self, base="nf4"):
        """A folder with a model's weights, and a run over them."""
        folder, run = self.root / "model", self.root / "run"
        first = ["--model", "tiny-llama", "--data", self.text, *WORK]
        self.succeed(self.run_program("train", *first, "--steps", "1", "--lr", "0", "--out", self.root / "first"))
        self.succeed(self.run_program("export", self.root / "first", "--to", folder, "--dtype", "fp32"))
        self.succeed(self.train("run", folder, *self.FREEZE, "--base", base, "--checkpoint-every", "2", "--keep", "0",
                                "--eval-data", self.text, "--eval-every", "4"))
        return folder, run

    def loss(self, model):
        return json.loads(self.succeed(self.run_program("eval", "--model", model, "--data", self.text, "--seq-len", "32",
                                                        "--device", "host", "--json")).stdout)["loss"]

    def test_one_digest_in_each_format(self):
        digests = {}
        for base in FORMATS:
            ways = WAYS if base == "nf4" else {way: WAYS[way] for way in ("device", "streamed")}
            for way, flags in ways.items():
                with self.subTest(base=base, way=way):
                    out = f"{base} {way}"
                    self.succeed(self.train(out, "tiny-llama", *self.FREEZE, "--base", base, *flags))
                    summary = self.summary(self.root / out)
                    self.assertEqual(summary["base_format"], base)
                    self.assertEqual(digests.setdefault(base, summary["state_digest"]), summary["state_digest"])
                    self.assertEqual(self.succeed(self.run_program("digest", self.root / out)).stdout.strip(), digests[base])
        self.assertEqual(len(set(digests.values())), len(FORMATS))

    def test_a_run_is_a_model_and_goes_on(self):
        folder, run = self.begun()
        last = run / "checkpoints" / "step-00000004"
        stored = read_tensors(last / "state.safetensors")
        self.assertIn("master.block.2.mlp.up_proj.weight", stored)
        self.assertFalse([n for n in stored if "block.0." in n or "block.1." in n or "embedding" in n])
        manifest = json.loads((last / "manifest.json").read_text())
        self.assertEqual((manifest["format"], manifest["base"], manifest["base_format"]), (2, str(folder), "nf4"))
        begun = run / "checkpoints" / "step-00000002"
        self.succeed(self.train("again", folder, *self.FREEZE, "--base", "nf4", "--resume", begun, "--policy", "stream"))
        self.assertEqual(self.summary(self.root / "again")["state_digest"], self.summary(run)["state_digest"])

        exported = self.root / "exported"
        done = self.succeed(self.run_program("export", run, "--to", exported, "--dtype", "fp32"))
        self.assertIn("nf4", done.stderr)
        before, after = (read_tensors(f / "model.safetensors") for f in (folder, exported))
        self.assertEqual(before.keys(), after.keys())
        for name in before:
            frozen = "layers.0." in name or "layers.1." in name or "embed" in name
            self.assertEqual(before[name] == after[name], frozen, name)
        loss = self.loss(run)
        self.assertEqual(loss, self.loss(exported))
        self.assertNotEqual(loss, self.summary(run)["eval_loss"], "eval has the original weights, training had codes")
        self.assertLess(abs(loss / self.summary(run)["eval_loss"] - 1), 0.01)
        self.succeed(self.run_program("sample", "--model", run, "--prompt", "a", "--max-tokens", "2", "--device", "host"))

    def test_over_a_run_over_a_run(self):
        self.succeed(self.train("one", "tiny-llama", *self.FREEZE, "--base", "nf4"))
        self.succeed(self.train("two", self.root / "one", "--freeze", r"layers\.[23]\.", "--base", "int8"))
        self.succeed(self.run_program("export", self.root / "two", "--to", self.root / "exported", "--dtype", "fp32"))
        self.assertEqual(self.loss(self.root / "two"), self.loss(self.root / "exported"))
        self.assertLess(self.loss(self.root / "two"), self.loss(self.root / "one"))

    def test_a_base_beneath_a_base_that_has_moved(self):
        folder, one = self.begun()
        self.succeed(self.train("two", one, "--freeze", r"layers\.[23]\.", "--base", "int8"))
        loss = self.loss(self.root / "two")
        folder.rename(self.root / "moved")
        self.refused(self.run_program("eval", "--model", self.root / "two", "--data", self.text), 2, str(folder),
                     f"tandem export {one / 'checkpoints' / 'step-00000004'} --model DIR --to NEW")
        self.succeed(self.run_program("export", one, "--model", self.root / "moved", "--to", self.root / "new"))
        result = self.succeed(self.run_program("eval", self.root / "two", "--model", self.root / "new", "--data", self.text, "--seq-len", "32",
                                               "--device", "host", "--json"))
        self.assertEqual(json.loads(result.stdout)["loss"], loss)

    def test_another_base_is_refused_by_name(self):
        folder, run = self.begun()
        name, file = "model.layers.1.mlp.up_proj.weight", folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", content[:8])
        at = 8 + length + json.loads(content[8:8 + length])[name]["data_offsets"][0]
        content[at + 3] ^= 1  # the bit beside the sign of the first value
        file.write_bytes(content)
        more = ["train", "--resume", run, "--steps", "5"]
        for command in (more, ["eval", "--model", run, "--data", self.text, "--seq-len", "32"],
                        ["export", run, "--to", self.root / "exported"]):
            self.refused(self.run_program(*command), 4, "block.1.mlp.up_proj.weight", "base has changed")
        self.assertFalse((self.root / "exported").exists())
        content[at + 3] ^= 1
        file.write_bytes(content)
        self.refused(self.run_program(*more, "--base", "int8"), 4, "--base nf4", "int8")
        self.refused(self.run_program(*more, "--base", "bf16"), 4, "--base nf4", "bf16")
        self.succeed(self.run_program(*more))
        whole = self.root / "first" / "checkpoints" / "step-00000001"
        self.refused(self.train("other", folder, "--resume", whole, *self.FREEZE, "--base", "nf4"), 4, "frozen")
        folder.rename(self.root / "moved")
        moved, flags = self.root / "moved", ["--seq-len", "32", "--device", "host"]
        for command, *more in (["eval", "--data", self.text, *flags], ["sample", "--prompt", "a", "--max-tokens", "2", "--device", "host"],
                               ["export", "--to", self.root / "exported", "--dtype", "fp32"]):
            self.refused(self.run_program(command, run, *more), 2, str(folder), f"tandem {command} {run} --model DIR")
            self.succeed(self.run_program(command, run, "--model", moved, *more))
        self.refused(self.run_program(*more_steps(run, 6)), 2, str(folder), "--model DIR")
        self.refused(self.train("new", run), 2, str(folder), f"tandem export {run} --model DIR --to NEW")
        self.assertEqual(self.loss(self.root / "exported"), json.loads(self.succeed(self.run_program(
            "eval", run, "--model", moved, "--data", self.text, *flags, "--json")).stdout)["loss"])
        content[at + 3] ^= 1
        (moved / "model.safetensors").write_bytes(content)
        self.refused(self.run_program("eval", run, "--model", moved, "--data", self.text), 4, "block.1.mlp.up_proj.weight")
        self.refused(self.run_program(*more_steps(run, 6), "--model", moved), 4, "block.1.mlp.up_proj.weight")
        content[at + 3] ^= 1
        (moved / "model.safetensors").write_bytes(content)
        self.succeed(self.run_program(*more_steps(run, 6), "--model", moved))
        self.succeed(self.run_program(*more_steps(run, 7)))  # it is known by now

    def test_checkpoints_that_have_hashes_of_values_alone(self):
        _, run = self.begun()
        manifest = run / "checkpoints" / "step-00000004" / "manifest.json"
        content = json.loads(manifest.read_text())
        for parameter in content["parameters"]:
            if "original" in parameter:
                parameter["elsewhere"] = parameter.pop("original")
        manifest.write_text(json.dumps(content))
        content["state_digest"] = self.succeed(self.run_program("digest", run)).stdout.strip()
        manifest.write_text(json.dumps(content))
        self.loss(run)
        self.succeed(self.run_program("train", "--resume", run, "--steps", "5"))

    def test_what_bitsandbytes_wrote_is_exported_decoded(self):
        ids = self.file("ids.bin", struct.pack("<400H", *(i * 7 % 23 for i in range(400))))
        run = self.root / "run"
        self.succeed(self.run_program("train", "--model", BITSANDBYTES / "nf4_double", "--freeze", "layers", "--data", ids, "--device",
                                      "host", "--threads", "1", "--seq-len", "16", "--steps", "2", "--out", run))
        self.assertEqual(self.summary(run)["base_format"], "nf4-double")
        done = self.succeed(self.run_program("export", run, "--to", self.root / "exported"))
        self.assertIn(f"{BITSANDBYTES / 'nf4_double'}: its linear layers are NF4 by bitsandbytes", done.stderr)
        flags = ["--data", ids, "--seq-len", "16", "--device", "host", "--threads", "1", "--json"]
        losses = [json.loads(self.succeed(self.run_program("eval", "--model", m, *flags)).stdout)["loss"]
                  for m in (run, self.root / "exported")]
        self.assertEqual(losses[0], losses[1])
        self.succeed(self.run_program("train", "--resume", run, "--steps", "3"))

    def test_bases_that_name_one_another(self):
        run = self.root / "run"
        self.succeed(self.train("run", "tiny-llama", *self.FREEZE, "--base", "nf4", "--steps", "1"))
        manifest = run / "checkpoints" / "step-00000001" / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "base": str(run)}))
        self.refused(self.run_program("eval", "--model", run, "--data", self.text), 2, "base")


if __name__ == "__main__":
    main()
