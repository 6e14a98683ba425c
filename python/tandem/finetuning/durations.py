"""Times for people."""
from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in words: "40 s", "12 minutes", "3.5 hours"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
