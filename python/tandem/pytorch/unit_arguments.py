"""Arguments of a unit's forward: their tensors, and how to call it with others in their places."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Place of a tensor, by its number."""

    number: int


class UnitArguments:
    """Positional and keyword arguments. `tensors` are those given as they are or within tuples, in their order.

    Lists and mappings are passed as the objects that they are, as a unit may add to them; calls after `forget` get copies of
    what they were before, without graphs. Other objects are passed as they are.
    """

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._positional = [self._taken_apart(value) for value in arguments]
        self._keywords = {name: self._taken_apart(value) for name, value in keywords.items()}
        self._before = {id(value): _without_graphs(value) for value in (*self._positional, *self._keywords.values())
                        if _is_container(value)}

    def _taken_apart(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _Tensor(len(self.tensors) - 1)
        if isinstance(value, tuple):
            return _rebuilt(value, [self._taken_apart(item) for item in value])
        return value

    def has(self, kind: Callable[[Any], bool]) -> bool:
        """Whether an argument is of a kind."""
        return any(kind(value) for value in (*self._positional, *self._keywords.values()))

    def forget(self) -> None:
        """Keeps neither `tensors` nor what the call has put into lists and mappings: they have graphs, which keep this."""
        def before(value: Any) -> Any:
            return self._before.get(id(value), value)

        self.tensors = []
        self._positional = [before(value) for value in self._positional]
        self._keywords = {name: before(value) for name, value in self._keywords.items()}
        self._before = {}

    def call(self, function: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Calls a function with these tensors."""
        def put_together(value: Any) -> Any:
            if isinstance(value, _Tensor):
                return tensors[value.number]
            if isinstance(value, tuple):
                return _rebuilt(value, [put_together(item) for item in value])
            return copy.copy(value) if not self._before and _is_container(value) else value

        return function(*map(put_together, self._positional), **{name: put_together(value) for name, value in self._keywords.items()})


def _is_container(value: Any) -> bool:
    """Whether a unit may add to it: a list, or a mapping of any class."""
    return isinstance(value, list | MutableMapping)


def _without_graphs(value: Any) -> Any:
    """A copy of a list or mapping, with its tensors detached."""
    def detached(item: Any) -> Any:
        if isinstance(item, tuple):
            return _rebuilt(item, [detached(part) for part in item])
        return item.detach() if isinstance(item, torch.Tensor) else item

    made = copy.copy(value)
    for key, item in list(value.items() if isinstance(value, MutableMapping) else enumerate(value)):
        made[key] = detached(item)
    return made


def _rebuilt(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
