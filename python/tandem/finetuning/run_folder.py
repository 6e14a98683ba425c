"""Files of a run by PyTorch: metrics, summary, checkpoints and the model. Each is there whole or not at all."""
from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .refusal import Refusal

_STATE = "run.json"
_ENGINE = "engine"
_NAME = "step-{:08}"
#: Checkpoints that stay beside the best one.
_KEPT = 2
#: Bytes of a parameter in a checkpoint: master and moments; and in the model.
_CHECKPOINT_BYTES, _MODEL_BYTES = 12, 2


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Failures to write as refusals."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error.strerror or error}; make room or give rights there, and give the command again: it goes on "
                      "from the last checkpoint", 7) from None


def _sync(path: Path) -> None:
    """Writes what a file or folder holds through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    """A value for JSON, which has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {key: _finite(entry) for key, entry in value.items()} if isinstance(value, dict) else value


class Checkpoint:
    """A checkpoint: the folder of the engine's, and the state of the run beside it."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.engine, self.state = folder / _ENGINE, state

    @classmethod
    def read(cls, folder: Path) -> Checkpoint | None:
        """None where the folder holds no whole one."""
        try:
            state = json.loads((folder / _STATE).read_bytes())
        except (OSError, ValueError):
            return None
        return cls(folder, state) if isinstance(state, dict) and isinstance(state.get("step"), int) else None


class RunFolder:
    """The folder of a run."""

    def __init__(self, out: Path) -> None:
        """Removes what a call that was killed has left half written."""
        self.out, self.model = out, out / "model"
        self._checkpoints, self._metrics = out / "checkpoints", out / "metrics.jsonl"
        with writing(out):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            for path in (*self._checkpoints.glob(".*.partial"), *out.glob(".*.partial")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._file: Any = None

    def require_room(self, parameters: int) -> None:
        """Refuses where the disk has no room for the checkpoints that lie beside each other, one being written among them, and the model."""
        there = sum(file.stat().st_size for file in self.out.rglob("*.safetensors"))
        needed = parameters * ((_KEPT + 2) * _CHECKPOINT_BYTES + _MODEL_BYTES) - there
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise Refusal(f"--out {self.out}: checkpoints and model take {needed / 1e9:.2f} GB more, and the disk has {free / 1e9:.2f} GB free; make "
                          "room, or name a folder on another disk", 7)

    # Checkpoints.

    def checkpoints(self) -> list[Checkpoint]:
        """The whole ones, the newest first."""
        folders = sorted(self._checkpoints.glob(_NAME.format(0)[:5] + "*"), reverse=True)
        return [found for folder in folders if (found := Checkpoint.read(folder)) is not None]

    def checkpoint(self, step: int) -> Checkpoint | None:
        """The one of a step."""
        return Checkpoint.read(self._checkpoints / _NAME.format(step))

    def save(self, state: dict[str, Any], save_engine: Callable[[Path], Any], best_step: int | None) -> None:
        """Writes a checkpoint, and removes those that need not stay: all but the newest, and the one of `best_step`."""
        folder = self._checkpoints / _NAME.format(state["step"])
        part = folder.with_name(f".{folder.name}.partial")
        with writing(folder):
            os.fsync(self._file.fileno())  # metrics up to here are needed to go on from it
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_engine(part / _ENGINE)
            (part / _STATE).write_text(json.dumps(_finite(state)))
            _sync(part / _STATE)
            _sync(part)
            if folder.exists():  # one that could not be read
                shutil.rmtree(folder)
            part.rename(folder)
            _sync(self._checkpoints)
            self._prune(best_step)

    def _prune(self, best_step: int | None) -> None:
        best = None if best_step is None else _NAME.format(best_step)
        folders = sorted((folder for folder in self._checkpoints.glob("step-*") if Checkpoint.read(folder)), reverse=True)
        for folder in folders[_KEPT:]:
            if folder.name != best:
                (folder / _STATE).unlink()  # first: without it the folder is no checkpoint
                shutil.rmtree(folder)

    # Metrics and summary.

    def open_metrics(self, step: int) -> None:
        """Cuts metrics back to a step, and goes on behind it."""
        kept = []
        with writing(self._metrics):
            for line in self._metrics.read_text().splitlines() if self._metrics.exists() else []:
                with contextlib.suppress(ValueError):  # a last line that was cut off
                    told = json.loads(line)
                    if isinstance(told, dict) and isinstance(told.get("step"), int) and told["step"] <= step:
                        kept.append(line + "\n")
            self.replace(self._metrics, "".join(kept))
            self._file = self._metrics.open("a")

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Adds the line of a step."""
        with writing(self._metrics):
            self._file.write(json.dumps(_finite(metrics)) + "\n")
            self._file.flush()

    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty where there is none."""
        try:
            told = json.loads((self.out / "summary.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces summary.json."""
        self.replace(self.out / "summary.json", json.dumps(_finite(summary), indent=2) + "\n")

    def replace(self, file: Path, text: str) -> None:
        """Replaces a file, whole or not at all."""
        part = file.with_name(f".{file.name}.partial")
        with writing(file):
            part.write_text(text)
            _sync(part)
            part.replace(file)

    def close(self) -> None:
        """Closes the metrics."""
        if self._file is not None:
            self._file.close()

    # The model.

    def write_model(self, write: Callable[[Path], None]) -> None:
        """Replaces the folder of the model by what `write` puts into one."""
        part, old = self.out / ".model.partial", self.out / ".model-before.partial"
        with writing(self.model):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            write(part)
            for file in part.rglob("*"):
                _sync(file)
            _sync(part)
            if self.model.exists():
                self.model.rename(old)
            part.rename(self.model)
            _sync(self.out)
            shutil.rmtree(old, ignore_errors=True)
