"""Stand-in in `.grad` for a gradient that an engine has taken, so that nobody takes it for zero."""
from __future__ import annotations

from typing import Any

import torch

from ..errors import MisuseError


class TakenGradient(torch.Tensor):
    """Stands in `.grad` for a gradient that the engine has taken: of its shape and type, without memory. Every use is refused, but
    that of autograd, which adds the next one to it."""

    arrived: torch.Tensor | None

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> TakenGradient:
        made: TakenGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made.arrived = None
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.add_.Tensor and isinstance(arguments[0], cls) and not isinstance(arguments[1], cls):
            arguments[0].arrived = arguments[1]
            return arguments[0]
        raise MisuseError("this gradient has been taken by the engine: clip by optimizer.clip_grad_norm_, and do without a GradScaler; or "
                          "make tandem.optim.AdamW with gradients=\"keep\"")


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Takes the gradient that backward has just completed, and leaves a stand-in."""
    gradient = parameter.grad
    if isinstance(gradient, TakenGradient):
        arrived, gradient.arrived = gradient.arrived, None
        return arrived
    parameter.grad = None if gradient is None else TakenGradient(parameter)
    return gradient
