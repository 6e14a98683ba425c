"""The code of docs/python.md runs as it stands: blocks marked `python` in their order, those marked `py`, which need a GPU, compile."""
import contextlib
import io
import os
import pathlib
import re
import tempfile
import unittest

import toy
from toy import tandem

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
BLOCK = re.compile(r"^```(python|py)\n(.*?)^```$", re.M | re.S)


def blocks():
    text = PAGE.read_text()
    return [(found.group(1), text[:found.start(2)].count("\n"), found.group(2)) for found in BLOCK.finditer(text)]


def run_all(folder, change=lambda code: code):
    """Names that the blocks have defined. Lines of errors are those of the page."""
    names = {}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for language, line, code in blocks():
            compiled = compile("\n" * line + change(code), str(PAGE), "exec")
            if language == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compiled, names)
    finally:
        os.chdir(before)
    return names


class Page(unittest.TestCase):
    def test_its_code_runs_and_does_what_it_says(self):
        with tempfile.TemporaryDirectory() as folder:
            names = run_all(folder)
            self.assertTrue((pathlib.Path(folder) / "checkpoints" / "step-00000030").is_dir())
        self.assertLess(names["losses"][-1], 0.5 * names["losses"][0])
        self.assertGreater(names["slower"].step_seconds, names["choice"].simulation.step_seconds)
        self.assertGreater(len(blocks()), 7)

    def test_a_mistake_on_the_page_is_noticed(self):
        for right, wrong in (("end_step()", "finish_step()"), ("options.replace", "options.change"), ("import torch", "import (torch")):
            with self.subTest(wrong), tempfile.TemporaryDirectory() as folder, self.assertRaises((AttributeError, SyntaxError)):
                run_all(folder, lambda code: code.replace(right, wrong))

    def test_names_on_the_page_exist(self):
        for name in set(re.findall(r"`tandem\.(\w+)", PAGE.read_text())):
            self.assertTrue(hasattr(tandem, name), name)


if __name__ == "__main__":
    unittest.main()
