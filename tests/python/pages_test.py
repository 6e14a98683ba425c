"""The code of docs/python.md runs as it stands: blocks marked `python` in their order, those marked `py`, which need a GPU, compile."""
import pathlib
import re
import sys
import tempfile
import unittest

import toy
from toy import tandem

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import page_code  # noqa: E402

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"


class Page(unittest.TestCase):
    def test_its_code_runs_and_does_what_it_says(self):
        with tempfile.TemporaryDirectory() as folder:
            names = page_code.run_all(PAGE, folder)
            self.assertTrue((pathlib.Path(folder) / "checkpoints" / "step-00000030").is_dir())
        self.assertLess(names["losses"][-1], 0.5 * names["losses"][0])
        self.assertGreater(names["slower"].step_seconds, names["choice"].simulation.step_seconds)
        self.assertGreater(len(page_code.blocks(PAGE)), 7)

    def test_a_mistake_on_the_page_is_noticed(self):
        for right, wrong in (("end_step()", "finish_step()"), ("options.replace", "options.change"), ("import torch", "import (torch")):
            with self.subTest(wrong), tempfile.TemporaryDirectory() as folder, self.assertRaises((AttributeError, SyntaxError)):
                page_code.run_all(PAGE, folder, lambda code: code.replace(right, wrong))

    def test_names_on_the_page_exist(self):
        for name in set(re.findall(r"`tandem\.(\w+)", PAGE.read_text())):
            self.assertTrue(hasattr(tandem, name), name)


if __name__ == "__main__":
    unittest.main()
