"""Type hints beside PyTorch's own: mypy accepts the whole package."""
import os
import subprocess
import sys
import tempfile
import unittest

from sandbox import PACKAGE

try:
    import mypy  # noqa: F401
except ImportError:
    print("skipped: no mypy")
    sys.exit(77)


class Mypy(unittest.TestCase):
    def test_package_is_strict(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder, "-p", "tandem"],
                                  capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(PACKAGE)})
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    unittest.main()
