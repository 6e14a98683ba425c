"""Errors that end a preparation, and writing of files that reports them.

Errors are one line each, "WHAT: WHY; TRY", and carry the exit code of the command.
"""
import contextlib
import os
import traceback


class Refusal(Exception):
    """The user's mistake: what is wrong and what to try (exit 2)."""


class WriteFailure(Exception):
    """A failure to write: the path, why, and what to try (exit 7)."""


class Fault(Exception):
    """A fault of this tool itself (exit 1)."""


def fault_of(error):
    """The Fault that reports an unexpected exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return Fault(f"a fault of this tool: {type(error).__name__}: {error} ({where}); report it with this line")


class Interrupted(BaseException):
    """The signal that ends the run (exit 128 and its number). No `except Exception` catches it."""


@contextlib.contextmanager
def writing(path):
    """Errors of the block as failures to write `path`."""
    try:
        yield
    except OSError as error:
        raise WriteFailure(f"cannot write {path}: {error.strerror or error}; make room or give rights there, "
                           "or name another --out") from None


def flush(path, content):
    """Writes a file through to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
