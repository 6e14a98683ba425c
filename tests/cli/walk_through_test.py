"""The walks through docs/fine-tuning.md and docs/adapters.md, as written there: a small random Llama made by transformers, a
run under a ceiling that is killed and resumed, and the result in transformers and PEFT. Where PEFT is not installed its part is
left out, unless TANDEM_TEST_NEEDS_PEFT is set."""
import peers

peers.run_under_one_with("torch", "transformers", "tokenizers")

import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(page, kind):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def commands_of(page):
    """Commands of a page, of one line each but for those whose quotes span several."""
    found = [""]
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if found[-1].count('"') % 2:
                found[-1] += "\n" + line
            else:
                found.append(line)
    return [command for command in found if command.strip()]


class WalkThrough(unittest.TestCase):
    def test_fine_tuning(self):
        self.walk("fine-tuning.md", "runs/chat")

    def test_adapters(self):
        looks = "TANDEM_TEST_NEEDS_PEFT" in os.environ or importlib.util.find_spec("peft")
        self.walk("adapters.md", "runs/lora", passed_over=[] if looks else ["python3 look.py"])

    def walk(self, page, run, passed_over=()):
        with tempfile.TemporaryDirectory(prefix="tandem-walk-") as name:
            folder = pathlib.Path(name)
            (folder / "bin").mkdir()
            (folder / "bin" / "tandem").symlink_to(PROGRAM)
            (folder / "tools").symlink_to(ROOT / "tools")
            environment = {**os.environ, "PATH": f"{folder / 'bin'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
            scripts = blocks(page, "python")
            (folder / "make_model.py").write_text(scripts[0])
            (folder / "look.py").write_text(scripts[1])
            commands = commands_of(page)
            self.assertGreaterEqual(len(commands), 6)
            for command in commands:
                if command in passed_over:
                    continue
                with self.subTest(command):
                    if " train " in command and f"--out {run}" in command:
                        self.kill_after_a_checkpoint(command, folder, environment, folder / run)
                        continue
                    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIsNotNone(json.loads((folder / run / "summary.json").read_text())["resumed_from_step"])

    def kill_after_a_checkpoint(self, command, folder, environment, run):
        process = subprocess.Popen(["sh", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not list(run.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            self.assertIsNone(process.poll(), "it ended before it could be killed")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        self.assertEqual(process.wait(), -signal.SIGKILL)


if __name__ == "__main__":
    unittest.main(verbosity=1)
