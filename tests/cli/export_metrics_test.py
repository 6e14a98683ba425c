"""tools/export_metrics.py hands on every number of every step, unchanged. What it hands them to is a recorder here."""
import json
import os
import pathlib
import subprocess
import sys

from program import ProgramTest, main

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "export_metrics.py"
RECORDER = """
import atexit, json
calls = []
class Recorder:
    def __init__(self, *place, **named):
        calls.append(["open", *place, *named.values()])
    def __enter__(self):
        return self
    def __exit__(self, *_):
        with open({file!r}, "w") as out:
            json.dump(calls, out)
    def add_scalar(self, name, value, step):
        calls.append([step, name, value])
    def log(self, values, step):
        calls.extend([step, name, value] for name, value in values.items())
SummaryWriter = init = Recorder
"""


class ExportMetrics(ProgramTest):
    def export(self, *arguments):
        return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(self.root / "fake")})

    def setUp(self):
        super().setUp()
        recorder = RECORDER.format(file=str(self.root / "calls.json"))
        self.file("fake/wandb.py", recorder)
        for package in ["torch", "torch/utils"]:
            self.file(f"fake/{package}/__init__.py", "")
        self.file("fake/torch/utils/tensorboard.py", recorder)

    def test_every_number_of_a_run_arrives(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "3", "--eval-data", self.text, "--out", out))
        expected = [[line["step"], name, value] for line in self.metrics(out) for name, value in line.items()
                    if name != "step" and isinstance(value, (int, float))]
        self.assertIn("eval_loss", {name for _, name, _ in expected})
        for flag, target, place in [("--tensorboard", "logs", ["logs"]), ("--wandb", "project", ["project", "run"])]:
            self.assertIn("3 steps", self.succeed(self.export(out, flag, target)).stdout)
            calls = json.loads((self.root / "calls.json").read_text())
            self.assertEqual(calls, [["open", *place], *expected])

    def test_what_is_no_number_is_left_out_and_a_torn_end_too(self):
        file = self.file("m.jsonl", '{"step": 1, "loss": null, "bound_by": "compute", "lr": 0.5}\n{"step": 2, "lo')
        self.assertIn("1 steps", self.succeed(self.export(file, "--wandb", "p")).stdout)
        self.assertEqual(json.loads((self.root / "calls.json").read_text())[1:], [[1, "lr", 0.5]])

    def test_refusals_are_one_line(self):
        for file, word in [(self.root / "none", "no such file"), (self.file("a", "{\n{}\n"), "line 1"),
                           (self.file("b", '{"loss": 1}\n{"step": 1}\n'), "line 1")]:
            result = self.export(file, "--wandb", "p")
            self.assertNotEqual(result.returncode, 0)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
            self.assertIn(word, result.stderr)


if __name__ == "__main__":
    main()
