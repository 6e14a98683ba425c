"""One forward of a unit, and its backward: weights are fetched for each, and nothing of the unit is kept between them but its inputs.

Autograd records the forward as it is, so that whatever leaves the unit, by its return value or otherwise, keeps its gradient. What
its operations save for backward is not kept: it is made again, by a second forward, when backward asks for the first of it (as
Chen et al., arXiv 1604.06174), or, with `recompute="none"`, is kept but for the weights, which are fetched again.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn, Protocol

import torch

from .._core import Weights
from ..errors import MisuseError
from .unit_arguments import UnitArguments
from .units import Unit

#: Forwards that backward makes again: those of units, or none.
Recompute = Literal["units", "none"]


class PassOwner(Protocol):
    """The owner of passes: gives weights, and takes gradients. StreamRuntime says what each method does and raises."""

    device: torch.device
    recompute: Recompute

    def fetch(self, unit: Unit) -> Weights: ...
    def weights_of(self, guard: Weights) -> list[torch.Tensor]: ...
    def release(self, guard: Weights, unit: Unit) -> None: ...
    def begin_backward(self) -> None: ...
    def open(self, one: UnitPass) -> None: ...
    def closed(self, one: UnitPass) -> None: ...
    def add(self, one: UnitPass, index: int, gradient: torch.Tensor) -> None: ...
    def commit(self, one: UnitPass) -> None: ...


class Random:
    """States of PyTorch's random numbers on a device and the host, to draw the same ones again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        now = Random(self._device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.default_generator.set_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def _autocast_around() -> bool:
    """Whether the thread is within a context of autocast, enabled or not."""
    around = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    return around


@dataclasses.dataclass(frozen=True)
class Autocast:
    """Whether operations run in another type, within a context of autocast. Without autocast's cache, which would keep cast weights of
    all units."""

    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def now(kind: str) -> Autocast | None:
        """The present one, for devices of a kind; None: no context is around, and none is needed."""
        enabled = torch.is_autocast_enabled(kind)
        return Autocast(torch.get_autocast_dtype(kind), enabled) if enabled or _autocast_around() else None


def autocast_again(then: Autocast | None, now: Autocast | None, kind: str) -> contextlib.AbstractContextManager[Any]:
    """A context with the same types as then. Nothing is changed where no context of autocast is around, then and now: the cache of one
    within ends with it."""
    if then is None and now is None:
        return _UNCHANGED
    dtype, enabled = (then.dtype, then.enabled) if then is not None else (None, False)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


_UNCHANGED = contextlib.nullcontext()


