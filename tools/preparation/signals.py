"""SIGINT and SIGTERM of the main process: raised once, deferred where files change, ignored at the end."""
import contextlib
import os
import signal

from .errors import Interrupted


class Signals:
    """SIGINT and SIGTERM raise Interrupted in the main thread, once; where they were ignored they still are."""

    def __init__(self):
        self._handled = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
        self._owner, self._deferrals, self._pending = os.getpid(), 0, None
        for number in self._handled:
            signal.signal(number, self._interrupt)

    def _interrupt(self, number, _):
        if os.getpid() != self._owner:  # a worker that has just been forked
            os._exit(128 + number)
        self.ignore()
        self._pending = number
        if not self._deferrals:
            raise Interrupted(number)

    def ignore(self):
        """Ignores signals: from here on the run goes to its end."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    @contextlib.contextmanager
    def deferred(self):
        """A signal in the block takes effect at its end."""
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
        if self._pending is not None and not self._deferrals:
            raise Interrupted(self._pending)
