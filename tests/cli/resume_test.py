"""State of a resumed run, to the last bit, in every way of training, and who may resume it."""
import struct

from program import ProgramTest, main

WAYS = {
    "moments in 16 bits": ["--state", "bf16-moments"],
    "moments in 8 bits": ["--state", "8bit-moments"],
    "by Lion": ["--state", "lion", "--beta2", "0.99", "--lr", "3e-4"],
    "accumulated": ["--grad-accum", "3"],
    "frozen": ["--freeze", r"wpe|h\.1\."],
    "offloaded": ["--recompute", "block", "--offload-activations"],
    "computed in 16 bits": ["--compute", "bf16"],
    "recomputed": ["--recompute", "block:1"],
    "selectively recomputed": ["--recompute", "selective"],
    "updated in backward": ["--clip", "0", "--on-nonfinite", "stop"],
}


class StraightAndBroken(ProgramTest):
    def check(self, name, *flags, data=None):
        """Six steps at once, and three more from the checkpoint of the third. Returns the metrics of all."""
        straight, broken = self.root / f"{name} straight", self.root / f"{name} broken"
        flags = ["--steps", "6", "--lr", "1e-3", *flags]
        self.succeed(self.train(*flags, "--checkpoint-every", "3", "--out", straight, data=data))
        third = straight / "checkpoints" / "step-00000003"
        self.succeed(self.train(*flags, "--resume", third, "--out", broken, data=data))
        one, two = self.summary(straight), self.summary(broken)
        self.assertEqual((one["resumed_from_step"], two["resumed_from_step"]), (None, 3))
        for key in ("state_digest", "final_loss", "tokens", "skipped_steps"):
            self.assertEqual(one[key], two[key], key)
        third_digest = self.succeed(self.run_program("digest", third)).stdout.strip()
        self.assertNotEqual(third_digest, one["state_digest"])
        metrics = self.metrics(straight)
        for a, b in zip(metrics[3:], self.metrics(broken), strict=True):
            for key in ("step", "loss", "grad_norm", "lr", "skipped"):
                self.assertEqual(a[key], b[key], (a["step"], key))
        return metrics

    def test_every_way_of_training(self):
        for name, flags in WAYS.items():
            with self.subTest(name):
                self.check(name, *flags)

    def test_after_steps_that_were_skipped(self):
        """Adam's step is not the run's: what it corrects by counts the updates."""
        length, rows = 33, 40
        values = [i * i % 251 for i in range(rows * length)]
        mask = [row % 2 for row in range(rows) for _ in range(length)]
        data = self.file("rows.bin", struct.pack(f"<{len(values)}H", *values))
        self.file("rows.mask.bin", bytes(mask))
        self.file("rows.json", '{"layout": "rows", "row_length": 33, "dtype": "uint16", "vocab_size": 256}')
        skipped = [m["skipped"] for m in self.check("skipping", "--micro-batch", "1", data=data)]
        for half in (skipped[:3], skipped[3:]):
            self.assertEqual(set(half), {False, True})


class ComputeKeys(ProgramTest):
    def test_another_one_is_warned_of_and_refused_where_strict(self):
        first = self.root / "first"
        self.succeed(self.train("--steps", "1", "--out", first))
        key = self.summary(first)["compute_key"]
        again = ["--steps", "2", "--resume", first]
        same = self.succeed(self.train(*again, "--strict", "--out", self.root / "same"))
        self.assertNotIn("compute_key", same.stderr)
        self.assertEqual(self.summary(self.root / "same")["compute_key"], key)
        other = self.succeed(self.train(*again, "--threads", "2", "--out", self.root / "other"))
        self.assertIn("another compute_key", other.stderr)
        self.assertIn(key, other.stderr)
        self.assertNotEqual(self.summary(self.root / "other")["compute_key"], key)
        refused = self.root / "refused"
        self.refused(self.train(*again, "--threads", "2", "--strict", "--out", refused), 4, "--strict", "compute_key")
        self.assertFalse(refused.exists())


class Refused(ProgramTest):
    def test_state_of_another_optimizer(self):
        ways = {"lion": ("AdamW", "Lion"), "split": ("Lion", "AdamW")}
        for state, (_, name) in ways.items():
            self.succeed(self.train("--steps", "1", "--state", state, "--out", self.root / name))
        for state, (stored, wanted) in ways.items():
            with self.subTest(state=state):
                before = self.summary(self.root / stored)
                flags = ["--steps", "2", "--state", state, "--resume", self.root / stored]
                advice = "resume with --state " + ("lion" if stored == "Lion" else "fp32")
                for out in (self.root / stored, self.root / "new"):
                    self.refused(self.train(*flags, "--out", out), 4, f"it holds the state of {stored}", advice)
                self.assertFalse((self.root / "new").exists())
                self.assertEqual(self.summary(self.root / stored), before)
                # Both pieces of advice work: the run goes on as it is, and another optimizer begins with its weights.
                self.succeed(self.run_program("train", "--resume", self.root / stored, "--steps", "2"))
                fresh = self.root / f"by {wanted}"
                self.succeed(self.train("--steps", "1", "--state", state, "--model", self.root / stored, "--out", fresh))

    def test_a_checkpoint_that_turns_out_damaged_leaves_nothing_behind(self):
        """The state is read at the very end, when the folder of the new run is there already."""
        first = self.root / "first"
        self.succeed(self.train("--steps", "1", "--out", first))
        checkpoint = first / "checkpoints" / "step-00000001"
        state = bytearray((checkpoint / "state.safetensors").read_bytes())
        state[-1] ^= 1
        (checkpoint / "state.safetensors").write_bytes(state)
        resume = ["--steps", "2", "--resume", checkpoint, "--out"]
        out = self.root / "runs" / "today" / "new"
        self.refused(self.train(*resume, out), 4, "another content")
        self.assertFalse((self.root / "runs").exists())
        # A folder that was there before stays as it was.
        (self.root / "runs").mkdir()
        self.file("runs/note.txt", "mine")
        self.refused(self.train(*resume, out), 4, "another content")
        self.assertEqual([p.name for p in (self.root / "runs").iterdir()], ["note.txt"])
        out.mkdir(parents=True)
        self.refused(self.train(*resume, out), 4, "another content")
        self.assertEqual(list(out.iterdir()), [])
        before = sorted(p.relative_to(first) for p in first.rglob("*"))
        self.refused(self.train(*resume, first), 4, "another content")
        self.assertEqual(sorted(p.relative_to(first) for p in first.rglob("*")), before)
        self.refused(self.train("--steps", "1", "--out", self.root / "traced", "--trace", self.root), 7)
        self.assertFalse((self.root / "traced").exists())
        # The folder is free for the next run, whose lock stays.
        self.succeed(self.train("--steps", "1", "--out", out))
        self.assertTrue((out / ".lock").exists())


if __name__ == "__main__":
    main()
