"""The package of the build tree has the modules of the source and no others: what was removed or renamed there goes."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

PACKAGE = pathlib.Path(sys.argv.pop(1)) / "tandem"
CMAKE, SOURCE = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))


def modules(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


class Mirror(unittest.TestCase):
    def test_modules_are_those_of_the_source(self):
        self.assertEqual(modules(PACKAGE), modules(SOURCE / "python" / "tandem"))

    def test_files_and_folders_that_are_not_named_go(self):
        kept = {"a.py", "inner/b.py", "inner/deep/c.toml", "_core.so", "_core.pyi"}
        stale = {"old.py", "inner/old.py", "gone/d.py", "gone/deep/e.py", "inner/__pycache__/old.pyc", "a_core.so"}
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder) / "package"
            for name in kept | stale:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            script = pathlib.Path(folder) / "script.cmake"
            script.write_text(f"cmake_minimum_required(VERSION 3.25)\ninclude({SOURCE}/cmake/TandemMirror.cmake)\n"
                              f"tandem_keep_only({root} a.py inner/b.py inner/deep/c.toml not-made-yet.py _core.*)\n")
            subprocess.run([CMAKE, "-P", script], check=True)
            self.assertEqual({p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}, kept)
            self.assertEqual({p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_dir()}, {"inner", "inner/deep"})


if __name__ == "__main__":
    unittest.main()
