"""The code of docs/pytorch.md and of the README's beginning runs as it stands, block after block."""
import pathlib
import sys
import tempfile
import unittest

import sandbox  # noqa: F401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import page_code  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "pytorch.md"


class Page(unittest.TestCase):
    def test_its_code_runs_and_does_what_it_says(self):
        with tempfile.TemporaryDirectory() as folder:
            names = page_code.run_all(PAGE, folder)
            self.assertTrue((pathlib.Path(folder) / "checkpoints" / "step-00000040").is_dir())
            self.assertTrue((pathlib.Path(folder) / "streamed" / "step-00000010").is_dir())
        self.assertLess(names["losses"][-1], 0.5 * names["losses"][0])

    def test_the_code_of_the_readme_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            first = page_code.run_all(ROOT / "README.md", folder, lambda code: code.replace("range(40)", "range(1)"))["loss"].item()
            names = page_code.run_all(ROOT / "README.md", folder)
        self.assertLess(names["loss"].item(), 0.7 * first)
        self.assertLessEqual(names["optimizer"].plan.device_bytes, 64 << 20)

    def test_a_mistake_on_the_page_is_noticed(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(AttributeError):
            page_code.run_all(PAGE, folder, lambda code: code.replace("optimizer.digest()", "optimizer.hash()"))


if __name__ == "__main__":
    unittest.main()
