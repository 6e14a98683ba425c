"""Signals that end a run after its step."""
from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, taken down in place of ending the process; the second one ends it as it would have before."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def watch(self) -> None:
        """Watches from here on. Signals that are ignored stay so, as SIGHUP below nohup. Does nothing in a thread other
        than the main one, where Python has no handlers."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}

    def _take(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self.restore()

    def restore(self) -> None:
        """Handlers as they were."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
