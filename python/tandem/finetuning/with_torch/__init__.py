"""Training by PyTorch, of models that the program's own engine does not have, and chats with the models that it leaves. Imports torch."""
from __future__ import annotations

from collections.abc import Callable

from .chat import chat
from .torch_run import TorchRun, TorchSettings
from .training import Training

__all__ = ["TorchRun", "TorchSettings", "chat", "train"]


def train(run: TorchRun, progress: Callable[[str], None]) -> None:
    """Trains, or goes on from the newest checkpoint in `out`, and leaves the best model in `out/model`, metrics and a summary.

    AdamW by tandem.stream: weights in bf16, masters in fp32. A loss is the mean over targets, of all micro-batches of a step together;
    no document of a row sees another. Killed at any moment and called again, it comes to the weights of a run that was not, to the bit.
    SIGINT, SIGTERM and SIGHUP end it after the step, with a checkpoint, by SystemExit(128 + signal); a second one at once.

    Blocks, and tells of steps by `progress`. Raises Refusal, with code 6 after ten steps in a row without a finite gradient norm, and
    tandem's errors, such as PlanError where the model does not fit."""
    with Training(run, progress) as training:
        training.run()
