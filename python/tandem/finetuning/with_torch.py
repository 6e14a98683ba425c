"""Training by PyTorch, of models that the program's own engine does not have, and chats with the models that it leaves. Imports torch."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .torch_chat import chat
from .torch_training import Training

__all__ = ["TorchRun", "TorchSettings", "chat", "train"]


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


def train(run: TorchRun, progress: Callable[[str], None]) -> None:
    """Trains, or goes on from the newest checkpoint in `out`, and leaves the best model in `out/model`, metrics and a summary.

    AdamW by tandem.stream: weights in bf16, masters in fp32. A loss is the mean over targets, of all micro-batches of a step together;
    no document of a row sees another. Killed at any moment and called again, it comes to the weights of a run that was not, to the bit.
    SIGINT, SIGTERM and SIGHUP end it after the step, with a checkpoint, by SystemExit(128 + signal); a second one at once.

    Blocks, and tells of steps by `progress`. Raises Refusal, with code 6 after ten steps in a row without a finite gradient norm, and
    tandem's errors, such as PlanError where the model does not fit."""
    with Training(run, progress) as training:
        training.run()
