"""One forward and backward before there is an engine, to know what activations take."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._core import Device
from ..errors import PlanError, UsageError
from .forward_hooks import hook_module, wrap_unit
from .live_bytes import LiveBytes
from .stream_runtime import StreamRuntime
from .tensors import tensor_of
from .unit_pass import Random, Recompute, other_buffers
from .units import Member, Unit

#: Uses of a unit that a dry step allows.
_MANY = 1 << 20
#: Scale of weights that stand for those which are still in files.
_SCALE = 0.02


class _Weights(dict[str, torch.Tensor]):
    """Weights of a unit by their short names, in the place of the engine's guard."""

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: Any) -> None:
        self.clear()

    def release(self, force: bool = False) -> None:
        self.clear()


class _Gradients:
    """Takes gradients, and keeps nothing."""

    def __getitem__(self, name: str) -> Any:
        return self

    def leave_out(self, name: str) -> None:
        """Nothing: no gradient is kept."""

    def commit(self) -> None:
        """Nothing: no gradient is kept."""


class _Engine:
    """An engine without memory, for a runtime. Weights are those of the parameters, or random where these have none."""

    def __init__(self, units: list[Unit], device: Device, target: torch.device) -> None:
        self.device, self.step = device, 0
        self._units = {unit.layer: unit for unit in units}
        self._target = target

    def fetch(self, layer: int, _: Any) -> _Weights:
        with _disable_current_modes(), torch.no_grad():
            return _Weights({member.short_name: self._values(member.parameter) for member in self._units[layer].members})

    def _values(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.is_meta:
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=self._target).normal_(0.0, _SCALE)
        return parameter.detach()

    def gradients(self, *_: Any) -> _Gradients:
        return _Gradients()

    def evaluation(self) -> Any:
        return contextlib.nullcontext()

    def begin_step(self, **_: Any) -> None:
        """Nothing: a runtime counts the uses of units itself."""

    def begin_micro_batch(self) -> None:
        """Nothing, likewise."""

    def abort_step(self) -> None:
        """Nothing: no state has been changed."""

    def close(self) -> None:
        """Nothing: it has no memory."""


class _Runtime(StreamRuntime):
    def weights_of(self, guard: Any) -> list[torch.Tensor]:
        return [tensor_of(weights) for weights in guard.values()]

    def _put(self, gradient: torch.Tensor, guard: Any, member: Member) -> None:
        """Drops a gradient where the engine would copy it."""


@contextlib.contextmanager
def _training(module: torch.nn.Module) -> Iterator[None]:
    """A module in training, with the modes of its parts as they were at the end."""
    modes = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class DryStep:
    """A forward and backward of a module as it will be streamed, by its units, that leaves nothing behind: neither gradients nor
    statistics, nor another state of random numbers. Units have their layers and names already."""

    def __init__(self, module: torch.nn.Module, units: list[Unit], device: Device, target: torch.device, recompute: Recompute) -> None:
        self._module = module
        self._units = units
        self._target = target
        self._recompute: Recompute = recompute
        self._engine: Any = _Engine(units, device, target)

    def bytes(self, example: Any) -> int:
        """Peak bytes of the tensors that PyTorch makes on the device for a batch, gradients of loose parameters among them, but
        not weights. Raises UsageError where the result has no gradient, PlanError where the device's memory is too small."""
        runtime = _Runtime(self._engine, self._units, self._target, self._recompute, _MANY)
        grads = [(p, p.grad) for p in self._module.parameters()]
        for parameter, _ in grads:
            parameter.grad = None
        live = LiveBytes(self._target)
        try:
            with self._wrapped(runtime), _training(self._module), Random(self._target).again(), \
                    other_buffers(self._module, self._target), torch.enable_grad(), live:
                loss = self._loss(example)
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
        except torch.OutOfMemoryError as error:
            raise PlanError("reserved_device_memory=\"auto\": the step on the example ran out of the device's memory "
                            f"({str(error).splitlines()[0]}); give a smaller batch") from None
        finally:
            runtime.close()
            for parameter, grad in grads:
                parameter.grad = grad
        return live.peak

    def _loss(self, example: Any) -> torch.Tensor:
        module: Any = self._module
        made: Any
        if isinstance(example, Mapping):
            made = module(**example)
        elif isinstance(example, tuple | list):
            made = module(*example)
        else:
            made = module(example) if isinstance(example, torch.Tensor) else example(module)
        if not isinstance(made, torch.Tensor):
            told = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", None)
            made = made[0] if told is None else told
        if not made.requires_grad:
            raise UsageError("example: what the module makes of it has no gradient; give labels, or a function of the module that returns "
                             "a loss")
        loss: torch.Tensor = made if made.dim() == 0 else made.float().mean()
        return loss

    @contextlib.contextmanager
    def _wrapped(self, runtime: StreamRuntime) -> Iterator[None]:
        parts = [unit.module for unit in self._units if unit.module is not None]
        before = [part.__dict__.get("forward") for part in parts]
        hooks = hook_module(self._module, weakref.ref(runtime))
        for unit in self._units:
            if unit.module is not None:
                wrap_unit(unit, runtime)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for part, forward in zip(parts, before, strict=True):
                part.__dict__.pop("forward", None)
                if forward is not None:
                    part.__dict__["forward"] = forward
