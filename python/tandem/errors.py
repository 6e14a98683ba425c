"""Exceptions of tandem, one class for each of the C++ interface. Every text is one line, "WHAT: WHY; TRY"."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import MemoryEntry


class Error(RuntimeError):
    """Base of all errors of tandem. `exit_code` is the code that the program `tandem` ends with for such an error."""

    exit_code: int = 1


class UsageError(Error):
    """Bad option, configuration or model description (exit 2)."""


class PlanError(Error):
    """The memory plan does not fit (exit 3). `table` is the plan, for people; `entries` its rows, perhaps none."""

    table: str = ""
    entries: list[MemoryEntry] = []


class InputError(Error):
    """Unreadable, corrupt or mismatched tensors, data or checkpoint (exit 4)."""


class DeviceError(Error):
    """Failure of a device or of communication (exit 5)."""


class PeerError(DeviceError):
    """Another rank of a group has failed, and with it the group (exit 5). Names the rank."""


class TrainingError(Error):
    """Training cannot go on (exit 6)."""


class WriteError(Error):
    """A file or folder cannot be written (exit 7)."""


class MisuseError(Error):
    """tandem was used against its contract: a programming mistake (exit 1)."""


class StalledError(Error):
    """A wait made no progress for longer than the watchdog allows; names who waits for what (exit 5)."""
