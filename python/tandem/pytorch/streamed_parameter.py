"""Parameters whose weights are elsewhere: what modules hold between the uses of their unit."""
from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ..errors import MisuseError


class WeightStore(Protocol):
    """Holder of weights, by their names."""

    def read_weight(self, name: str) -> torch.Tensor:
        """A copy on the host, of the parameter's type and shape."""

    def write_weight(self, name: str, values: torch.Tensor) -> None:
        """Sets weights. Raises MisuseError inside a step."""


_aten = torch.ops.aten


class StreamedParameter(torch.nn.Parameter):
    """Stands for a parameter whose weights an engine holds: of its shape, type and device, without memory.

    Every use of its values raises MisuseError, so that none is ever taken for the weights; `copy_` writes them, as
    `load_state_dict` of a module does.
    """

    streamed_name: str
    streamed_store: weakref.ref[Any]

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, name: str, store: weakref.ref[Any],
                requires_grad: bool | None = None) -> StreamedParameter:
        made: StreamedParameter = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=device, requires_grad=like.requires_grad if requires_grad is None else requires_grad)
        made.streamed_name, made.streamed_store = name, store
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: all is done by __new__."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def store(self) -> WeightStore:
        """Holder of its weights. Raises MisuseError where that has gone."""
        found: WeightStore | None = self.streamed_store()
        if found is None:
            raise MisuseError(f"parameter '{self.streamed_name}': the engine that held its weights has gone")
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StreamedParameter('{self.streamed_name}', {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise MisuseError(f"parameter '{self.streamed_name}' is held by an engine: a streamed module is not copied; copy its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MisuseError(f"parameter '{self.streamed_name}' is held by an engine: a streamed module is not pickled; save its state_dict()")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:  # type: ignore[override]
        first = arguments[0] if arguments else None
        if isinstance(first, cls):
            if function is _aten.detach.default:
                return cls(first, first.device, first.streamed_name, first.streamed_store, False)
            if function is _aten.copy_.default and not isinstance(arguments[1], cls):
                first.store().write_weight(first.streamed_name, arguments[1])
                return first
        name = next((a.streamed_name for a in arguments if isinstance(a, cls)), "?")
        raise MisuseError(f"parameter '{name}' is used outside of the forward of its unit ({function}): its weights are not on the device "
                          "then; read or write them by model.tandem.gathered(name); name a module whose weights others use by resident=[...]")
