"""The program `tandem`, which comes with the package."""
from __future__ import annotations

import os
import sys
from pathlib import Path

from .errors import InputError


def path() -> Path:
    """The program's file. Raises InputError where the package was built without."""
    file = Path(__file__).with_name("bin") / "tandem"
    if not file.is_file():
        raise InputError(f"{file}: is missing; install tandem-trainer again, or use the program of the build tree")
    return file


def main() -> None:
    """Goes on as the program, with this process's arguments. Its Python, for tokenizers, is this one."""
    try:
        program = path()
    except InputError as error:
        sys.exit(f"tandem: error: {error}")
    os.environ.setdefault("TANDEM_PYTHON", sys.executable)
    os.execv(program, [os.fspath(program), *sys.argv[1:]])
