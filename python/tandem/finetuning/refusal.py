"""Mistakes of a user."""
from __future__ import annotations


class Refusal(Exception):
    """Ends a command with one line, "WHAT: WHY; TRY", and an exit code of docs/exit-codes.md."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
