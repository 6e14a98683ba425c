"""Modules that wait for their weights while updates of the last step still run."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .held_parameters import HeldParameters


class ModuleWaits:
    """Hooks of the modules that own held parameters: before a forward they wait for the layers of the engine that they read."""

    def __init__(self, module: torch.nn.Module, parameters: HeldParameters, wait_for: Callable[[Sequence[int]], None]) -> None:
        """`wait_for` makes PyTorch's stream wait for layers, and on the host blocks until they are there."""
        self._wait_for = wait_for
        self._awaited: set[int] = set()
        layer_of = {id(held.tensor): held.layer for held in parameters.all}
        mine = weakref.ref(self)
        self._hooks: list[Any] = []
        for part in module.modules():
            layers = {layer_of[id(p)] for p in part.parameters(recurse=False) if id(p) in layer_of}
            if layers:
                self._hooks.append(part.register_forward_pre_hook(_hook(mine, layers)))
        self._hooks.append(module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _hook(mine, set(range(len(parameters.layers))))))

    def expect(self, layers: Iterable[int]) -> None:
        """Says that updates of these layers may still run."""
        self._awaited.update(layers)

    def enter(self, layers: set[int]) -> None:
        """Waits for those of these layers that are still to be awaited."""
        waiting = sorted(self._awaited & layers)
        if waiting:
            self._awaited.difference_update(waiting)
            self._wait_for(waiting)

    def settle(self) -> None:
        """Waits for all of them."""
        self.enter(self._awaited)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _hook(waits: weakref.ref[ModuleWaits], layers: set[int]) -> Callable[..., None]:
    """A hook of a module, which does not keep the optimizer alive."""
    def wait(*_: Any, **__: Any) -> None:
        present = waits()
        if present is not None:
            present.enter(layers)
    return wait
