"""Seconds that a streamed training step spends in tandem's own code: hooks, fetches, gradients handed over, ends of steps.

The package's functions are wrapped where the training thread enters them, and where they call back the module's own forward. Python
calls of one thread are timed alone: kernels of the module, which compute meanwhile, and autograd's own work are not in it.
"""
import functools
import time

import tandem
from tandem.pytorch.engine_optimizer import EngineOptimizer
from tandem.pytorch.stream_runtime import StreamRuntime
from tandem.pytorch.streaming import StreamOptimizer
from tandem.pytorch.unit_arguments import UnitArguments
from tandem.pytorch.unit_pass import UnitPass

#: Functions by which the training thread enters the engine's code, and by which that calls the module.
ENTRIES = {UnitPass: ("run", "_pack", "_pack_weights", "_made_again", "_part_again", "finish"),
           StreamRuntime: ("_begin_step", "enter_module", "leave_module", "_end_backward"),
           EngineOptimizer: ("step", "clip_by_engine"), StreamOptimizer: ("zero_grad",)}
EXITS = {UnitArguments: ("call",)}


class EngineClock:
    """Seconds in the engine's code, without what the module computes there and without waits for updates. Made before the module
    is streamed; for one thread."""

    def __init__(self):
        self.seconds = 0.0
        self._inside, self._since = False, 0.0
        for places, inside in ((ENTRIES, True), (EXITS, False)):
            for owner, names in places.items():
                for name in names:
                    setattr(owner, name, self._wrapped(getattr(owner, name), inside))
        arrival = UnitPass._arrival
        UnitPass._arrival = lambda one, index: self._wrapped(arrival(one, index), True)
        tandem.OffloadEngine.update = self._without_waits(tandem.OffloadEngine.update)

    def take(self):
        """The seconds since it was asked last."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _without_waits(self, update):
        def reported(engine, **values):
            report = update(engine, **values)
            self.seconds -= report.exposed_update_seconds
            return report
        return reported

    def _pause(self):
        """Ends a stretch in the engine's code, if there is one; returns whether."""
        now = time.perf_counter()
        if self._inside:
            self.seconds += now - self._since
        return self._inside

    def _wrapped(self, function, inside):
        """Time is read last before the function and first after it, so that the clock's own is in no stretch."""
        @functools.wraps(function)
        def timed(*arguments, **keywords):
            before = self._pause()
            self._inside = inside
            self._since = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self._pause()
                self._inside = before
                self._since = time.perf_counter()
        return timed
