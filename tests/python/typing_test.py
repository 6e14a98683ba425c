"""Type hints: mypy accepts package, stubs and a program that uses them, and reports a wrong one; all that is public is documented."""
import ast
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import unittest

import toy
from toy import tandem

USE = """
import numpy as np
import tandem

device = tandem.open_device("host", memory="64MiB", threads=1)
layout = tandem.ParameterLayout()
layout.add_layer("h.0").add("w1", (64, 32), decay=False).add("b1", 64)
options = tandem.OffloadOptions(device_memory="16MiB", policy="interleave:2", adamw=tandem.AdamW(beta2=0.95))
plan: tandem.Plan = tandem.make_plan(layout, options, device)
engine = tandem.OffloadEngine(device, layout, options, plan)
engine.initialize(lambda parameter: np.zeros(parameter.count, np.float32))
stream = device.make_stream()
engine.begin_step(lr=1e-3, groups=[tandem.GroupValues(lr=1e-3)])
with engine.fetch(0, stream) as weights, engine.gradients(0, stream) as gradients:
    shape: tuple[int, ...] = weights["w1"].shape
    gradient = gradients["w1"]
    assert gradient is not None
    gradient.numpy()[...] = 1.0
report: tandem.StepReport = engine.end_step()
norm: float = report.gradient_norm
digest: str = engine.state_digest()
"""
# Modules of tandem.finetuning that import torch.
BESIDE_TORCH = "tandem.finetuning.with_torch.*"
WRONG = {
    'engine.begin_step(lr="much")': "arg-type",
    'tandem.OffloadOptions(polcy="host")': "call-arg",
    "n: int = engine.state_digest()": "assignment",
    'engine.fetch("0", stream)': "arg-type",
    "gradients['w1'].numpy()": "union-attr",
}


@unittest.skipUnless(importlib.util.find_spec("mypy"), "no mypy")
class Mypy(unittest.TestCase):
    def check(self, *arguments):
        environment = {**os.environ, "MYPYPATH": str(toy.PACKAGE)}
        return subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", self.folder.name, *arguments], capture_output=True,
                              text=True, env=environment)

    def config(self):
        file = os.path.join(self.folder.name, "mypy.ini")
        with open(file, "w") as text:
            text.write("[mypy-torch.*,huggingface_hub.*]\nignore_missing_imports = True\n"
                       f"[mypy-tandem.pytorch.*,{BESIDE_TORCH}]\nignore_errors = True\n")
        return file

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)

    def test_package_and_stubs_are_strict(self):
        """All but what imports PyTorch, which is not here: tests/torch/typing_test.py checks that."""
        done = self.check("--config-file", self.config(), "-p", "tandem")
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_program_is_accepted_and_each_mistake_reported(self):
        lines = list(WRONG)
        done = self.check("--config-file", self.config(), "-c", USE + "\n".join(lines))
        first = USE.count("\n") + 1
        found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line}
        self.assertEqual(sorted(found), [first + i for i in range(len(lines))], done.stdout)
        for i, code in enumerate(WRONG.values()):
            self.assertIn(f"[{code}]", found[first + i])


class Documentation(unittest.TestCase):
    def test_the_stub_is_marked_and_has_every_class(self):
        folder = toy.PACKAGE / "tandem"
        self.assertTrue((folder / "py.typed").is_file())
        named = {node.name for node in ast.parse((folder / "_core.pyi").read_text()).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        self.assertEqual({name for name in vars(tandem._core) if name[0] != "_"} - named - {"version"}, set())
        self.assertNotIn("std::", (folder / "_core.pyi").read_text())

    def test_the_list_of_public_names_is_whole(self):
        private = {"errors", "planning", "display", "plotting", "program", "types", "version"}
        self.assertEqual({n for n in vars(tandem) if n[0] != "_"} - private, set(tandem.__all__) - {"__version__"})

    def test_all_that_is_public_has_a_docstring(self):
        bare = []
        for name in tandem.__all__:
            item = getattr(tandem, name)
            if not (inspect.isclass(item) or callable(item)):
                continue
            if not inspect.getdoc(item):
                bare.append(name)
            for part, value in (vars(item).items() if inspect.isclass(item) else ()):
                if part[0] != "_" and not inspect.getdoc(value):
                    bare.append(f"{name}.{part}")
        self.assertEqual(bare, [])
        self.assertGreater(len(tandem.__all__), 40)


if __name__ == "__main__":
    unittest.main()