@dataclasses.dataclass(eq=False)
class _WeightPart:
    """Stand-in that autograd keeps of a view of weights: which, and the view's geometry."""

    of: UnitPass
    member: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Entry(torch.autograd.Function):
    """Passes a unit's inputs through. Its backward runs when that of the unit is done: all else of the unit came later."""

    @staticmethod
    def forward(ctx: Any, of: UnitPass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.of = of
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.of.finish()
        return None, *gradients


@dataclasses.dataclass
class _Input:
    """A tensor among the arguments: without its graph, and its version, by which a change in place is seen."""

    tensor: torch.Tensor
    requires_grad: bool
    version: int


class UnitPass:
    """A forward of a unit with gradients. Lives as long as the graph that it has made."""

    def __init__(self, runtime: PassOwner, unit: Unit, call: Callable[..., Any]) -> None:
        self._runtime = runtime
        self.unit = unit
        self._call = call
        self._leaves: list[Any] = []  # weights of the use that is going on
        self._expected = 0  # gradients that may come
        self.arrived: set[int] = set()
        self._inputs: list[_Input] = []
        self._saved: list[tuple[torch.Size, torch.dtype]] = []  # shapes and types of tensors that operations save, and that are made again
        self._again: list[torch.Tensor | torch.Size | None] = []  # these, while backward needs them, as `_matching` gives them
        self._by_address: dict[int, int] = {}  # numbers of the weights of the use that is going on
        self._weights: Any = None  # guard, from the first thing that backward asks for to the end of the unit's
        self._whole: list[torch.Tensor] = []  # over its weights, where backward asks for parts of them
        self._has_entry = False

    # Forward.

    def run(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The forward, of which autograd keeps inputs alone."""
        self._arguments = UnitArguments(arguments, keywords)
        kept = self._runtime.recompute == "none"
        self._random = None if kept else Random(self._runtime.device)
        self._autocast = now = Autocast.now(self._runtime.device.type)
        tensors = self._enter(self._arguments.tensors)
        del arguments, keywords
        guard = self._begin_use()
        try:
            self._await_gradients()
            if kept:
                self._by_address = {leaf.untyped_storage().data_ptr(): i for i, leaf in reversed(list(enumerate(self._leaves)))}
            pack, unpack = (self._pack_weights, self._unpack_weights) if kept else (self._pack, self._made_again)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack), autocast_again(now, now, self._runtime.device.type):
                output = self._arguments.call(self._call, tensors)
            self._arguments.forget()
            self._leave()
            self._runtime.release(guard, self.unit)
        finally:
            self._take_weights()
        return output

    def run_without_gradients(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        guard = self._begin_use()
        try:
            output = self._call(*arguments, **keywords)
            self._leave()
            self._runtime.release(guard, self.unit)
        finally:
            self._take_weights()
        return output

    def _enter(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keeps the inputs, and gives those that require a gradient through `_Entry`."""
        tensors = list(given)
        through = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        if through:
            self._has_entry = True
            for i, tensor in zip(through, _Entry.apply(self, *(tensors[i] for i in through)), strict=True):
                tensors[i] = tensor
        if self._runtime.recompute == "units" and self._arguments.has(lambda value: hasattr(value, "get_seq_length")):
            raise MisuseError(f"unit '{self.unit.name}' is given keys and values to add to (past_key_values): a second forward would add to "
                              "them again; pass use_cache=False to the model, or stream with recompute=\"none\"")
        self._inputs = [_Input(tensor.detach(), tensor.requires_grad, tensor._version) for tensor in tensors]
        return tensors

    def _begin_use(self) -> Any:
        """Puts the unit's weights, on the device, in the places where its modules look for them."""
        guard = self._runtime.fetch(self.unit)
        self._leaves = self._put_weights(guard)
        return guard

    def _await_gradients(self) -> None:
        """Hands each gradient of the use over when backward has completed it."""
        for index, leaf in enumerate(self._leaves):
            if leaf.requires_grad:
                self._expected += 1
                leaf.register_post_accumulate_grad_hook(self._arrival(index))

    def _put_weights(self, guard: Any) -> list[Any]:
        """Leaves over the weights of a guard, in the places of the parameters."""
        leaves: list[Any] = []
        for member, whole in zip(self.unit.members, self._runtime.weights_of(guard), strict=True):
            like = member.parameter
            leaf = torch.nn.Parameter(whole if whole.shape == like.shape else whole.view(like.shape), like.requires_grad)
            leaves.append(leaf)
            member.put(leaf)
        return leaves

    def _take_weights(self) -> None:
        for member in self.unit.members:
            member.put(member.parameter)

    def _leave(self) -> None:
        """Takes the engine's memory from the leaves, which autograd keeps for their gradients."""
        for member, leaf in zip(self.unit.members, self._leaves, strict=True):
            leaf.data = member.blank_on(self._runtime.device)
        self._leaves = []
        self._by_address = {}

    # Tensors that operations save.

    def _pack(self, tensor: torch.Tensor) -> int:
        """Stand-in that autograd keeps of a tensor: its number."""
        saved = self._saved
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def _made_again(self, index: int) -> torch.Tensor:
        again = self._again or self._compute_again()
        found = again[index]
        return found if isinstance(found, torch.Tensor) else self._refuse_other(index, found)

    def _refuse_other(self, index: int, shape: torch.Size | None) -> NoReturn:
        then = f", {tuple(shape)} then" if shape is not None else ""
        raise MisuseError(f"unit '{self.unit.name}' computes something else when it is computed again (saved tensor {index}: "
                          f"{tuple(self._saved[index][0])} at first{then}): its forward must depend "
                          "on its inputs alone; pass use_cache=False to models that keep keys and values, or stream with recompute=\"none\"")

    def _matching(self, made: list[torch.Tensor]) -> list[torch.Tensor | torch.Size | None]:
        """Tensors made again, by the numbers of those saved at first: its shape where one is of another shape or type, None where there
        is none."""
        matching = [tensor if (tensor.shape, tensor.dtype) == saved else tensor.shape
                    for tensor, saved in zip(made, self._saved, strict=False)]
        return [*matching, *[None] * (len(self._saved) - len(matching))]

    def _compute_again(self) -> list[torch.Tensor | torch.Size | None]:
        """The second forward, whose graph is dropped: what its operations save is what those of the first saved."""
        for number, value in enumerate(self._inputs):
            if value.tensor._version != value.version:
                raise MisuseError(f"input {number} of unit '{self.unit.name}' was changed in place after it was given: it cannot be computed "
                                  "again; stream with recompute=\"none\"")
        assert self._random is not None
        self._runtime.begin_backward()
        kind = self._runtime.device.type
        tensors = [value.tensor.detach().requires_grad_(value.requires_grad) for value in self._inputs]
        made: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> int:
            made.append(tensor.detach())
            return len(made) - 1

        self._hold()
        self._put_weights(self._weights)
        try:
            with self._random.again(), other_buffers(self._module()), torch.enable_grad(), \
                    autocast_again(self._autocast, Autocast.now(kind), kind), torch.autograd.graph.saved_tensors_hooks(keep, made.__getitem__):
                self._arguments.call(self._call, tensors)
        finally:
            self._take_weights()
        self._again = self._matching(made)
        return self._again

    def _pack_weights(self, tensor: torch.Tensor) -> Any:
        index = self._by_address.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return tensor
        return _WeightPart(self, index, tensor.size(), tensor.stride(), tensor.storage_offset() - self._leaves[index].storage_offset())

    @staticmethod
    def _unpack_weights(kept: Any) -> torch.Tensor:
        return kept.of._part_again(kept) if isinstance(kept, _WeightPart) else kept

    def _part_again(self, part: _WeightPart) -> torch.Tensor:
        self._runtime.begin_backward()
        self._hold()
        if not self._whole:
            self._whole = self._runtime.weights_of(self._weights)
        whole = self._whole[part.member]
        return whole.as_strided(part.size, part.stride, whole.storage_offset() + part.offset)

    def _module(self) -> torch.nn.Module:
        assert self.unit.module is not None
        return self.unit.module

    def _hold(self) -> None:
        if self._weights is None:
            self._weights = self._runtime.fetch(self.unit)
            self._runtime.open(self)

    # Backward.

    def _arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        def take(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                self._runtime.begin_backward()
                self._runtime.add(self, index, gradient)
                self.arrived.add(index)
                if not self._has_entry and len(self.arrived) == self._expected:
                    self.finish()
        return take

    def finish(self) -> None:
        """Commits the gradients, and gives the weights back: backward of the unit is done."""
        self._again = []
        self._whole = []
        guard, self._weights = self._weights, None
        try:
            self._runtime.commit(self)
        finally:
            if guard is not None:
                self._runtime.release(guard, self.unit)
            self._runtime.closed(self)
            self.arrived.clear()

    def drop(self) -> None:
        """Gives everything back without a commit."""
        self._again = []
        self._whole = []
        self._weights = None
        self.arrived.clear()


@contextlib.contextmanager
def other_buffers(module: torch.nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Copies of a module's buffers, perhaps on another device, so that a forward which does not count moves no statistics."""
    held = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None]
    for part, name, buffer in held:
        part._buffers[name] = buffer.clone() if device is None else buffer.to(device, copy=True)
    try:
        yield
    finally:
        for part, name, buffer in held:
            part._buffers[name] = buffer
