"""Changes to a run that does not fit, each as flags of the command line or as another model."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..display import bytes_text
from . import adapting, native
from .model_facts import is_quantized
from .refusal import Refusal
from .settings import Settings

_FORMATS = ("split", "bf16-moments", "8bit-moments")  # formats of optimizer state, each smaller than the one before
_RANK = 16  # rank of adapters
_LENGTHS = (2048, 1024, 512, 256, 128)  # tokens of shorter rows
# Families by model_type, the smallest first: built-in shapes and the models of the hub that have them.
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


class Change(NamedTuple):
    """A change that is enough: flags of the command line, or another model; and the plan that it has. `without`: a flag with a value that is
    to be left out."""

    change: str
    plan: dict[str, Any]
    without: str = ""

    def taken(self) -> str:
        """Bytes of the plan, for people."""
        return f"{bytes_text(self.plan['device_bytes'])} of the device and {bytes_text(self.plan['host_bytes'])} of the host"


class NotFitting(Refusal):
    """A plan that does not fit. `flags`: of the command line, each of which makes it fit; `adapters`: flags that train adapters in the
    place of the model; `models`: those that would fit in the place of this one."""

    def __init__(self, refused: Refusal, flags: Sequence[Change], adapters: Sequence[Change], models: Sequence[Change]) -> None:
        what, _, told = str(refused).partition(";")
        first = [flags[0].change] if flags else []
        first += [f"{found.change}{' for adapters' if '--lora-rank' in found.change else ''}{f', without {found.without}' if found.without else ''}, "
                  f"with {found.taken()}" for found in adapters]
        first += [f"the model {models[0].change}"] if models and not first else []
        super().__init__(f"{what}; take {'; or take '.join(first)}" if first else f"{what};{told or ' take a smaller model'}", 3)
        self.flags, self.models = (*flags, *adapters), tuple(models)

    def commands(self, settings: Settings, arguments: Sequence[str]) -> list[str]:
        """The command line, changed in each of these ways, behind the memory that it takes."""
        told = [f"in {found.taken()}: {shlex.join(['tandem', 'finetune', *_without(arguments, found.without)])} {found.change}" for found in self.flags]
        for found in self.models:
            words = [found.change if word in (settings.model, Path(settings.model).name) else word for word in arguments]
            told.append(f"in {found.taken()}: {shlex.join(['tandem', 'finetune', *words])}")
        return told


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


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    """A command line without a flag and its value."""
    return [word for at, word in enumerate(arguments)
            if not flag or word != flag and not word.startswith(f"{flag}=") and (at == 0 or arguments[at - 1] != flag)]


def require_fit(settings: Settings, model: Path, row_length: int) -> None:
    """Refuses a run whose smallest plan does not fit: NotFitting. Other reasons of the plan are a Refusal, too."""
    try:
        native.plan(settings, model, row_length, _rows(settings), 2)
    except Refusal as refusal:
        if refusal.code != 3:
            raise
        found = [change(settings, model, row_length) for change in (_flags, _adapters, _models)]
        raise NotFitting(refusal, *found) from None


def _rows(settings: Settings) -> int:
    """Rows that are computed at once, at least."""
    return settings.micro_batch or adapting.least_rows(settings)


def _first(changes: dict[str, tuple[Settings, int]], model: Path, rows: int, without: str = "") -> list[Change]:
    """The first of these changes, each to settings and a row length, that fits."""
    for flags, (changed, length) in changes.items():
        plan = native.fitting_plan(changed, model, length, rows)
        if plan is not None:
            return [Change(flags, plan, without)]
    return []


def _flags(settings: Settings, model: Path, row_length: int) -> list[Change]:
    """One change of each kind that is enough; where none is, several at once."""
    rows, least = _rows(settings), adapting.least_rows(settings)
    smaller = _FORMATS[_FORMATS.index(settings.state) + 1:] if settings.state in _FORMATS else _FORMATS
    lengths = [length + 1 for length in _LENGTHS if length + 1 < row_length] if settings.objective == "lm" else []  # no answer may be cut

    def with_state(state: str) -> Settings:
        return dataclasses.replace(settings, state=state)

    found = _first({f"--state {state}": (with_state(state), row_length) for state in smaller}, model, rows)
    found += _first({f"--row-length {length}": (settings, length) for length in lengths}, model, rows)
    if rows > least:
        found += _first({f"--micro-batch {least}": (settings, row_length)}, model, least)
    if settings.state_folder is None:
        elsewhere = dataclasses.replace(settings, state_folder=Path(tempfile.gettempdir()))
        found += _first({"--state-dir DIR": (elsewhere, row_length)}, model, rows)
    if not found and smaller:
        found += _first({f"--state {smaller[-1]} --row-length {length}": (with_state(smaller[-1]), length) for length in lengths}, model, rows)
    return found


def _adapters(settings: Settings, model: Path, row_length: int) -> list[Change]:
    """Frozen weights in fewer bits, where there are any; else, or where that is not enough, adapters in the place of the model."""
    if is_quantized(model):
        return []
    known = adapting.BASES.index(settings.base or "bf16")
    found = _over_bases(settings, model, row_length, adapting.BASES[known + 1:]) if adapting.leaves_weights(settings) else []
    if found or adapting.has_adapters(settings):
        return found
    adapters = dataclasses.replace(settings, lora_rank=_RANK, freeze=None)
    return _over_bases(adapters, model, row_length, adapting.BASES[known:], f"--lora-rank {_RANK} ", "" if settings.freeze is None else "--freeze")


def _over_bases(settings: Settings, model: Path, row_length: int, bases: Sequence[str], flags: str = "", without: str = "") -> list[Change]:
    """The first of these formats of what is frozen that fits, behind the flags that the settings were changed by."""
    changes = {f"{flags}--base {base}" if base != (settings.base or "bf16") else flags.rstrip(): base for base in bases}
    try:
        return _first({words: (dataclasses.replace(settings, base=base), row_length) for words, base in changes.items()}, model, _rows(settings), without)
    except Refusal:  # no linear layer of the model has adapters, or no matrix of its blocks is frozen
        return []


def _models(settings: Settings, model: Path, row_length: int) -> list[Change]:
    """The largest model of the family that fits. One that the flags are wrong for, such as those that name layers, is passed over."""
    if settings.adapter is not None:  # the adapter belongs to this model
        return []
    family = _FAMILIES.get(json.loads((model / "config.json").read_bytes()).get("model_type", ""), ())
    for shape, name in reversed(family):
        with contextlib.suppress(Refusal):
            plan = native.fitting_plan(settings, Path(shape), row_length, _rows(settings))
            if plan is not None:
                return [Change(name, plan)]
    return []
