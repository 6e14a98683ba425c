"""Direct preference optimization by the program: it learns, one digest whatever the settings, a run that was killed goes on with
the reference that it kept, scores beside the data are the reference, and what does not fit together is refused in a line."""
import json
import math
import pathlib
import random
import shutil
import signal
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from program import ProgramTest, main, wait_for  # noqa: E402

ROW = 17
WORK = ["--model", "tiny-gpt2", "--device", "host", "--threads", "1", "--update-threads", "1", "--objective", "dpo", "--micro-batch", "2",
        "--grad-accum", "2", "--lr", "1e-3"]
ADAPTERS = ["--lora-rank", "8", "--lora-alpha", "64", "--lora-dropout", "0.1"]
FIGURES = ["reward_margin", "reward_accuracy"]


def rows_of(pairs, seed):
    """Rows and masks: prompts of any letters; of the answers the chosen one rises, and the rejected one falls."""
    draw = random.Random(seed)
    ids, mask = [], []
    for _ in range(pairs):
        prompt = [draw.randrange(97, 123) for _ in range(draw.randrange(3, 7))]
        for step in (1, -1):
            first = draw.randrange(105, 115)
            answer = [first + step * i for i in range(draw.randrange(4, 9))]
            padding = ROW - len(prompt) - len(answer)
            ids += prompt + answer + [0] * padding
            mask += [0] * len(prompt) + [1] * len(answer) + [0] * padding
    return ids, mask


