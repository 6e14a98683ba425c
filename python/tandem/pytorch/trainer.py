"""Trainers of transformers, and those that derive from them, over an engine."""
from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import MisuseError, UsageError
from .adamw import AdamW
from .engine_optimizer import EngineOptimizer
from .streaming import stream
from .unit_pass import Recompute

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
    example: Any = None
    device: str = "auto"
    #: with `stream`: modules whose parameters stay on the device; "auto": the output embeddings where the Trainer is one of TRL, whose
    #: losses read their weights
    resident: Sequence[str] | Literal["auto"] = "auto"
    reference_device_memory: int | str | None = None  #: with `stream`: ceiling of a reference model; None: the lowest possible


def _leave_out_checkpointing(args: Any, model: Any) -> None:
    """Turns off the Trainer's recomputation in backward: that of units takes its place."""
    # Older versions of TRL set it in the model.
    if any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules()):
        model.gradient_checkpointing_disable()
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # the older and the newer name
        if getattr(args, name, False):
            setattr(args, name, False)


def _refuse_reading(args: Any) -> None:
    """Refuses settings of TRL by which it reads or writes weights that are not there."""
    if getattr(args, "sync_ref_model", False):
        raise MisuseError("sync_ref_model=True copies weights into the reference model, which is streamed: leave it out, or train by "
                          "tandem.hf.Config(stream=False)")


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

    def __init__(self, *arguments: Any, tandem: Config | None = None, **keywords: Any) -> None:
        self._tandem = tandem or Config()
        given = inspect.signature(super().__init__).bind(*arguments, **keywords).arguments
        if any(given.get("optimizers") or ()) or given.get("optimizer_cls_and_kwargs"):
            raise MisuseError("a Trainer of tandem.hf makes its own optimizer: leave out `optimizers`")
        if self._tandem.stream:
            _refuse_reading(given.get("args"))
            if isinstance(given.get("ref_model"), torch.nn.Module):
                self._stream_reference(given["ref_model"])
        super().__init__(*arguments, **keywords)
        self.accelerator.clip_grad_norm_ = self._clip_by_engine

    def create_accelerator_and_postprocess(self) -> None:
        """Streams the model, which is the one that will be trained from here on, before anything moves it to the device."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if not self._tandem.stream:
            return
        if not hasattr(self.model, "tandem"):
            self._stream(self.model, self.args)
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, *rest: Any, **keywords: Any) -> Any:
            if keywords.get("evaluation_mode") and model is not self.model and not hasattr(model, "tandem"):
                self._stream_reference(model)  # made by TRL, of the model's name
            return prepare(model, *rest, **keywords)
        self.accelerator.prepare_model = prepare_model

    def _stream(self, model: torch.nn.Module, args: Any) -> None:
        settings = self._tandem
        _leave_out_checkpointing(args, model)
        stream(model, device_memory=settings.device_memory, host_memory=settings.host_memory, policy=settings.policy, state=settings.state,
               state_folder=settings.state_folder, recompute=settings.recompute, seed=args.seed, resident=self._resident(model),
               accumulation=args.gradient_accumulation_steps * settings.uses, device=settings.device,
               reserved_device_memory=settings.reserved_device_memory, example=settings.example)

    def _stream_reference(self, model: torch.nn.Module) -> None:
        """Streams a model that is not trained: weights alone, and no more of the device than a forward takes."""
        model.requires_grad_(False)
        stream(model, device_memory=self._tandem.reference_device_memory or "least", host_memory=self._tandem.host_memory,
               device=self._tandem.device, resident=self._resident(model))

    def _resident(self, model: torch.nn.Module) -> Sequence[str]:
        """Names of the modules whose parameters stay on the device."""
        named = self._tandem.resident
        if named != "auto":
            return named
        of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in type(self).__mro__)
        find = getattr(model, "get_output_embeddings", None)
        head = find() if of_trl and find is not None else None
        return [name for name, part in model.named_modules() if part is head]

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
        """Clips by the engine's norm of all that the optimizer trains, in place of accelerate's, which rounds the norm
        of bf16 gradients to bf16. The step's gradients are complete from here on."""
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
