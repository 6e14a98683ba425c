"""Parameters that are on the device for a whole forward and backward: those beside units, such as a class token, and those of
resident modules, whose weights other modules read."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .held_parameters import sum_of_bits
from .taken_gradient import take_gradient
from .tensors import tensor_of
from .units import Member, Unit


class LooseParameters:
    """Parameters with memory of PyTorch's, into which the engine's weights are copied after each update. Gradients come by `.grad`."""

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.unit = unit
        for member in unit.members:
            if member.parameter.is_meta:
                made = torch.nn.Parameter(torch.zeros(member.parameter.shape, dtype=member.parameter.dtype, device=device),
                                          member.parameter.requires_grad)
                member.replace(made)
        self._step = -1  # step of the engine whose weights they have
        self._remember()
        self._gradients: dict[int, torch.Tensor] = {}
        mine = weakref.ref(self)
        self._hooks = [member.parameter.register_post_accumulate_grad_hook(_take_into(mine, index))  # type: ignore[no-untyped-call]
                       for index, member in enumerate(unit.members) if member.parameter.requires_grad]

    def is_current(self, step: int) -> bool:
        return self._step == step

    def expire(self) -> None:
        """Makes the weights out of date: the engine's have been written."""
        self._step = -1

    def set_from(self, guard: Any, step: int) -> None:
        """Copies the weights of a guard."""
        with torch.no_grad():
            for member in self.unit.members:
                member.parameter.copy_(tensor_of(guard[member.short_name]).view(member.parameter.shape))
        self._step = step
        self._remember()

    def _remember(self) -> None:
        """Notes what the parameters hold, to know what the program writes later."""
        self._versions = [member.parameter._version for member in self.unit.members]
        self._bits = [sum_of_bits(member.parameter.detach()) for member in self.unit.members]

    def written(self) -> list[Member]:
        """Members that the program has written into since."""
        return [member for member, version, bits in zip(self.unit.members, self._versions, self._bits, strict=True)
                if member.parameter._version != version or bool(sum_of_bits(member.parameter.detach()) != bits)]

    def take(self, index: int) -> None:
        gradient = take_gradient(self.unit.members[index].parameter)
        if gradient is not None:
            self._gradients[index] = gradient  # one for each backward, at whose end it is committed

    def close(self) -> None:
        """Takes no more gradients."""
        for hook in self._hooks:
            hook.remove()

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """Gradients that have come, by number of the parameter."""
        taken, self._gradients = self._gradients, {}
        return taken


def loose_bytes(units: Sequence[Unit], gradients: bool) -> int:
    """Bytes of PyTorch's that loose parameters take on the device, perhaps with their gradients."""
    parameters = [member.parameter for unit in units if unit.module is None for member in unit.members]
    return sum(p.numel() * p.element_size() * (2 if gradients and p.requires_grad else 1) for p in parameters)


def _take_into(loose: weakref.ref[LooseParameters], index: int) -> Callable[[torch.Tensor], None]:
    def take(_: torch.Tensor) -> None:
        found = loose()
        if found is not None:
            found.take(index)
    return take
