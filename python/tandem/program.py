"""The program `tandem`, which comes with the package, and the subcommands that the package adds to it."""
from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

from .errors import InputError

#: Module of each subcommand of the package, and what it does.
COMMANDS = {
    "finetune": ("tandem.finetuning.command", "from records and a model to a model that answers"),
    "prepare": ("tandem.commands.prepare", "text, instructions and chats to token files"),
    "chat": ("tandem.commands.chat", "a conversation with the model of a run"),
}


def path() -> Path:
    """The program's file: of the package, or of the build tree that the package lies in. Raises InputError where there is none."""
    package = Path(__file__).resolve().parent
    for file in (package / "bin" / "tandem", package.parents[1] / "tandem"):
        if file.is_file():
            return file
    raise InputError(f"{package / 'bin' / 'tandem'}: is missing; install tandem-trainer again, or use the program of the build tree")


def main() -> None:
    """Runs a subcommand of the package, or goes on as the program with this process's arguments, whose Python for tokenizers is
    this one. Ends the process."""
    arguments = sys.argv[1:]
    os.environ.setdefault("TANDEM_PYTHON", sys.executable)
    try:
        if arguments and arguments[0] in COMMANDS:
            sys.exit(importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]))
        program = path()
    except InputError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    if arguments in ([], ["--help"], ["-h"]):
        code = subprocess.run([program, *arguments]).returncode
        print("\nOf the Python package:", *(f"  {name:<26}{what}" for name, (_, what) in COMMANDS.items()), sep="\n")
        sys.exit(code)
    os.execv(program, [os.fspath(program), *arguments])


if __name__ == "__main__":
    main()
