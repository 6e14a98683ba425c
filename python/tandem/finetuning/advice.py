"""Changes to a run that does not fit, each as flags of the command line or as another model."""
from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import native
from .refusal import Refusal
from .settings import Settings

_FORMATS = ("split", "bf16-moments", "8bit-moments")  # of optimizer state, each smaller than the one before
_LENGTHS = (2048, 1024, 512, 256, 128)  # tokens of shorter rows
# By model_type, the smallest first: built-in shapes and the models of the hub that have them.
_FAMILIES = {
    "gpt2": (("gpt2", "openai-community/gpt2"), ("gpt2-medium", "openai-community/gpt2-medium"), ("gpt2-large", "openai-community/gpt2-large")),
    "llama": (("llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct"), ("llama3.2-3b", "meta-llama/Llama-3.2-3B-Instruct"),
              ("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct")),
    "qwen2": (("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"), ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
              ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct")),
    "qwen3": (("qwen3-0.6b", "Qwen/Qwen3-0.6B"), ("qwen3-1.7b", "Qwen/Qwen3-1.7B"), ("qwen3-4b", "Qwen/Qwen3-4B"), ("qwen3-8b", "Qwen/Qwen3-8B"),
              ("qwen3-14b", "Qwen/Qwen3-14B")),
    "gemma3_text": (("gemma3-270m", "google/gemma-3-270m-it"), ("gemma3-1b", "google/gemma-3-1b-it")),
}


class NotFitting(Refusal):
    """A plan that does not fit. `flags`: of the command line, each of which makes it fit; `models`: those that would fit in the place of
    this one."""

    def __init__(self, refused: Refusal, flags: Sequence[str], models: Sequence[str]) -> None:
        what, _, told = str(refused).partition(";")
        first = flags[0] if flags else f"the model {models[0]}" if models else None
        super().__init__(f"{what}; take {first}" if first else f"{what};{told or ' take a smaller model'}", 3)
        self.flags, self.models = tuple(flags), tuple(models)

    def commands(self, settings: Settings, arguments: Sequence[str]) -> list[str]:
        """The command line, changed in each of these ways."""
        command = shlex.join(["tandem", "finetune", *arguments])
        others = [[model if word in (settings.model, Path(settings.model).name) else word for word in arguments] for model in self.models]
        return [f"{command} {flags}" for flags in self.flags] + [shlex.join(["tandem", "finetune", *words]) for words in others]


class MayFit(Refusal):
    """A run by PyTorch that does not fit: less than that is not tried before its model is made."""

    def __init__(self, why: str, settings: Settings, row_length: int) -> None:
        super().__init__(f"{why}, a smaller --state, or a shorter --row-length", 3)
        smallest = _FORMATS[-1]
        flags = [] if settings.state == smallest else [f"--state {smallest}"]
        flags += [f"--row-length {length + 1}" for length in _LENGTHS if length + 1 < row_length][:1]
        flags += ["--state-dir DIR"] if settings.state_folder is None and settings.host_memory is not None else []
        self.flags = tuple(flags)

    def commands(self, arguments: Sequence[str]) -> list[str]:
        """The command line with less memory, in each of these ways."""
        command = shlex.join(["tandem", "finetune", *arguments])
        return [f"{command} {flags}" for flags in self.flags]


def require_fit(settings: Settings, model: Path, row_length: int) -> None:
    """Refuses a run whose smallest plan does not fit: NotFitting. Other reasons of the plan are a Refusal, too."""
    try:
        native.plan(settings, model, row_length, settings.micro_batch or 1, 2)
    except Refusal as refusal:
        if refusal.code != 3:
            raise
        raise NotFitting(refusal, _flags(settings, model, row_length), _models(settings, model, row_length)) from None


def _flags(settings: Settings, model: Path, row_length: int) -> list[str]:
    """One change of each kind that is enough; where none is, several at once."""
    rows = settings.micro_batch or 1
    smaller = _FORMATS[_FORMATS.index(settings.state) + 1:] if settings.state in _FORMATS else _FORMATS
    lengths = [length + 1 for length in _LENGTHS if length + 1 < row_length]

    def fitting(changes: dict[str, tuple[Settings, int]], rows: int = rows) -> list[str]:
        return next(([flags] for flags, (changed, length) in changes.items() if native.fits(changed, model, length, rows)), [])

    def with_state(state: str) -> Settings:
        return dataclasses.replace(settings, state=state)

    found = fitting({f"--state {state}": (with_state(state), row_length) for state in smaller})
    found += fitting({f"--row-length {length}": (settings, length) for length in lengths})
    if settings.micro_batch and settings.micro_batch > 1:
        found += fitting({"--micro-batch 1": (settings, row_length)}, 1)
    if settings.state_folder is None:
        elsewhere = dataclasses.replace(settings, state_folder=Path(tempfile.gettempdir()))
        found += fitting({"--state-dir DIR": (elsewhere, row_length)})
    if not found and smaller:
        found += fitting({f"--state {smaller[-1]} --row-length {length}": (with_state(smaller[-1]), length) for length in lengths})
    return found


def _models(settings: Settings, model: Path, row_length: int) -> list[str]:
    """The largest model of the family that fits."""
    rows = settings.micro_batch or 1
    family = _FAMILIES.get(json.loads((model / "config.json").read_bytes()).get("model_type", ""), ())
    return next(([name] for shape, name in reversed(family) if native.fits(settings, Path(shape), row_length, rows)), [])
