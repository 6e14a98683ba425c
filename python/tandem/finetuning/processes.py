"""The program `tandem` as a process of its own: asked for an answer, or run while its output goes to the user's terminal."""
from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import program
from .refusal import Refusal

_ERROR = "tandem: error: "
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Ended(Exception):
    """A process has ended with an exit code other than 0, and has said why itself."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _end(number: int, _: object) -> None:
    raise Ended(128 + number)


def end_by_signals() -> None:
    """Makes SIGTERM and SIGHUP raise Ended from now on, where the process was not started with them ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def environment() -> dict[str, str]:
    """The environment of the program: its Python, for tokenizers, is this one."""
    return {"TANDEM_PYTHON": sys.executable, **os.environ}


def ask(*arguments: str) -> str:
    """Standard output of the program. Blocks. Raises Refusal with its error and exit code."""
    done = subprocess.run([program.path(), *arguments], capture_output=True, text=True, env=environment(), stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith(_ERROR)]
    text = lines[-1].removeprefix(_ERROR) if lines else f"tandem {arguments[0]}: it ended with {done.returncode}; report its output: {done.stderr}"
    raise Refusal(text, done.returncode if done.returncode > 0 else 128 - done.returncode)


def ask_json(*arguments: str) -> dict[str, Any]:
    """The object that the program prints with --json. Blocks. Raises as `ask` does."""
    answer: dict[str, Any] = json.loads(ask(*arguments, "--json"))
    return answer


def _ends_with_parent() -> Callable[[], None]:
    """A function for a new process, which is killed when this one is: a second call finds no other at work."""
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return prepare


class _Forwarding:
    """Signals of this process go to another, once each: a second one would end it without saving. For a `with` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._came: list[int] = []

    def __enter__(self) -> _Forwarding:
        ignored = {number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN}  # by who started this process
        self._before = {number: signal.signal(number, self._take) for number in _SIGNALS if number not in ignored}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: object) -> None:
        if number in self._came:
            return
        self._came.append(number)
        if self._process:
            self._process.send_signal(number)

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """Names the process; it gets what has come before."""
        came, self._process = list(self._came), process
        for number in came:
            process.send_signal(number)


def run(arguments: Sequence[str], lock: int) -> None:
    """Runs the program to its end; its output is this process's. Signals that come here reach it alone, and it ends with this
    process. `lock`: a descriptor that it keeps open. Raises Ended."""
    alone = {**environment(), "TANDEM_NO_NEXT": "1"}
    with _Forwarding() as signals, subprocess.Popen([program.path(), *arguments], env=alone, stdin=subprocess.DEVNULL,
                                                    pass_fds=(lock,), process_group=0, preexec_fn=_ends_with_parent()) as process:
        signals.to(process)
        code = process.wait()
    if code != 0:
        raise Ended(code if code > 0 else 128 - code)