class Preferences(ProgramTest):
    def setUp(self):
        super().setUp()
        self.data, self.held = self.pairs("train", 24, 1), self.pairs("held", 5, 2)

    def pairs(self, name, count, seed, pairs=True):
        ids, mask = rows_of(count, seed)
        self.file(f"{name}.mask.bin", bytes(mask))
        self.file(f"{name}.json", json.dumps({"dtype": "uint16", "layout": "rows", "row_length": ROW, "pairs": pairs}))
        return self.file(f"{name}.bin", struct.pack(f"<{len(ids)}H", *ids))

    def dpo(self, out, *arguments, data=None):
        return self.run_program("train", *WORK, "--data", data or self.data, *(["--out", out] if out else []), *arguments)

    def scores(self, file):
        """Log-probabilities in a safetensors file, and its metadata."""
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8:8 + length])
        begin, end = header["log_probabilities"]["data_offsets"]
        values = content[8 + length:][begin:end]
        return struct.unpack(f"<{len(values) // 4}f", values), header["__metadata__"]

    def test_adapters_learn_over_a_coded_base(self):
        """The reference is the base as it is coded, which the adapters leave at step 0."""
        digests = set()
        for name, flags in {"device": ["--policy", "device"], "streamed": ["--policy", "host", "--resident-layers", "0"]}.items():
            out = self.root / name
            self.succeed(self.dpo(out, "--steps", "12", "--lora-rank", "8", "--lora-alpha", "64", "--base", "nf4", *flags))
            metrics = self.metrics(out)
            self.assertEqual([metrics[0][key] for key in ("loss", *FIGURES)],
                             [struct.unpack("f", struct.pack("f", math.log(2)))[0], 0, 0])
            self.assertGreater(metrics[-1]["reward_margin"], 0.1)
            self.assertLess(metrics[-1]["loss"], metrics[0]["loss"])
            digests.add(self.summary(out)["state_digest"])
        self.assertEqual(len(digests), 1)
        self.succeed(self.run_program("train", "--resume", self.root / "device", "--steps", "13"))

    def test_the_reference_in_each_step_has_the_bits_of_one_beforehand(self):
        for base in ("bf16", "nf4"):
            seen = {}
            for name, flags in {
                    "before": ["--dpo-reference", "before", "--policy", "device"],
                    "streamed": ["--policy", "host", "--resident-layers", "0", "--recompute", "block"],
                    "layer": ["--policy", "static:0.5", "--accumulation-order", "layer", "--recompute", "selective"],
                    "two devices": ["--device", "host,host", "--recompute", "block:1"]}.items():
                out = self.root / base / name
                way = [] if name == "before" else ["--dpo-reference", "step"]
                result = self.succeed(self.dpo(out, *ADAPTERS, "--steps", "5", "--base", base, *flags, *way))
                self.assertEqual("reference: log-probabilities" in result.stdout, name == "before")
                self.assertEqual((out / "reference.safetensors").exists(), name == "before")
                summary = self.summary(out)
                self.assertEqual(summary["dpo_reference"], "before" if name == "before" else "step")
                self.assertEqual(summary["planned_device_bytes"], summary["peak_device_bytes"], name)
                figures = [[m[key] for key in ("loss", "grad_norm", *FIGURES)] for m in self.metrics(out)]
                seen[name] = (figures, summary["state_digest"])
            self.assertNotEqual(seen["before"][0][-1][2], 0)
            for name, figures in seen.items():
                self.assertEqual(figures, seen["before"], (base, name))

    def test_a_killed_run_goes_on_with_the_reference_of_its_steps(self):
        more = [*ADAPTERS, "--steps", "8", "--eval-data", self.held, "--checkpoint-every", "1"]
        whole, out = self.root / "whole", self.root / "out"
        self.succeed(self.dpo(whole, *more, "--dpo-reference", "before"))
        process = self.start_dpo(out, *more, "--dpo-reference", "step")
        wait_for(lambda: list(out.glob("checkpoints/step-????????/manifest.json")))
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.succeed(self.dpo(out, *more, "--resume"))  # goes on as it began, also where the flag says nothing
        self.assertEqual(self.summary(out)["dpo_reference"], "step")
        self.assertFalse((out / "reference.safetensors").exists())
        self.assertEqual([m["loss"] for m in self.metrics(out)], [m["loss"] for m in self.metrics(whole)])
        for key in ("state_digest", "eval_loss", "reward_margin", "eval_reward_margin"):
            self.assertEqual(self.summary(out)[key], self.summary(whole)[key], key)
        self.refused(self.dpo(out, *more, "--steps", "9", "--resume", "--dpo-reference", "before"), 4, "--dpo-reference before", "is missing",
                     "--dpo-reference step")
        # Reference values computed beforehand may be computed by the steps that are left.
        self.succeed(self.dpo(out, *more, "--steps", "10", "--resume"))
        self.succeed(self.dpo(whole, *more, "--steps", "10", "--resume", "--dpo-reference", "step"))
        self.assertEqual(self.summary(out)["state_digest"], self.summary(whole)["state_digest"])

    def test_steps_compute_the_reference_of_adapters_alone(self):
        run = ["--steps", "1", "--dpo-reference", "step"]
        self.refused(self.dpo(None, *run), 2, "--dpo-reference step", "the model itself is trained")
        self.refused(self.dpo(None, *run, *ADAPTERS, "--lora-modules-to-save", "ln_f"), 2, "trained whole")

    def adapter_with_ties(self):
        """An adapter whose values lie between two weights, which round away from zero and not to even."""
        first, exported = self.root / "first", self.root / "ties"
        self.succeed(self.dpo(first, *ADAPTERS, "--lora-dropout", "0", "--steps", "4"))
        self.succeed(self.run_program("export", first, "--to", exported, "--dtype", "fp32"))
        file = exported / "adapter_model.safetensors"
        content = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", content[:8])
        for at in range(8 + length, len(content), 4):
            content[at:at + 2] = b"\0\x80"
        file.write_bytes(content)
        return exported

    def test_the_reference_of_an_adapter_has_the_same_bits_in_each_step(self):
        adapter = self.adapter_with_ties()
        seen, more = {}, ["--adapter", adapter, "--lora-dropout", "0.1", "--steps", "4"]
        for name, flags in {
                "before": ["--dpo-reference", "before", "--policy", "device"],
                "streamed": ["--policy", "host", "--resident-layers", "0", "--recompute", "block"],
                "layer": ["--policy", "static:0.5", "--accumulation-order", "layer", "--recompute", "selective", "--base", "bf16"],
                "two devices": ["--device", "host,host", "--recompute", "block:1"]}.items():
            out = self.root / name
            self.succeed(self.dpo(out, *more, *flags, *([] if name == "before" else ["--dpo-reference", "step"])))
            self.assertEqual((out / "reference.safetensors").exists(), name == "before")
            summary = self.summary(out)
            self.assertEqual(summary["planned_device_bytes"], summary["peak_device_bytes"], name)
            figures = [[m[key] for key in ("loss", "grad_norm", *FIGURES)] for m in self.metrics(out)]
            seen[name] = (figures, summary["state_digest"])
        self.assertNotEqual(seen["before"][0][-1][2], 0)
        for name, figures in seen.items():
            self.assertEqual(figures, seen["before"], name)
        rows = [{e["name"]: e["bytes"] for e in json.loads(self.succeed(self.run_program(
            "plan", *WORK, "--data", self.data, "--adapter", adapter, "--dpo-reference", way, "--json")).stdout)["entries"]}
            for way in ("before", "step")]
        self.assertNotIn("reference adapters", rows[0])
        self.assertGreater(rows[1]["reference adapters"], 0)

    def test_a_run_keeps_the_adapter_of_its_reference(self):
        adapter = self.adapter_with_ties()
        whole, out = self.root / "whole", self.root / "out"
        more = ["--adapter", adapter, "--steps", "6", "--checkpoint-every", "2", "--keep", "0"]
        self.succeed(self.dpo(whole, *more, "--dpo-reference", "before"))
        self.succeed(self.dpo(out, *more, "--dpo-reference", "step"))
        self.assertEqual(self.summary(out)["state_digest"], self.summary(whole)["state_digest"])
        tensors = adapter / "adapter_model.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-4000] + b"\1" * 4000)  # other values than the run began with
        for run in (out, whole):  # steps may compute what earlier ones had beforehand
            again = self.root / f"{run.name}-again"
            self.succeed(self.dpo(again, *more, "--dpo-reference", "step", "--resume", run / "checkpoints" / "step-00000002"))
            self.assertEqual(self.summary(again)["state_digest"], self.summary(out)["state_digest"])
            self.assertTrue((again / "reference-adapter").exists())
        shutil.rmtree(adapter)
        self.succeed(self.dpo(self.root / "out-again", "--steps", "7", "--resume"))
        shutil.rmtree(out / "reference-adapter")
        self.refused(self.dpo(out, *more, "--steps", "7", "--resume"), 4, "--dpo-reference step", "reference-adapter is missing", "put it back")
        self.succeed(self.dpo(whole, *more, "--steps", "7", "--resume"))
        self.assertEqual(self.summary(self.root / "out-again")["state_digest"], self.summary(whole)["state_digest"])

    def test_the_plan_takes_the_cheaper_way(self):
        def planned(profile, *flags):
            result = self.succeed(self.run_program(
                "plan", "--model", "llama3.1-8b", "--objective", "dpo", "--lora-rank", "16", "--micro-batch", "2", "--grad-accum", "4",
                "--seq-len", "64", "--host-memory", "64GiB", "--profile", profile, "--json", *flags))
            return json.loads(result.stdout)["reference"]
        bound_by_compute, bound_by_link = planned("24gb-pcie4", "--epochs", "3"), planned("8gb-pcie4", "--epochs", "3")
        self.assertEqual((bound_by_compute["when"], bound_by_link["when"]), ("before", "step"))
        self.assertLess(bound_by_compute["before_seconds"], bound_by_compute["added_seconds"])
        self.assertGreater(bound_by_link["before_seconds"], 2 * bound_by_link["added_seconds"])
        self.assertEqual(planned("24gb-pcie4", "--epochs", "1")["when"], "step")  # no record is used again
        self.assertEqual(planned("8gb-pcie4", "--epochs", "3", "--dpo-reference", "before")["when"], "before")

    def test_what_is_preferred_is_learnt(self):
        out = self.root / "run"
        result = self.succeed(self.dpo(out, "--steps", "30", "--eval-data", self.held, "--eval-every", "10"))
        self.assertIn("reference: log-probabilities of the 48 records of --data", result.stdout)
        self.assertIn("reference: about ", result.stdout)
        self.assertIn("margin 0.0000 right 0%", result.stdout)
        metrics = self.metrics(out)
        self.assertEqual([metrics[0][key] for key in ("loss", *FIGURES)], [struct.unpack("f", struct.pack("f", math.log(2)))[0], 0, 0])
        self.assertLess(metrics[-1]["loss"], 0.2)
        self.assertGreater(metrics[-1]["reward_margin"], 1.5)
        self.assertEqual(metrics[-1]["reward_accuracy"], 1)
        self.assertLess(metrics[-1]["eval_loss"], 0.4)
        self.assertEqual(metrics[-1]["eval_reward_accuracy"], 1)
        self.assertIn(f"right 100% after step 30", result.stdout)
        summary = self.summary(out)
        self.assertEqual(summary["objective"], "dpo")
        for key in FIGURES:
            self.assertEqual(summary[key], metrics[-1][key])
            self.assertEqual(summary[f"eval_{key}"], metrics[-1][f"eval_{key}"])
        # An epoch is each pair once, and tokens are those of both answers.
        self.succeed(self.dpo(self.root / "epoch", "--epochs", "1"))
        self.assertEqual((self.summary(self.root / "epoch")["steps"], self.summary(self.root / "epoch")["tokens"]),
                         (12, sum(rows_of(24, 1)[1])))

    def test_one_digest_whatever_the_settings(self):
        digests = set()
        for number, flags in enumerate([
                ["--policy", "device"], ["--policy", "host", "--recompute", "block"],
                ["--policy", "static:0.5", "--resident-layers", "0", "--prefetch-layers", "1", "--subgroup-size", "4097"],
                ["--policy", "interleave:2", "--accumulation-order", "layer", "--recompute", "selective"],
                ["--policy", "stream", "--accumulation-order", "micro-batch", "--speculate", "on"]]):
            out = self.root / f"run{number}"
            self.succeed(self.dpo(out, "--steps", "3", *flags))
            digests.add(self.summary(out)["state_digest"])
        self.assertEqual(len(digests), 1, digests)
        for flags in (["--dpo-beta", "0.11"], ["--seed", "7"]):
            self.succeed(self.dpo(self.root / flags[0], "--steps", "3", *flags))
            self.assertNotIn(self.summary(self.root / flags[0])["state_digest"], digests)

    def test_two_devices_have_the_bits_of_one(self):
        digests = []
        for number, devices in enumerate(("host", "host,host")):
            out = self.root / f"run{number}"
            self.succeed(self.dpo(out, "--steps", "3", "--eval-data", self.held, "--device", devices))
            digests.append([self.summary(out)[key] for key in ("state_digest", "eval_loss", "eval_reward_margin")])
        self.assertEqual(*digests)

    def test_a_killed_run_goes_on_with_its_reference(self):
        whole = self.root / "whole"
        more = ["--steps", "8", "--eval-data", self.held, "--checkpoint-every", "1"]
        self.succeed(self.dpo(whole, *more))
        out = self.root / "out"
        process = self.start_dpo(out, *more)
        wait_for(lambda: list(out.glob("checkpoints/step-????????/manifest.json")))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = {name: (out / name).read_bytes() for name in ("reference.safetensors", "reference-eval.safetensors")}
        result = self.succeed(self.dpo(out, *more, "--resume"))
        self.assertIn("resumed from", result.stdout)
        self.assertNotIn("reference: log-probabilities", result.stdout)
        for name, content in kept.items():
            self.assertEqual((out / name).read_bytes(), content)
            self.assertEqual((whole / name).read_bytes(), content)
        self.assertEqual([m["loss"] for m in self.metrics(out)], [m["loss"] for m in self.metrics(whole)])
        for key in ("state_digest", "eval_loss", "reward_margin", "eval_reward_margin"):
            self.assertEqual(self.summary(out)[key], self.summary(whole)[key], key)
        # A checkpoint that goes on in another folder takes the reference along.
        other = self.root / "other"
        self.succeed(self.dpo(other, *more, "--steps", "9", "--resume", out / "checkpoints" / "step-00000008"))
        self.assertEqual((other / "reference.safetensors").read_bytes(), kept["reference.safetensors"])
        (out / "reference.safetensors").unlink()
        self.refused(self.dpo(out, *more, "--steps", "9", "--resume"), 4, "the reference of --data", "is missing", "put it back")
        shutil.copy(out / "reference-eval.safetensors", out / "reference.safetensors")
        self.refused(self.dpo(out, *more, "--steps", "9", "--resume"), 4, "is of other data")

    def start_dpo(self, out, *arguments):
        import subprocess
        from program import PROGRAM
        process = subprocess.Popen([PROGRAM, "train", *WORK, "--data", str(self.data), "--out", str(out), *map(str, arguments)],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment())
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_scores_beside_the_data_are_the_reference(self):
        model = self.root / "model"
        self.succeed(self.dpo(self.root / "first", "--steps", "2"))
        self.succeed(self.run_program("export", self.root / "first", "--to", model, "--dtype", "fp32"))
        work = ["--model", model, "--steps", "2"]
        computed = self.succeed(self.dpo(self.root / "computed", *work))
        self.assertIn("log-probabilities of the 48 records", computed.stdout)
        scored = self.succeed(self.run_program("score", model, "--data", self.data, "--micro-batch", "2", *WORK[2:6], "--text"))
        values, facts = self.scores(self.root / "train.scores.safetensors")
        self.assertEqual((values, facts), self.scores(self.root / "computed" / "reference.safetensors"))
        lines = [line.split() for line in scored.stdout.splitlines()]
        mask = rows_of(24, 1)[1]
        self.assertEqual(lines[0], ["record", "targets", "log_probability"])
        self.assertEqual([int(line[1]) for line in lines[1:]], [sum(mask[i:i + ROW]) for i in range(0, len(mask), ROW)])
        for line, value in zip(lines[1:], values, strict=True):
            self.assertAlmostEqual(float(line[2]), value, places=3)
        # eval gives the same number, of the same targets.
        answer = json.loads(self.succeed(self.run_program("score", model, "--data", self.data, *WORK[2:6], "--json", "--out",
                                                                self.root / "s")).stdout)
        self.pairs("train", 24, 1, pairs=False)
        loss = json.loads(self.succeed(self.run_program("eval", "--model", model, "--data", self.data, *WORK[2:6], "--json")).stdout)
        self.assertEqual((answer["records"], answer["tokens"]), (48, loss["tokens"]))
        self.assertAlmostEqual(-answer["log_probability"] / answer["tokens"], loss["loss"], places=5)
        self.pairs("train", 24, 1)
        result = self.succeed(self.dpo(self.root / "found", *work))
        self.assertIn("from " + str(self.root / "train.scores.safetensors"), result.stdout)
        self.assertEqual(self.summary(self.root / "found")["state_digest"], self.summary(self.root / "computed")["state_digest"])
        # Scores of other weights are not taken, and in a folder none are data.
        result = self.succeed(self.dpo(self.root / "others", "--steps", "2"))
        self.assertIn("of other weights", result.stderr)
        self.assertEqual(self.summary(self.root / "others")["state_digest"], self.summary(self.root / "first")["state_digest"])
        folder = self.root / "folder"
        folder.mkdir()
        for path in self.root.glob("train.*"):
            shutil.copy(path, folder)
        self.succeed(self.dpo(self.root / "of-folder", "--steps", "1", data=folder))

    def exported_model(self):
        model = self.root / "model"
        self.succeed(self.dpo(self.root / "first", "--steps", "1"))
        self.succeed(self.run_program("export", self.root / "first", "--to", model, "--dtype", "fp32"))
        return model

    def test_scores_that_were_made_otherwise_are_not_the_reference(self):
        model, adapter = self.exported_model(), self.root / "adapter"
        self.succeed(self.dpo(adapter, "--model", model, *ADAPTERS, "--steps", "2"))
        again = ["--model", adapter / "checkpoints" / "step-00000002", "--steps", "1"]
        file = self.root / "train.scores.safetensors"
        score = ["score", adapter, "--data", self.data, "--device", "host", "--threads", "1"]
        self.succeed(self.run_program(*score))
        self.assertIn(str(file), self.succeed(self.dpo(None, *again)).stdout)
        for flags, words in ((["--compute", "bf16"], "made with compute f32, where this run has compute bf16"),
                             (["--base", "nf4"], "where this run has compute f32; base nf4")):
            self.assertIn(words, self.succeed(self.dpo(None, *again, *flags)).stderr)
        # An adapter of the same values that counts otherwise.
        exported = self.root / "exported"
        self.succeed(self.run_program("export", adapter, "--to", exported))
        described = json.loads((exported / "adapter_config.json").read_text())
        described["lora_alpha"] *= 10
        (exported / "adapter_config.json").write_text(json.dumps(described))
        base = ["--model", model, "--steps", "1"]
        self.assertIn("of other weights", self.succeed(self.dpo(None, *base, "--adapter", exported)).stderr)
        # The scores of the model below serve adapters that begin at zero.
        self.succeed(self.run_program("score", model, "--data", self.data, "--device", "host", "--threads", "1"))
        fresh = self.dpo(None, *base, *ADAPTERS, "--dpo-reference", "before")
        self.assertIn("from " + str(file), self.succeed(fresh).stdout)

    def test_scores_take_an_adapter_and_write_over_scores_alone(self):
        model, adapter = self.exported_model(), self.root / "adapter"
        self.succeed(self.dpo(adapter, "--model", model, *ADAPTERS, "--steps", "2"))
        host = ["--data", self.data, "--device", "host", "--threads", "1", "--json"]
        said = [json.loads(self.succeed(self.run_program("score", *of, *host, "--out", self.root / "s.safetensors")).stdout)["log_probability"]
                for of in ([adapter], [model, "--adapter", adapter], [model])]
        self.assertEqual(said[0], said[1])
        self.assertNotEqual(said[1], said[2])
        for lost in (self.data, self.text):
            before = lost.read_bytes()
            self.refused(self.run_program("score", adapter, *host, "--out", lost), 7, str(lost), "--out")
            self.assertEqual(lost.read_bytes(), before)

    def test_what_does_not_go_together_is_refused(self):
        plain = self.pairs("plain", 3, 3, pairs=False)
        run = ["--steps", "1"]
        self.refused(self.dpo(None, *run, "--micro-batch", "3"), 2, "--micro-batch 3", "pairs", "--micro-batch 2")
        self.refused(self.dpo(None, *run, "--dpo-beta", "0"), 2, "--dpo-beta: '0'", "above 0")
        self.refused(self.dpo(None, *run, "--objective", "kto"), 2, "--objective: 'kto'", "use lm, dpo")
        self.refused(self.dpo(None, *run, data=plain), 4, "--data", "no pairs of answers", "leave out --objective dpo")
        self.refused(self.dpo(None, *run, data=self.text), 4, "no pairs of answers")
        self.refused(self.dpo(None, *run, "--eval-data", plain), 4, "--eval-data", "no pairs")
        self.refused(self.run_program("train", *WORK, "--mix", f"{self.data}=1,{self.held}=1", *run), 2, "--mix", "one source of pairs")
        self.refused(self.dpo(None, *run, "--objective", "lm"), 4, "--data", "pairs of answers", "--objective dpo")
        self.refused(self.run_program("train", *WORK[:6], "--data", self.text, "--eval-data", self.held, "--seq-len", "16", *run), 4,
                     "--eval-data", "--objective dpo")
        out = self.root / "run"
        self.succeed(self.dpo(out, *run))
        self.refused(self.run_program("eval", "--model", out, "--data", self.data), 4, "pairs of answers", "tandem score")
        self.file("stream.json", '{"dtype": "uint16"}')
        stream = self.file("stream.bin", bytes(200))
        self.refused(self.run_program("score", out, "--data", stream), 4, "no rows of their own", "--layout rows")
        self.refused(self.run_program("score", out, "--data", self.data, self.held), 2, "--out", "scores.safetensors")
        self.refused(self.run_program("score", out), 2, "--data", "missing")
        self.file("train.scores.safetensors", "no such file")
        self.refused(self.dpo(None, *run), 4, "train.scores.safetensors")
        self.file("train.scores.safetensors", b"")
        (self.root / "train.scores.safetensors").unlink()
        self.file("train.mask.bin", b"").unlink()
        self.refused(self.dpo(None, *run), 4, "need a mask", "train.mask.bin is missing")

    def test_the_plan_counts_pairs(self):
        def planned(*flags):
            return json.loads(self.succeed(self.run_program("plan", *WORK, "--data", self.data, *flags, "--json")).stdout)
        names = {e["name"]: e["bytes"] for e in planned()["entries"]}
        self.assertEqual(names["reference of DPO"], 256)  # 48 numbers, aligned
        names = {e["name"]: e["bytes"] for e in planned("--eval-data", self.data)["entries"]}
        self.assertEqual(names["reference of DPO"], 512, "those of --eval-data count, too")


if __name__ == "__main__":
    main()
