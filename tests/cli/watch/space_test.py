"""Runs that cannot be saved are refused before the first step; the plan says what checkpoints take and what is free."""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import PROGRAM, SMALL, ProgramTest, main  # noqa: E402

MIB = 1 << 20


def may_mount():
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


class Space(ProgramTest):
    def plan(self, *flags):
        return self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, *flags))

    def checkpoint_bytes(self):
        return json.loads(self.plan("--json").stdout)["checkpoints"]["bytes"]

    def test_the_plan_is_what_a_checkpoint_takes(self):
        out = self.root / "run"
        shown = self.succeed(self.train("--steps", "1", "--out", out)).stdout
        written = sum(file.stat().st_size for file in (out / "checkpoints" / "step-00000001").iterdir())
        planned = self.checkpoint_bytes()
        self.assertGreaterEqual(planned, written)
        self.assertLess(planned, 1.05 * written)
        self.assertRegex(shown, rf"\ncheckpoint +- +- +[\d.]+ MiB; [\d.]+ \w+ free in {re.escape(str(out))}\n")
        self.assertNotIn("\ncheckpoint ", self.succeed(self.train("--steps", "1")).stdout)

    def test_how_many_lie_beside_each_other(self):
        every = ["--checkpoint-every", "2", "--steps", "20"]
        for flags, count in [([], 1), (every, 3), ([*every, "--keep", "1"], 2), ([*every, "--keep", "0"], None),
                             (["--checkpoint-every", "10", "--steps", "20"], 2), (["--checkpoint-every", "2"], 3),
                             ([*every, "--keep-best", "--eval-every", "1"], 4)]:
            with self.subTest(flags=flags):
                planned = json.loads(self.plan("--json", *flags).stdout)["checkpoints"]
                self.assertEqual((planned["at_once"], planned["free_bytes"]), (count, None))
        beside = json.loads(self.plan("--json", "--out", self.root / "not" / "there").stdout)["checkpoints"]
        disk = os.statvfs(self.root)
        self.assertAlmostEqual(beside["free_bytes"], disk.f_bavail * disk.f_frsize, delta=1024 * MIB)
        self.assertIn(" each, 3 at once at most\n", self.plan(*every).stdout)

    @unittest.skipUnless(may_mount(), "needs a name space of mounts")
    def test_refused_before_the_first_step(self):
        one = self.checkpoint_bytes()
        every = ["--checkpoint-every", "1"]
        for room, flags, code, words in [(0.5, [], 7, "a checkpoint needs"), (2.5, every, 7, "--keep 1"),
                                         (2.5, [*every, "--keep", "1"], 0, ""), (2.5, [], 0, ""),
                                         (0.5, ["--dry-run"], 7, "are free")]:
            with self.subTest(room=room, flags=flags):
                result, left = self.train_on_disk_of(int(room * one), *flags)
                if code == 0:
                    self.succeed(result)
                    continue
                self.refused(result, code, words)
                planned = self.on_disk_of(int(room * one), "plan", *flags[:2] if flags[:1] == every[:1] else [])[0]
                self.assertIn(", too little\n", self.succeed(planned).stdout)
                self.assertNotIn("step 1/", result.stdout)
                self.assertEqual(left, [])

    @unittest.skipUnless(may_mount(), "needs a name space of mounts")
    def test_one_that_may_go_on_without_needs_room_for_one(self):
        go_on = ["--checkpoint-every", "1", "--on-save-failure", "continue"]
        self.refused(self.train_on_disk_of(int(0.5 * self.checkpoint_bytes()), *go_on)[0], 7, "a checkpoint needs")
        result, _ = self.train_on_disk_of(int(1.5 * self.checkpoint_bytes()), *go_on)
        self.assertIn("step 4/4", result.stdout)

    def train_on_disk_of(self, size, *flags):
        return self.on_disk_of(size, "train", "--data", str(self.text), "--steps", "4", *flags)

    def on_disk_of(self, size, command, *flags):
        """A command whose --out lies on a disk of so many bytes. Returns what became of it, and the files left there."""
        disk = self.root / "disk"
        disk.mkdir(exist_ok=True)
        command = [PROGRAM, command, "--model", "tiny-gpt2", *SMALL, "--out", str(disk / "run"), *flags]
        listing = self.root / "listing"
        script = (f"mount -t tmpfs -o size={size} none {disk} && {shlex.join(command)}; code=$?; "
                  f"ls -A {disk} > {listing}; exit $code")
        result = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300,
                                env=self.environment())
        return result, listing.read_text().split()


if __name__ == "__main__":
    main()
