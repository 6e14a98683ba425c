"""The walk through of docs/fine-tuning.md, as written there: a small random Llama made by transformers, chat data, a run
under a ceiling that is killed and resumed, and the result in transformers."""
import peers

peers.run_under_one_with("torch", "transformers", "tokenizers")

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


def blocks(kind):
    text = (ROOT / "docs" / "fine-tuning.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


class WalkThrough(unittest.TestCase):
    def test_every_command_of_the_page_in_order(self):
        with tempfile.TemporaryDirectory(prefix="tandem-walk-") as name:
            folder = pathlib.Path(name)
            (folder / "bin").mkdir()
            (folder / "bin" / "tandem").symlink_to(PROGRAM)
            (folder / "tools").symlink_to(ROOT / "tools")
            environment = {**os.environ, "PATH": f"{folder / 'bin'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
            scripts = blocks("python")
            (folder / "make_model.py").write_text(scripts[0])
            (folder / "look.py").write_text(scripts[1])
            commands = [c for block in blocks("sh") for c in block.replace("\\\n", " ").splitlines() if c.strip()]
            self.assertGreaterEqual(len(commands), 6)
            for command in commands:
                with self.subTest(command):
                    if " train " in command and "--resume" not in command:
                        self.kill_after_a_checkpoint(command, folder, environment)
                        continue
                    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("resumed from", self.resumed(folder))

    def kill_after_a_checkpoint(self, command, folder, environment):
        process = subprocess.Popen(["sh", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not list(folder.glob("runs/chat/checkpoints/step-*")) and time.monotonic() < deadline:
            self.assertIsNone(process.poll(), "it ended before it could be killed")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        self.assertEqual(process.wait(), -signal.SIGKILL)

    def resumed(self, folder):
        import json
        summary = json.loads((folder / "runs/chat/summary.json").read_text())
        return f"resumed from {summary['resumed_from_step']}" if summary["resumed_from_step"] else "fresh"


if __name__ == "__main__":
    unittest.main(verbosity=1)
