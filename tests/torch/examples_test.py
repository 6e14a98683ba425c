"""Examples in Python: the cells of the notebooks, and a Trainer's script that differs from one with DeepSpeed by three lines."""
import contextlib
import difflib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import warnings

from sandbox import PACKAGE, torch

try:
    import accelerate  # noqa: F401
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    raise SystemExit(77) from None

warnings.simplefilter("ignore")

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = EXAMPLES / "deepspeed_replacement"


def shell(command):
    """Lines that a command of a cell, `!command`, has written. `tandem` is that of this package."""
    path = pathlib.Path.cwd() / "bin"
    path.mkdir(exist_ok=True)
    program = path / "tandem"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tandem.program "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def python_of(cell):
    """The cell without a notebook's shorthand for commands."""
    return re.sub(r"^((?:\w+ = )?)!(.*)$", lambda found: f"{found[1]}shell({found[2]!r})", "".join(cell["source"]), flags=re.M)


def run_cells(notebook):
    """Names that the cells have defined, one after another, in a folder of their own."""
    whole = json.loads(notebook.read_text())
    assert whole["nbformat"] == 4, whole["nbformat"]
    names, before = {"shell": shell}, os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            for number, cell in enumerate(whole["cells"]):
                if cell["cell_type"] == "code":
                    assert not cell["outputs"], "outputs are not kept"
                    exec(compile(python_of(cell), f"{notebook.name}, cell {number}", "exec"), names)
        finally:
            os.chdir(before)
    return names


class Notebooks(unittest.TestCase):
    def setUp(self):
        torch.use_deterministic_algorithms(False)
        self.addCleanup(torch.use_deterministic_algorithms, True)

    def test_finetune(self):
        names = run_cells(EXAMPLES / "notebooks" / "finetune.ipynb")
        self.assertEqual(names["answers"], ["pink"])
        self.assertLess(names["steps"][-1]["loss"], 0.05 * names["steps"][0]["loss"])

    def test_optimizer(self):
        names = run_cells(EXAMPLES / "notebooks" / "optimizer.ipynb")
        self.assertLess(names["losses"][-1], 0.5 * names["losses"][0])
        self.assertIn("gradients", str(names["optimizer"].plan))

    def test_streaming(self):
        names = run_cells(EXAMPLES / "notebooks" / "streaming.ipynb")
        self.assertLess(names["losses"][-1], 0.7 * names["losses"][0])
        self.assertTrue(names["same"])
        self.assertIn("reserved by the caller", str(names["model"].tandem.plan))


class Replacement(unittest.TestCase):
    def test_three_lines_differ(self):
        files = [(SCRIPTS / name).read_text().splitlines() for name in ("with_deepspeed.py", "with_tandem.py")]
        changes = [line for line in difflib.ndiff(*files) if line[0] in "+-"]
        self.assertEqual([line[:2] + re.sub(r"\(.*", "", line[2:]).strip() for line in changes],
                         ["+ import tandem", '- deepspeed="offload.json",', "- trainer = Trainer", "+ trainer = tandem.hf.trainer"])
        compile("\n".join(files[0]), "with_deepspeed.py", "exec")
        self.assertEqual(json.loads((SCRIPTS / "offload.json").read_text())["zero_optimization"]["stage"], 3)

    def test_it_trains(self):
        from language import model, texts, tokenizer
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            model().save_pretrained(folder / "model")
            tokenizer().save_pretrained(folder / "model")
            (folder / "text").write_text(" ".join(texts(200)))
            done = subprocess.run([sys.executable, str(SCRIPTS / "with_tandem.py"), "model", "text", "--steps", "8", "--length", "32"],
                                  cwd=folder, capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"})
            self.assertEqual(done.returncode, 0, done.stderr)
            losses = [float(found) for found in re.findall(r"'loss': '?([0-9.]+)", done.stdout)]
            self.assertEqual(len(losses), 8, done.stdout)
            trained = transformers.AutoModelForCausalLM.from_pretrained(folder / "run")
            differing = [key for key, value in trained.state_dict().items() if not torch.equal(value, model().state_dict()[key])]
            self.assertIn("model.layers.0.self_attn.q_proj.weight", differing)


if __name__ == "__main__":
    unittest.main()
