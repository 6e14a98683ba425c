"""Parts that the tests of the built program share: running it, and a folder to do it in."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 else "tandem"
TEXT = "".join(f"The {n}th line of a small text says that {n * n} is the square of {n}.\n" for n in range(400))
HELD_OUT = TEXT[:2000]  # each window of it is computed at every evaluation
CALIBRATED = os.environ.get("TANDEM_TEST_CALIBRATION")  # the folder where calibration_test.py left what it measured
PROFILES = pathlib.Path(__file__).parents[2] / "profiles"  # profiles of other machines, as shipped
PREDICTED = {"step_seconds", "update_seconds", "exposed_update_seconds", "bound_by"}
SMALL = ["--device", "host", "--threads", "1", "--update-threads", "1", "--seq-len", "32", "--micro-batch", "2"]


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain")
        time.sleep(0.01)


class ProgramTest(unittest.TestCase):
    _measured = []  # calibrations of this machine

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-cli-")
        self.addCleanup(self._folder.cleanup)
        self.root = pathlib.Path(self._folder.name)
        self.text = self.file("text.txt", TEXT)

    def file(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def held_out(self):
        return self.file("held-out.txt", HELD_OUT)

    def environment(self):
        """A calibration of this machine must not lead to other plans."""
        return {**os.environ, "XDG_CACHE_HOME": str(self.root / "cache")}

    def measure(self):
        """Calibrates, and returns the file that this leaves in the cache."""
        self.succeed(self.run_program("calibrate", *SMALL[:6]))
        (profile,) = (self.root / "cache" / "tandem").iterdir()  # and no other file is left there
        return profile

    def calibrate(self):
        """Puts a calibration into the cache, and returns its file. It takes seconds to measure: once in a script, or for
        several by the one that CTest runs before them."""
        if not self._measured:
            (profile,) = pathlib.Path(CALIBRATED).iterdir() if CALIBRATED else [self.measure()]
            self._measured.append((profile.name, profile.read_text()))
        name, text = self._measured[0]
        return self.file(self.root / "cache" / "tandem" / name, text)

    def run_program(self, *arguments, cwd=None):
        return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300,
                              env=self.environment(), cwd=cwd)

    def train(self, *arguments, data=None):
        return self.run_program("train", "--model", "tiny-gpt2", "--data", data or self.text, *SMALL, *arguments)

    def start(self, out, *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        """A run that goes on beside the test, and is killed with it."""
        process = subprocess.Popen([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL, "--out",
                                    str(out), *map(str, arguments)], stdout=stdout, stderr=stderr, text=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def checkpoints(self, out):
        return sorted(p.name for p in (out / "checkpoints").iterdir())

    def succeed(self, result):
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def summary(self, out):
        return json.loads((out / "summary.json").read_text())

    def metrics(self, out):
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def refused(self, result, code, *words):
        """One line, the code, the words, and nothing of a stack trace."""
        self.assertEqual(result.returncode, code, result.stderr)
        lines = [line for line in result.stderr.splitlines() if line.startswith("tandem: error:")]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(result.stderr.rstrip().endswith(lines[0]), result.stderr)
        for word in words:
            self.assertIn(word, lines[0])
        self.assertNotIn("terminate called", result.stderr)
        return lines[0]

    def flags_in(self, text):
        return re.findall(r"--[a-z-]+(?: [^,;()\s-]\S*)?", text)


def main():
    unittest.main(verbosity=1)
