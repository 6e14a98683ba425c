"""A training by PyTorch, as the command has decided it."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class TorchSettings(Protocol):
    """Settings of a fine-tuning that training by PyTorch reads, as the command has decided them."""

    @property
    def device(self) -> str: ...
    @property
    def device_memory(self) -> str | None: ...
    @property
    def host_memory(self) -> str | None: ...
    @property
    def state(self) -> str: ...
    @property
    def state_folder(self) -> Path | None: ...
    @property
    def policy(self) -> str: ...
    @property
    def warmup(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def clip(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def patience(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class TorchRun:
    """A training: `model`, a Hugging Face folder; `data` and `validation`, token files of rows (NAME.bin, with NAME.json and NAME.mask.bin
    beside it); `out`, the folder of the run; `steps` of `accumulation` times `micro_batch` rows; `lr`, the highest learning rate; steps
    from one evaluation, and from one checkpoint, to the next (0: at the end alone); `complete`, which adds to the folder of the best model
    before it appears under its name."""

    model: Path
    data: Path
    validation: Path | None
    out: Path
    settings: TorchSettings
    steps: int
    micro_batch: int
    accumulation: int
    lr: float
    evaluate_every: int
    checkpoint_every: int
    complete: Callable[[Path], None] | None = None
