"""The code of docs/pytorch.md runs as it stands, block after block."""
import contextlib
import io
import os
import pathlib
import re
import tempfile
import unittest

import sandbox  # noqa: F401

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def run_all(folder, change=lambda code: code):
    """Names that the blocks have defined. Lines of errors are those of the page."""
    text, names, before = PAGE.read_text(), {}, os.getcwd()
    os.chdir(folder)
    try:
        for found in BLOCK.finditer(text):
            code = "\n" * text[:found.start(1)].count("\n") + change(found.group(1))
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, str(PAGE), "exec"), names)
    finally:
        os.chdir(before)
    return names


class Page(unittest.TestCase):
    def test_its_code_runs_and_does_what_it_says(self):
        with tempfile.TemporaryDirectory() as folder:
            names = run_all(folder)
            self.assertTrue((pathlib.Path(folder) / "checkpoints" / "step-00000040").is_dir())
            self.assertTrue((pathlib.Path(folder) / "streamed" / "step-00000010").is_dir())
        self.assertLess(names["losses"][-1], 0.5 * names["losses"][0])

    def test_a_mistake_on_the_page_is_noticed(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(AttributeError):
            run_all(folder, lambda code: code.replace("optimizer.digest()", "optimizer.hash()"))


if __name__ == "__main__":
    unittest.main()
