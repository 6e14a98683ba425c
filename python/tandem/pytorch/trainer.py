"""Trainers of transformers, and those that derive from them, over an engine."""
from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import MisuseError, UsageError
from .adamw import AdamW
from .engine_optimizer import EngineOptimizer
from .stream_runtime import Recompute
from .streaming import stream

#: Folder of a checkpoint of the Trainer's with the engine's.
_FOLDER = "tandem"
_SCHEDULER = "scheduler.pt"


@dataclasses.dataclass
class Config:
    """How a Trainer uses the engine: `stream` keeps weights there too (tandem.stream), else masters and moments alone
    (tandem.optim.AdamW). The other fields as of these two; learning rate, betas, eps and weight decay are those of the Trainer's
    arguments."""

    stream: bool = False
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    policy: str = "auto"
    state: str = "split"
    state_folder: str | os.PathLike[str] | None = None
    recompute: Recompute = "units"
    uses: int = 1  #: with `stream`: uses of a unit in one backward pass
    reserved_device_memory: int | str = 0
    device: str = "auto"


def trainer(base: type) -> type:
    """A subclass of transformers.Trainer, or of a class derived from it as SFTTrainer of TRL is, that takes a keyword `tandem`, a
    Config, and trains by the engine: AdamW, clipping by the true norm, saving and resuming to the bit.

    The optimizer is AdamW whatever the argument `optim` says. Raises MisuseError where an optimizer is given as well.
    """
    if not any(kind.__name__ == "Trainer" and kind.__module__.startswith("transformers") for kind in base.__mro__):
        raise MisuseError(f"tandem.hf.trainer: {base.__name__} is not derived from transformers.Trainer")

    class EngineTrainer(_EngineTrainer, base):  # type: ignore[misc]
        pass

    EngineTrainer.__name__ = EngineTrainer.__qualname__ = f"Tandem{base.__name__}"
    return EngineTrainer


class _EngineTrainer:
    """Put before a Trainer in the order of methods, which has these."""

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    get_decay_parameter_names: Any

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, tandem: Config | None = None, **keywords: Any) -> None:
        self._tandem = tandem or Config()
        if any(keywords.get("optimizers") or ()) or keywords.get("optimizer_cls_and_kwargs"):
            raise MisuseError("a Trainer of tandem.hf makes its own optimizer: leave out `optimizers`")
        if self._tandem.stream and isinstance(model, torch.nn.Module) and not keywords.get("peft_config"):
            self._stream(model, args)
        super().__init__(model, args, *rest, **keywords)  # type: ignore[call-arg]
        self.accelerator.clip_grad_norm_ = self._clip_by_engine
        if self._tandem.stream and not hasattr(self.model, "tandem"):  # made by the Trainer itself, of a name or with adapters
            self._stream(self.model, self.args)

    def _stream(self, model: torch.nn.Module, args: Any) -> None:
        settings, passes = self._tandem, getattr(args, "gradient_accumulation_steps", 1)
        stream(model, device_memory=settings.device_memory, host_memory=settings.host_memory, policy=settings.policy, state=settings.state,
               state_folder=settings.state_folder, recompute=settings.recompute, accumulation=passes * settings.uses,
               reserved_device_memory=settings.reserved_device_memory, device=settings.device, seed=getattr(args, "seed", 0))

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW over the engine, with weight decay where the Trainer would have it."""
        if self.optimizer is None:
            module = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(module))
            trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            args = self.args
            groups = [{"params": [p for name, p in trained if name in decayed], "weight_decay": args.weight_decay},
                      {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0}]
            groups = [group for group in groups if group["params"]]
            values: dict[str, Any] = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            self.optimizer = self._make_optimizer(module, groups, values)
        return self.optimizer

    def _make_optimizer(self, module: Any, groups: list[dict[str, Any]], values: dict[str, Any]) -> EngineOptimizer:
        settings = self._tandem
        if settings.stream:
            made: EngineOptimizer = module.tandem.optimizer(groups, **values)
            return made
        return AdamW(groups, **values, device_memory=settings.device_memory, host_memory=settings.host_memory, policy=settings.policy,
                     state=settings.state, state_folder=settings.state_folder, device=settings.device, seed=self.args.seed)

    def _engine_optimizer(self) -> EngineOptimizer:
        """The optimizer inside of what accelerate puts around it."""
        found = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(found, EngineOptimizer):
            raise MisuseError("the Trainer's optimizer is not one of tandem's: leave create_optimizer to it")
        return found

    def _clip_by_engine(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """In place of accelerate's, which rounds the norm of bf16 gradients to bf16: the engine's, of all that the optimizer
        trains. The step's gradients are complete from here on."""
        if norm_type != 2:
            raise UsageError(f"norm_type={norm_type}: the engine's norm is of type 2")
        return self._engine_optimizer().clip_by_engine(max_norm)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The engine's checkpoint into the Trainer's, piece by piece."""
        self._engine_optimizer().save(os.path.join(output_dir, _FOLDER))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "", _FOLDER)
        if checkpoint is None or not folder.is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._engine_optimizer().load(folder)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))
