"""Settings of a fine-tuning: what the command line decides, and how a run keeps them."""
from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

# Settings that change time and memory alone: a second call may have others.
FREE = ("device_memory", "host_memory", "policy", "state_folder", "checkpoint_every", "offline", "out", "merged", "dpo_reference")
# File of a run's folder that holds them.
SETTINGS = "finetune.toml"
# Flags whose names are not the setting's own.
FLAGS = {"data": "DATA", "model": "MODEL", "state_folder": "--state-dir", "schedule": "--lr-schedule",
         "betas": "--beta1 and --beta2", "evaluate_every": "--eval-every"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """All values that do not depend on model and data. None: decided by these (defaults.py)."""

    model: str
    data: tuple[str, ...]
    out: Path
    engine: str  # "auto", "native" or "torch"
    device: str
    device_memory: str | None
    host_memory: str | None
    state: str
    state_folder: Path | None
    policy: str
    row_length: int | None  # tokens of a row + 1; None: by the data, at most the model's positions
    validation: float  # share of the records that is held out
    tokens_per_batch: int | None
    micro_batch: int | None
    epochs: float  # 0: by the number of records
    steps: int | None
    lr: float | None
    warmup: float  # share of the steps
    schedule: str
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    seed: int
    patience: int  # evaluations without a lower loss that end the run; 0: off
    evaluate_every: int | None  # steps
    checkpoint_every: int | None  # steps
    format: str
    revision: str | None
    offline: bool
    split: str
    # Defaults below are of runs that were begun before there were these.
    lora_rank: int | None = None  # rank of adapters, trained in the model's place; None: none, or `adapter`'s
    lora_alpha: float | None = None  # None: twice the rank
    lora_targets: str | None = None  # names with commas between them, or a regular expression; None: all linear layers of blocks
    lora_dropout: float | None = None  # share; None: 0
    lora_rslora: bool | None = None  # whether adapters count alpha / sqrt(rank) times; None: alpha / rank
    lora_modules_to_save: str | None = None  # names with commas between them, of modules that are trained whole
    adapter: Path | None = None  # to go on from: a folder of PEFT's, a run, a checkpoint
    base: str | None = None  # format of the frozen model; None: as its files have it
    merged: bool = False  # whether the run writes a whole model beside its adapter
    objective: str = "lm"  # "lm": targets are learnt; "dpo": which answer of a pair is preferred
    dpo_beta: float | None = None  # factor of the rewards; None: 0.1
    dpo_reference: str | None = None  # "before" or "step", when the reference is computed; None or "auto": as is predicted to be faster
    lora_experts: str | None = None  # matrices of experts that have adapters: "all", "gate_up_proj" or "down_proj"; None: none
    freeze: str | None = None  # regular expression of parameters that are not trained; None: all are
    compute: str | None = None  # type that is computed in: "fp32", "bf16" or "fp8"; None: by the device


def flag_of(name: str) -> str:
    """The flag that gives a setting, for people."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def default_of(name: str) -> Any:
    """The value of a setting that a run was begun without; None where there is none."""
    default = {field.name: field.default for field in dataclasses.fields(Settings)}.get(name)
    return None if default is dataclasses.MISSING else default


def as_values(settings: Settings) -> dict[str, Any]:
    """The settings as TOML and JSON know them; without those that are None."""
    values = {}
    for name, value in dataclasses.asdict(settings).items():
        if isinstance(value, Path):
            value = str(value)
        if value is not None:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


def to_toml(values: dict[str, Any]) -> str:
    """TOML of a flat table. JSON writes strings, numbers, booleans and lists as TOML does."""
    return "".join(f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in values.items())


def from_toml(text: str) -> dict[str, Any]:
    """Reads `to_toml` back. Raises ValueError."""
    return {name.replace("-", "_"): value for name, value in tomllib.loads(text).items()}
