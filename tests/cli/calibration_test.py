"""Calibrates this machine once, for the scripts that plan by it: what it measures stays in a folder.

Usage: calibration_test.py PROGRAM FOLDER
"""
import pathlib
import shutil
import sys

from program import ProgramTest, main

FOLDER = pathlib.Path(sys.argv.pop(1))


class Calibration(ProgramTest):
    def test_one_file_is_left(self):
        shutil.rmtree(FOLDER, ignore_errors=True)
        profile = self.measure()
        FOLDER.mkdir(parents=True)
        shutil.copy(profile, FOLDER)


if __name__ == "__main__":
    main()
