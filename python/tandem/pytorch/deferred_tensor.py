"""Tensors that are computed when they are written: so that a program which saves a model handles all of its weights, and one at a time
takes memory."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..errors import MisuseError


class DeferredTensor(torch.Tensor):
    """Shape and type of a tensor, without memory, on the device `meta`; `compute` makes it. Operations on it are deferred likewise."""

    compute: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, compute: Callable[[], torch.Tensor]) -> DeferredTensor:
        made: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("meta"))
        made.compute = compute
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: all is done by __new__."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:  # type: ignore[override]
        if function._schema.is_mutable:
            raise MisuseError(f"weights that are being saved are changed in place ({function}): change them by model.tandem.gathered(name)")
        given = (arguments, keywords or {})
        plain, named = tree_map(lambda value: _empty(value) if isinstance(value, cls) else value, given)
        named = {name: value for name, value in named.items() if name != "device"}  # a copy to a device stays deferred
        if function is torch.ops.aten._local_scalar_dense.default:  # the value of an element
            return _call(function, given)
        outputs, form = tree_flatten(function(*plain, **named))
        return tree_unflatten([cls(output, _part_of(function, given, number)) if isinstance(output, torch.Tensor) else output
                               for number, output in enumerate(outputs)], form)


def computed(value: Any) -> Any:
    """A tensor with memory: a deferred one is computed, others are as they are."""
    return value.compute() if isinstance(value, DeferredTensor) else value


class LastRead:
    """Weights that are read when they are written to a file. The last is kept: parts of one parameter are read one after another."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        """`read` gives the values of a parameter by its name."""
        self._read_weight = read
        self._name: str | None = None
        self._values: torch.Tensor | None = None

    def defer(self, like: torch.Tensor, name: str) -> DeferredTensor:
        """Tensor that stands for the weights of a parameter."""
        meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return DeferredTensor(meta, functools.partial(self._read, name))

    def _read(self, name: str) -> torch.Tensor:
        if self._name != name or self._values is None:
            self._values = None
            self._values, self._name = self._read_weight(name), name
        return self._values


def _empty(deferred: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(deferred.shape, deferred.stride(), dtype=deferred.dtype, device="meta")


def _call(function: Any, given: tuple[Any, Any]) -> Any:
    arguments, keywords = tree_map(computed, given)
    with torch.no_grad():
        return function(*arguments, **keywords)


def _part_of(function: Any, given: tuple[Any, Any], number: int) -> Callable[[], torch.Tensor]:
    """Computes one output of an operation, by its number."""
    def compute() -> torch.Tensor:
        made: torch.Tensor = tree_flatten(_call(function, given))[0][number]
        return made
    return compute
