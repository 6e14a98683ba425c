"""Sources of an optimizer's gradients: `.grad` as it is at the step, or each one as backward completes it."""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import torch

from .._core import OffloadEngine
from ..errors import MisuseError
from .held_parameters import Held, HeldParameters, sum_of_bits
from .taken_gradient import TakenGradient, take_gradient
from .tensors import CurrentStream, tensor_of


def check_gradient(held: Held, gradient: torch.Tensor) -> None:
    """Raises MisuseError for a gradient that an engine does not add."""
    if gradient.layout is not torch.strided:
        raise MisuseError(f"the gradient of {held.text()} is sparse: make it dense, as by torch.nn.Embedding(..., sparse=False)")
    if gradient.shape != held.tensor.shape or gradient.device != held.tensor.device:
        raise MisuseError(f"the gradient of {held.text()} is of shape {tuple(gradient.shape)} on {gradient.device}")


@dataclasses.dataclass
class Sink:
    """An engine that gradients of held parameters go to, on PyTorch's stream."""

    engine: OffloadEngine
    parameters: HeldParameters
    stream: CurrentStream

    def begin(self, micro_batches: int) -> None:
        self.engine.begin_step(micro_batches=micro_batches, open_ended=micro_batches > 1, absent="skip", decides_at_end=True)

    def commit(self, layer: int, gradients: dict[Held, torch.Tensor]) -> None:
        """Copies gradients of one layer and commits them; parameters of it that are not among them have none."""
        with self.engine.gradients(layer, self.stream.get()) as guard:
            for held in self.parameters.layers[layer]:
                gradient = gradients.get(held)
                if gradient is None:
                    guard.leave_out(held.short_name)
                    continue
                view = guard[held.short_name]
                assert view is not None
                tensor_of(view).view(gradient.shape).copy_(gradient)

    def abort(self) -> None:
        self.engine.abort_step()


class KeptGradients:
    """Gradients stay in `.grad`, where others may clip and unscale them, until the step reads them."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def give(self) -> list[Held]:
        """Gives all gradients to the engine, in a step of their own; returns whose there were. What the program has written into
        weights by `.data` is found meanwhile, and taken over first. Raises MisuseError, with no step open, where there is none at
        all."""
        given: list[Held] = []
        parameters = self._sink.parameters
        for held in parameters.all:
            if held.tensor.grad is not None:
                check_gradient(held, held.tensor.grad)
                given.append(held)
        if not given:
            raise MisuseError("step: no parameter has a gradient; call backward first")
        while written := self._give_layers():
            parameters.take_written(self._sink.engine, written)
        return given

    def _give_layers(self) -> list[Held]:
        """Gives the gradients layer by layer, and reads a layer's weights while the engine takes its gradients on. Returns the
        parameters that the program has written: then no step is open."""
        parameters = self._sink.parameters
        sums: list[tuple[Held, torch.Tensor]] = []
        self._sink.begin(1)
        try:
            for layer in reversed(parameters.layers):
                gradients = {held: held.tensor.grad for held in layer if held.tensor.grad is not None}
                if gradients:
                    self._sink.commit(layer[0].layer, gradients)
                sums.extend((held, sum_of_bits(held.tensor.detach())) for held in layer)
            written = parameters.written(sums)
        except BaseException:
            self._sink.abort()
            raise
        if written:
            self._sink.abort()
        return written

    def clear(self) -> None:
        """Nothing to do: zero_grad of PyTorch's empties `.grad`."""

    def close(self) -> None:
        """Nothing to do."""


class TakenGradients:
    """Takes each gradient as backward completes it, and commits a layer of the engine when it has all of that layer."""

    def __init__(self, sink: Sink, most_passes: int, prepare: weakref.WeakMethod[Callable[[], None]]) -> None:
        """`most_passes`: backward passes that a step may add up; `prepare` is called before a step opens."""
        self._sink = sink
        self._most = most_passes
        self._prepare = prepare
        self._passes = 0  # passes of the open step; 0: none is open
        self._waiting: dict[int, dict[Held, torch.Tensor]] = {}  # by layer, until the layer is complete
        self._arrived: set[Held] = set()  # in this pass
        self._present: set[Held] = set()  # in this step
        mine = weakref.ref(self)
        self._hooks = [held.tensor.register_post_accumulate_grad_hook(_take_into(mine, i))  # type: ignore[no-untyped-call]
                       for i, held in enumerate(sink.parameters.all)]
        for held in sink.parameters.all:
            if held.tensor.grad is not None:
                raise MisuseError(f"{held.text()} has a gradient already: call zero_grad before the optimizer is made")

    def take(self, index: int) -> None:
        """Takes the gradient that backward has just completed, of a parameter by its number."""
        held = self._sink.parameters.all[index]
        gradient = take_gradient(held.tensor)
        if gradient is None:
            return
        try:
            check_gradient(held, gradient)
            self._add(held, gradient)
        except BaseException:
            self.clear()
            raise

    def _add(self, held: Held, gradient: torch.Tensor) -> None:
        if self._passes == 0:
            prepare = self._prepare()
            if prepare is None:  # the optimizer has gone
                return
            prepare()
            self._sink.begin(self._most)
            self._passes = 1
        elif held in self._arrived:
            self._begin_pass()
        self._arrived.add(held)
        self._present.add(held)
        waiting = self._waiting.setdefault(held.layer, {})
        waiting[held] = gradient
        if len(waiting) == len(self._sink.parameters.layers[held.layer]):
            self._commit(held.layer)

    def _begin_pass(self) -> None:
        if self._passes == self._most:
            raise MisuseError(f"more than {self._most} backward passes before a step: make the optimizer with accumulation={self._passes + 1} "
                              "or more; the gradients of this step are dropped")
        self._commit_rest()
        self._sink.engine.begin_micro_batch()
        self._passes += 1
        self._arrived.clear()

    def _commit(self, layer: int) -> None:
        self._sink.commit(layer, self._waiting.pop(layer))

    def _commit_rest(self) -> None:
        for layer in sorted(self._waiting, reverse=True):
            self._commit(layer)

    def give(self) -> list[Held]:
        """Ends the passes of the step, and returns whose gradients there were. Raises MisuseError where there was no backward."""
        if self._passes == 0:
            raise MisuseError("step: no parameter has a gradient; call backward first")
        try:
            self._commit_rest()
        except BaseException:
            self.clear()
            raise
        given = [held for held in self._sink.parameters.all if held in self._present]
        self._forget()
        return given

    def clear(self) -> None:
        """Drops the gradients taken so far, and with them the open step."""
        if self._passes > 0:
            self._sink.abort()
        self._forget()
        self.empty(self._sink.parameters.all)

    @staticmethod
    def empty(parameters: Iterable[Held]) -> None:
        for held in parameters:
            if isinstance(held.tensor.grad, TakenGradient):
                held.tensor.grad = None

    def _forget(self) -> None:
        self._passes = 0
        self._waiting.clear()
        self._arrived.clear()
        self._present.clear()

    def close(self) -> None:
        """Drops what was taken, and takes no more."""
        for hook in self._hooks:
            hook.remove()
        self.clear()


def _take_into(source: weakref.ref[TakenGradients], index: int) -> Callable[[torch.Tensor], None]:
    """A hook of a parameter. It keeps neither the optimizer alive nor the parameter, which keeps its hooks."""
    def take(_: torch.Tensor) -> None:
        taker = source()
        if taker is not None:
            taker.take(index)
    return take
