"""Folder of a run: its settings, the inputs that it was begun with, and the stages that are done, each a file that is whole."""
from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .refusal import Refusal
from .settings import FREE, SETTINGS, Settings, as_values, default_of, flag_of, from_toml, to_toml

_LOCK = ".finetune.lock"
_EARLY = ("data", "stages", "tokenizer")  # folders that a run has before it is begun
_UNWRITTEN = f".{SETTINGS}.part"  # left by a call that was killed while it wrote the settings
_WAIT = 60.0  # seconds for the processes of a call that was killed
_WHOLE = 1 << 26  # bytes of a file that is compared by its content


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, through to the disk. Raises Refusal."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error.strerror}; make room or give rights there, or name another --out", 7) from None


def fingerprints(paths: Sequence[Path]) -> dict[str, list[Any]]:
    """Size and content of each file, and of the files below each folder, by path. Of a file of more than 64 MiB, such as weights, the
    first and the last of them count."""
    found = {}
    for path in paths:
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            found[str(file.absolute())] = [file.stat().st_size, _digest(file)]
    return found


def _digest(file: Path) -> str:
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as stream:
        for begin in (0, size - _WHOLE) if size > 2 * _WHOLE else (0,):
            stream.seek(begin)
            left = _WHOLE if size > 2 * _WHOLE else size
            while left > 0 and (block := stream.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


class RunFolder:
    """The folder OUT of one fine-tuning."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.data, self.tokens, self.model = out / "data", out / "data" / "train.bin", out / "model"
        self.adapter, self.report = out / "adapter", out / "report.html"

    @property
    def begun(self) -> bool:
        """Whether the data of a run are prepared here: from here on settings and inputs are fixed."""
        return (self.out / SETTINGS).is_file()

    def check(self, settings: Settings) -> None:
        """Refuses a folder that is no run's, and a run with other settings. Changes nothing."""
        if not self.begun:
            self._refuse_other_files()
            return
        try:
            before = from_toml((self.out / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refusal(f"{self.out / SETTINGS}: it cannot be read ({error}); name another --out", 4) from None
        now = as_values(settings)
        for name in sorted((before.keys() | now.keys()) - set(FREE)):
            was, value = (values.get(name, default_of(name)) for values in (before, now))
            if was != value:
                shown = f"{flag_of(name)} {_shown(name, was)}, not {_shown(name, value)}"
                raise Refusal(f"--out {self.out}: it holds a run with {shown}; give the same to go on, or name another --out", 2)

    def require_outside(self, data: Sequence[str]) -> None:
        """Refuses a folder within one of the data, whose files would become data of the next call."""
        place = self.out.resolve()
        for name in data:
            if Path(name).is_dir() and Path(name).resolve() in (place, *place.parents):
                raise Refusal(f"--out {self.out}: it lies in {name}, which is data; name a folder elsewhere", 2)

    def _refuse_other_files(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise Refusal(f"--out {self.out}: it is a file; name a folder", 2)
        # Files that a call left which ended before a run was begun.
        own = {_LOCK, _UNWRITTEN, *_EARLY} if (self.out / _LOCK).is_file() else set()
        names = sorted(path.name for path in self.out.iterdir() if path.name not in own) if self.out.is_dir() else []
        if names:
            what = "a run of tandem train" if {"checkpoints", "metrics.jsonl", "config.toml"} & set(names) else f"other files ({names[0]})"
            raise Refusal(f"--out {self.out}: it holds {what}; name another folder", 2)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Makes the folder, and holds its lock: a descriptor that processes of the run keep open. What was made is removed where no
        run has begun. Raises Refusal."""
        made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        lock = self._lock()
        try:
            yield lock
        finally:
            if not self.begun:
                self._clear(made)
            os.close(lock)

    def _clear(self, made: Sequence[Path]) -> None:
        """Removes what a call that is refused has made, but for data that were loaded."""
        for name in _EARLY[1:]:
            shutil.rmtree(self.out / name, ignore_errors=True)
        with suppress(OSError):  # the folder may hold files
            self.data.rmdir()
        (self.out / _UNWRITTEN).unlink(missing_ok=True)
        if [path.name for path in self.out.iterdir()] == [_LOCK]:
            (self.out / _LOCK).unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()

    def _lock(self) -> int:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.out / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise Refusal(f"--out {self.out}: {error.strerror}; name a folder that may be written", 7) from None
        end = time.monotonic() + _WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    os.close(lock)
                    raise Refusal(f"--out {self.out}: {error.strerror}; make room, or name another --out", 7) from None
                if time.monotonic() < end and _has_ended(os.pread(lock, 32, 0)):
                    time.sleep(0.05)
                    continue
                os.close(lock)
                raise Refusal(f"--out {self.out}: another call is at work there; wait for it, or name another --out", 7) from None

    def begin(self, settings: Settings) -> None:
        """A run begins: from here on the folder is its own."""
        write_whole(self.out / SETTINGS, to_toml(as_values(settings)))

    def forget(self) -> None:
        """A run that has no checkpoint is not begun any more. Its data stay."""
        with suppress(OSError):  # the folder may hold some
            (self.out / "checkpoints").rmdir()
        if not (self.out / "checkpoints").exists():
            for name in ("config.toml", SETTINGS):
                (self.out / name).unlink(missing_ok=True)

    def compare(self, inputs: dict[str, list[Any]]) -> None:
        """Refuses inputs that are not those that the run was begun with."""
        if not self.begun:
            return
        before = self.require("inputs")
        for path in sorted(before.keys() | inputs.keys()):
            if before.get(path) != inputs.get(path):
                what = "was not there" if path not in before else "is missing" if path not in inputs else "has changed"
                raise Refusal(f"{path}: it {what} since the run in {self.out} was begun; put it back to go on, or name another --out", 4)

    def has(self, name: str) -> bool:
        """Whether a stage is done, as far as its file says so."""
        return (self.out / "stages" / f"{name}.json").is_file()

    def has_result(self, name: str) -> bool:
        """Whether a folder that the run ends with is done, and still there."""
        return self.stage(name) is not None and (self.out / name).is_dir()

    def stage(self, name: str) -> dict[str, Any] | None:
        """Facts of a stage that is done; None where it is not."""
        try:
            found = json.loads((self.out / "stages" / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def require(self, name: str, fields: Sequence[str] = (), later: Sequence[str] = ()) -> dict[str, Any]:
        """Facts of a stage that the run has been through, with exactly these fields where some are named; without those of `later`, too,
        which earlier versions did not write. Raises Refusal where they cannot be read."""
        found = self.stage(name)
        if found is None or fields and set(found) | set(later) != set(fields):
            raise Refusal(f"{self.out / 'stages' / name}.json: it is missing or damaged; name another --out", 4)
        return found

    def finish(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """A stage is done; returns its facts."""
        write_whole(self.out / "stages" / f"{name}.json", json.dumps(facts, indent=2) + "\n")
        return facts


def _shown(name: str, value: Any) -> str:
    """A setting as it was given. Of `epochs` 0 stands for the default."""
    if value is None or (name == "epochs" and value == 0):
        return "left out"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _has_ended(pid: bytes) -> bool:
    """Whether the process that a lock names is there no more. Its own processes may be."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        pass
    return False
