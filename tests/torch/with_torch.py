"""Runs a test by a Python that has PyTorch and is of this version: with_torch.py BUILD SCRIPT ARGUMENT... Ends with 77, "skipped",
where there is none."""
import os
import pathlib
import sys

build = pathlib.Path(sys.argv[1])
packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/torch"
for name in ("torch-venv", "bench-venv"):
    if (build / name / packages).is_dir():
        python = str(build / name / "bin" / "python")
        os.execv(python, [python, *sys.argv[2:]])
print("skipped: no PyTorch for this Python in build/torch-venv, which scripts/test makes")
sys.exit(77)
