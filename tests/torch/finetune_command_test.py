"""`tandem finetune` of a model that PyTorch trains: the command from chats to an answer, and killed and called again."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

PACKAGE = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, PACKAGE)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetune_runs import chats, make_model  # noqa: E402

FLAGS = ["--device", "host", "--device-memory", "64MiB", "--steps", "24", "--validation", "0.1", "--eval-every", "4", "--lr", "5e-3"]


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tandem-finetune-")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        make_model(self.root / "model", spread=0.05)
        self.data = self.root / "chats.jsonl"
        self.data.write_text("".join(json.dumps(record) + "\n" for record in chats(40)))
        self.environment = {**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def command(self, *arguments):
        return [sys.executable, "-m", "tandem.program", *map(str, arguments)]

    def run_command(self, *arguments, text=None):
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, input=text, env=self.environment, cwd=self.root)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def finetune(self, out):
        return self.run_command("finetune", "model", self.data, "--out", out, *FLAGS)

    def files(self, out):
        return {path.name: path.read_bytes() for path in (self.root / out / "model").iterdir()}

    def test_from_chats_to_an_answer(self):
        said = self.finetune("straight")
        self.assertIn("engine: torch, as GPTNeoXForCausalLM is none of tandem's own models", said)
        lines = said.splitlines()
        self.assertEqual(lines[-1], "next: tandem chat straight")
        told = [i for i, line in enumerate(lines) if line.startswith("this takes about ")]
        self.assertEqual(len(told), 1)
        self.assertLess(told[0], next(i for i, line in enumerate(lines) if line.startswith("step ")), "before the first step")
        summary = json.loads((self.root / "straight" / "summary.json").read_text())
        self.assertLess(summary["final_loss"], summary["first_loss"])
        self.assertTrue((self.root / "straight" / "report.html").is_file())
        self.assertIn("chat_template.jinja", self.files("straight"))
        answer = self.run_command("chat", "straight", "--temperature", "0", "--max-tokens", "5", text="what is 3?\n")
        self.assertEqual(answer.count("\n"), 1)
        folder = self.root / "straight" / "model"
        self.assertEqual(self.run_command("chat", folder, "--temperature", "0", "--max-tokens", "5", text="what is 3?\n"), answer)
        expected = self.files("straight")
        self.check_a_kill(expected)
        self.check_a_folder_that_was_deleted("straight", expected)

    def test_what_does_not_fit_may_be_changed(self):
        small = ["finetune", "model", self.data, "--out", "small", "--device", "host", "--steps", "1", "--device-memory"]
        done = subprocess.run(self.command(*small, "100KiB"), capture_output=True, text=True, env=self.environment, cwd=self.root)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], "^tandem: error: the plan does not fit.*--device-memory .*--row-length$")
        commands = [line.removeprefix("takes less: ") for line in done.stderr.splitlines() if line.startswith("takes less: ")]
        self.assertEqual(commands[0], f"tandem finetune model {self.data} --out small --device host --steps 1 --device-memory 100KiB "
                                      "--state 8bit-moments")
        self.run_command(*small, "64MiB", "--state", "8bit-moments", "--row-length", "65")

    def refuse(self, code, words, *arguments):
        """Refused before anything is written."""
        done = subprocess.run(self.command("finetune", *arguments, "--out", "refused"), capture_output=True, text=True, env=self.environment,
                              cwd=self.root, timeout=120)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(words, done.stderr)
        self.assertFalse((self.root / "refused").exists(), done.stderr)

    def test_flags_and_model_are_looked_at_first(self):
        self.refuse(2, "--device-memory", "model", self.data, "--device", "host", "--device-memory", "lots")
        self.refuse(2, "policy 'some' is not known", "model", self.data, "--device", "host", "--policy", "some")
        self.refuse(5, "cuda:7", "model", self.data, "--device", "cuda:7")
        file = self.root / "model" / "config.json"
        file.write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}))
        self.refuse(2, "a t5 is no language model", "model", self.data, "--device", "host")

    def test_a_model_that_fills_gaps(self):
        """transformers makes BERT as a model that continues text, whose tokens see their targets: its losses would be of no use."""
        model = self.root / "model"
        make_model(model, kind="bert", spread=0.3)
        done = subprocess.run(self.command("finetune", "model", self.data, "--out", "gaps", *FLAGS), capture_output=True, text=True,
                              env=self.environment, cwd=self.root)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("sees those behind it", done.stderr.splitlines()[-1])
        self.assertFalse((self.root / "gaps" / "model").exists())

    def test_what_comes_next_of_texts(self):
        """tandem sample does not have the model."""
        texts = self.root / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": f"three and {i} are numbers"}) + "\n" for i in range(20)))
        said = self.run_command("finetune", "model", texts, "--out", "of texts", "--device", "host", "--steps", "1")
        words = shlex.split(said.splitlines()[-1].removeprefix("next: "))
        self.assertEqual(words[:2], ["python", "-c"])
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, env=self.environment, cwd=self.root)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("generated_text", done.stdout)

    def begin(self, out, *flags):
        """A call that goes on beside the test."""
        process = subprocess.Popen(self.command("finetune", "model", self.data, "--out", out, *FLAGS, *flags), env=self.environment, cwd=self.root,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, process, condition):
        """Waits until something is so, or the process has ended."""
        end = time.monotonic() + 300
        while process.poll() is None and not condition():
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.01)

    def told_steps(self, out):
        metrics = self.root / out / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def test_ended_by_a_signal(self):
        """While PyTorch is loaded, and after steps: of a run that has more of them left than any machine takes before the signal comes."""
        for steps in (0, 2):
            with self.subTest(steps=steps):
                out = f"after {steps}"
                process = self.begin(out, "--steps", "1000000")
                self.wait_for(process, (self.root / out / "finetune.toml").exists)
                self.wait_for(process, lambda: self.told_steps(out) >= steps)
                process.terminate()
                said = process.communicate()[1]
                self.assertEqual((process.returncode, said.splitlines()[-1]), (143, "ended by a signal; the same command goes on"))
                self.assertFalse((self.root / out / "model").exists())

    def killed_between(self, out):
        """Leaves a run that was killed after its ninth step. One that had ended before it could be killed is taken away, and begun anew."""
        for _ in range(10):
            process = self.begin(out)
            self.wait_for(process, lambda: self.told_steps(out) > 8)
            process.kill()
            if process.wait() != 0 and not (self.root / out / "stages" / "model.json").exists():
                return
            shutil.rmtree(self.root / out)
        self.fail("each run ended before it could be killed")

    def check_a_kill(self, expected):
        """Killed once it has taken steps, it comes to the same files."""
        self.killed_between("broken")
        self.assertIn("resumed from the checkpoint of step", self.finetune("broken"))
        self.assertEqual(self.files("broken"), expected)
        self.assertNotIn("step  1/", self.finetune("broken"))

    def check_a_folder_that_was_deleted(self, out, expected):
        """It is written again, without a step, and the figures of the run stay; then there is nothing to do."""
        summary = (self.root / out / "summary.json").read_bytes()
        shutil.rmtree(self.root / out / "model")
        said = self.finetune(out)
        self.assertIn("is not there any more: it is written again", said)
        self.assertEqual(re.findall("^step .*", said, re.M), [])
        self.assertEqual((self.files(out), (self.root / out / "summary.json").read_bytes()), (expected, summary))
        said = self.finetune(out)
        self.assertIn("all of which is done already", said)
        self.assertNotIn("engine: ", said)


if __name__ == "__main__":
    unittest.main()
