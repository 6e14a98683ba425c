"""Mistakes of the user, and errors of the programs that are called."""
from __future__ import annotations


class Refusal(Exception):
    """One line, "WHAT: WHY; TRY", and the exit code of docs/exit-codes.md that the command ends with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(" ".join(text.split()))
        self.code = code
