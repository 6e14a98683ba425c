"""Finding a Python that has what a test compares with; without one the test is skipped, and says so."""
import os
import pathlib
import subprocess
import sys

SKIPPED = 77  # CTest's return code for it


def run_under_one_with(*modules):
    """Goes on under a Python that imports `modules`: $TANDEM_TEST_PYTHON, that which scripts/test makes for tests of data, that
    of the benchmarks, or this one."""
    build = pathlib.Path(__file__).resolve().parents[2] / "build"
    made = [str(build / name / "bin" / "python") for name in ("data-venv", "bench-venv")]
    for python in filter(None, [os.environ.get("TANDEM_TEST_PYTHON"), *made, sys.executable]):
        try:
            found = subprocess.run([python, "-c", f"import {', '.join(modules)}"], capture_output=True).returncode == 0
        except OSError:
            continue
        if not found:
            continue
        if os.environ.get("TANDEM_TEST_UNDER") == python:
            return
        os.environ["TANDEM_TEST_UNDER"] = python
        os.execv(python, [python, *sys.argv])
    print(f"skipped: no Python with {' and '.join(modules)}; name one in TANDEM_TEST_PYTHON")
    sys.exit(SKIPPED)
