"""Runs a program under one of the instruction sets that this machine has.

  under_instruction_set.py SET PROGRAM ARGUMENT...   runs PROGRAM under SET; ends with 77, which CTest counts as skipped, where
                                                     there is nothing to add to a run without a limit
"""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
from instruction_sets import limits, sets_here  # noqa: E402


def main(name, *command):
    here = sets_here()
    if name not in here:
        print(f"this processor has no {name}: tested are {' and '.join(here)}")
        return 77
    if name == here[-1]:
        print(f"{name} is the best that this processor has: what runs without a limit tests it")
        return 77
    os.execvpe(command[0], command, {**os.environ, **limits(name)})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
