"""The installed package works from a folder of its own, with the program and all files that it needs."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.argv.pop(1)
CMAKE, BUILD = sys.argv.pop(1), sys.argv.pop(1)


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", cls.root, "--component", "python"], check=True, capture_output=True)

    def python(self, script, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=self.root, env=environment)

    def test_it_has_types_profiles_and_tools(self):
        names = {p.relative_to(self.root / "tandem").as_posix() for p in (self.root / "tandem").rglob("*") if p.is_file()}
        self.assertLessEqual({"__init__.py", "_core.pyi", "py.typed", "profiles/24gb-pcie4.toml", "bin/tandem",
                              "share/tandem/tools/tokenizer_process.py", "share/tandem/tools/preparation/__init__.py"}, names)

    def test_it_is_imported_from_there(self):
        done = self.python("import tandem; print(tandem.__file__, tandem.__version__, len(tandem.shipped_profiles()) > 1)")
        self.assertEqual(done.stdout.split()[0], str(self.root / "tandem" / "__init__.py"), done.stderr)
        self.assertEqual(done.stdout.split()[2], "True")

    def test_the_program_goes_on_with_arguments_and_exit_code(self):
        main = "from tandem.program import main; main()"
        self.assertRegex(self.python(main, "--version").stdout, r"tandem \d")
        self.assertEqual(self.python(main, "train", "--no-such-flag").returncode, 2)
        self.assertEqual(self.python(main, "plan", "--model", "gpt2", "--device", "cuda:99").returncode, 5)

    def test_a_package_without_program_says_so(self):
        (self.root / "tandem" / "bin" / "tandem").rename(self.root / "moved")
        try:
            done = self.python("from tandem.program import main; main()")
        finally:
            (self.root / "moved").rename(self.root / "tandem" / "bin" / "tandem")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\Atandem: error: [^\n]*is missing; install tandem-trainer again[^\n]*\n\Z")


if __name__ == "__main__":
    unittest.main()
