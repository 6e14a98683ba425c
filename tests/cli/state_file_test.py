"""Optimizer state that host memory has no room for lives in a file: the same bits, under the ceiling, and nothing left."""
import json
import os
import re
import resource
import signal
import subprocess
import unittest

from program import HELD_OUT, PROFILES, PROGRAM, SMALL, ProgramTest, main, wait_for

CUT = ["--subgroup-size", "16Ki"]  # a tiny model's state in many parts, so that buffers for a few are little beside it


class StateFile(ProgramTest):
    def setUp(self):
        super().setUp()
        self.disk = self.root / "disk"
        self.disk.mkdir()

    def plan(self, *flags):
        return json.loads(self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, *CUT, *flags,
                                                        "--json")).stdout)

    def under_a_ceiling(self, *flags):
        """Flags with which half of what is on the host of the state must leave it."""
        plan = self.plan(*flags)
        state = sum(e["bytes"] for e in plan["entries"] if e["name"] == "optimizer" and e["where"] != "device")
        self.assertGreater(state, 0)
        self.assertEqual(plan["file_bytes"], 0)
        return ["--host-memory", str(plan["host_bytes"] - state // 2), "--state-dir", self.disk, *CUT, *flags]

    def train_in_file(self, out, *flags):
        self.succeed(self.train("--lr", "1e-3", *flags, "--out", out))
        summary = self.summary(out)
        self.assertGreater(summary["bytes"]["file_read"], 0)
        self.assertEqual(summary["bytes"]["file_read"], summary["bytes"]["file_write"])
        self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
        self.assertEqual(summary["peak_device_bytes"], summary["planned_device_bytes"])
        self.assertEqual(list(self.disk.iterdir()), [])
        return summary

    def test_the_same_bits_under_every_policy_and_format(self):
        work = ["--steps", "3", "--grad-accum", "2"]
        for state in ["fp32", "split", "bf16-moments", "8bit-moments", "lion"]:
            out = self.root / state
            self.succeed(self.train("--lr", "1e-3", "--policy", "device", "--state", state, *work, "--out", out))
            expected = self.summary(out)["state_digest"]
            for policy in ["host", "stream", "interleave:2,resident=0.3"]:
                with self.subTest(state=state, policy=policy):
                    run = self.root / f"{state} {policy}"
                    flags = self.under_a_ceiling("--policy", policy, "--state", state, "--grad-accum", "2")
                    self.assertEqual(self.train_in_file(run, "--steps", "3", *flags)["state_digest"], expected)

    def test_what_a_run_says_of_it(self):
        flags = self.under_a_ceiling("--policy", "host")
        plan = self.plan(*flags)
        entries = {(e["name"], e["where"]): e["bytes"] for e in plan["entries"]}
        self.assertEqual(entries["optimizer, in a file", "file"], plan["file_bytes"])
        self.assertEqual(plan["host_bytes"], sum(b for (_, where), b in entries.items() if where in ("pinned", "pageable")))
        out = self.root / "run"
        shown = self.succeed(self.train("--steps", "4", *flags, "--out", out)).stdout
        self.assertRegex(shown, f"state file .* MiB in {self.disk}, read and written in every step")
        self.assertIn(str(self.disk), (out / "config.toml").read_text())
        planned = self.summary(out)["planned_file_bytes"]
        self.assertAlmostEqual(planned, plan["file_bytes"], delta=plan["file_bytes"] / 20)  # another program plans
        self.assertEqual(self.summary(out)["bytes"]["file_read"], 4 * planned)
        # An update may run on beside the next step, which then counts it; the last one beside none.
        for key in ("file_read_bytes", "file_write_bytes"):
            counted = sum(step[key] for step in self.metrics(out))
            self.assertGreaterEqual(counted, 2 * planned)
            self.assertLessEqual(counted, 4 * planned)

    def test_saved_and_resumed_with_it_and_without(self):
        inside = self.under_a_ceiling("--policy", "interleave:2")
        straight = self.root / "straight"
        self.succeed(self.train("--lr", "1e-3", "--steps", "6", "--out", straight))
        expected = self.summary(straight)["state_digest"]
        out = self.root / "inside"
        saving = ["--steps", "6", "--checkpoint-every", "2", "--keep", "3"]
        self.assertEqual(self.train_in_file(out, *saving, *inside)["state_digest"], expected)
        for step in (2, 4):
            checkpoint = out / "checkpoints" / f"step-{step:08}"
            for name, flags in [("in memory", []), ("in a file", inside)]:
                again = self.root / f"{step} {name}"
                self.succeed(self.train("--lr", "1e-3", "--steps", "6", "--resume", checkpoint, *flags, "--out", again))
                self.assertEqual(self.summary(again)["state_digest"], expected)
        evaluated = self.succeed(self.run_program("eval", "--model", out, "--data", self.file("held.txt", HELD_OUT),
                                                  *SMALL[:4]))
        self.assertIn("loss", evaluated.stdout)

    def test_a_killed_run_leaves_nothing_there(self):
        flags = self.under_a_ceiling("--policy", "host")
        out = self.root / "killed"
        process = self.start(out, "--steps", "100000", *flags)
        wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.assertEqual(list(self.disk.iterdir()), [])

    def test_what_is_refused(self):
        flags = self.under_a_ceiling("--policy", "host")
        at = flags.index("--state-dir") + 1
        out = self.root / "out"
        for folder, words in [(self.root / "missing", "no such folder"), (self.text, "no such folder")]:
            refused = self.train("--steps", "1", *flags[:at], folder, *flags[at + 1:], "--out", out)
            self.refused(refused, 2, f"--state-dir {folder}", words)
        self.refused(self.train("--steps", "1", *flags[:at - 1], *flags[at + 1:], "--out", out), 3,
                     "--state-dir DIR on a fast disk, for")
        self.assertFalse(out.exists())
        without = self.file("profile.toml", re.sub(r"\[file\].*?(?=\n\[)", "", (PROFILES / "8gb-pcie4.toml").read_text(),
                                                   flags=re.S))
        self.refused(self.run_program("plan", "--model", "gpt2", "--profile", without, "--state-dir", self.disk), 2,
                     "--state-dir", "how fast a file is")

    @unittest.skipUnless(os.path.ismount("/dev/shm"), "no file system in memory")
    def test_memory_is_no_disk(self):
        told = self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, "--state-dir", "/dev/shm")).stderr
        self.assertIn("--state-dir /dev/shm is on no disk", told)
        told = self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, "--state-dir", "/proc")).stderr
        self.assertNotIn("is on no disk", told)

    def test_a_disk_that_fails_ends_the_run(self):
        """Written state is refused, as by a disk that is full: one line, and the last checkpoint is whole."""
        flags = [*self.under_a_ceiling("--policy", "host"), "--threads", "1"]
        out = self.root / "failing"
        process = self.start(out, "--steps", "100000", "--checkpoint-every", "20", *flags, stderr=subprocess.PIPE)
        wait_for(lambda: (out / "checkpoints" / "step-00000020").exists())
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        _, told = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 7, told)
        self.assertRegex(told, "tandem: error: cannot write")
        self.assertEqual(list(self.disk.iterdir()), [])
        newest = sorted((out / "checkpoints").glob("step-*"))[-1]
        self.succeed(self.run_program("digest", newest))

    def test_machines_elsewhere_train_larger_models(self):
        elsewhere = ["plan", "--fit", "model", "--profile", PROFILES / "8gb-pcie4.toml", "--json"]
        fitted = [json.loads(self.succeed(self.run_program(*elsewhere, *flags)).stdout)
                  for flags in ([], ["--state-dir", "anywhere"])]
        self.assertNotEqual(fitted[0]["fit"], fitted[1]["fit"])
        self.assertEqual(fitted[0]["file_bytes"], 0)
        self.assertGreater(fitted[1]["file_bytes"], fitted[1]["host_bytes"])
        self.assertEqual(fitted[1]["bound_by"], "file")

    def test_a_calibration_knows_the_file(self):
        self.calibrate()
        shown = json.loads(self.succeed(self.run_program("calibrate", "--show", *SMALL[:6], "--json")).stdout)["figures"]
        for key in ("read", "write", "both_ways"):
            self.assertGreater(shown[f"file.{key}"]["value"], 1e6)
        flags = self.under_a_ceiling("--policy", "host")
        self.assertGreater(self.plan(*flags)["predicted"]["step_seconds"], 0)
        digest = self.train_in_file(self.root / "host", "--steps", "3", *flags)["state_digest"]
        # State that the device has room for need not go to a file.
        auto = self.root / "auto"
        self.succeed(self.train("--lr", "1e-3", "--steps", "3", *flags, "--policy", "auto", "--out", auto))
        self.assertEqual(self.summary(auto)["state_digest"], digest)


if __name__ == "__main__":
    main()
