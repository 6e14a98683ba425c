"""Work in an engine while a streamed module computes: scopes, weights of units, gradients that leave."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._core import Evaluation, Gradients, OffloadEngine, Weights
from ..errors import MisuseError
from .deferred_tensor import LastRead
from .held_parameters import masters_of
from .loose_parameters import LooseParameters
from .tensors import CurrentStream, is_plain, tensor_of, tensors_of
from .unit_pass import Recompute, UnitPass
from .units import Member, Unit


class StreamRuntime:
    """Drives an engine by the forwards and backwards of a module. One thread at a time uses it, backward's threads among them."""

    def __init__(self, engine: OffloadEngine, units: list[Unit], device: torch.device, recompute: Recompute, most_passes: int) -> None:
        """`most_passes`: uses of a unit in backward, in one step."""
        self.device = device
        self._on_host = device.type == "cpu"
        self.recompute = recompute
        self.units = units
        self._engine: OffloadEngine | None = engine
        self._stream = CurrentStream(engine.device)
        self._most = most_passes
        self._passes = 0  # passes of the open step; 0: none is open
        self._committed: set[int] = set()  # layers, in this pass
        self._gave_any = False
        self._in_backward = False
        self._open: list[UnitPass] = []  # passes whose backward has begun
        self._gradients: dict[UnitPass, Gradients] = {}
        self._evaluation: Evaluation | None = None
        self._members: dict[str, tuple[Unit, Member]] = {m.name: (u, m) for u in units for m in u.members}
        self._copies: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        loose = [unit for unit in units if unit.module is None]
        self._loose = LooseParameters(loose[0], device) if loose else None
        #: Parameters that an optimizer updates, by name; None: there is none yet.
        self.updated: set[str] | None = None
        #: Stands for weights in state dicts while the model is saved.
        self.deferred: LastRead | None = None

    @property
    def engine(self) -> OffloadEngine:
        """The engine. Raises MisuseError where it is closed."""
        if self._engine is None:
            raise MisuseError("the streamed module is closed: its engine, and its weights with it, have gone")
        return self._engine

    # Scopes.

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A forward: with gradients it is part of a step, without one of an evaluation, or of the step that is open."""
        if self._passes > 0 or self._evaluation is not None:
            yield
            return
        if torch.is_grad_enabled():
            self._begin_step()
            yield
            return
        self._evaluation = self.engine.evaluation()
        self._evaluation.__enter__()
        try:
            yield
        finally:
            self._leave_evaluation()

    def _leave_evaluation(self) -> None:
        scope, self._evaluation = self._evaluation, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def require_no_step(self) -> None:
        """Raises MisuseError inside a step."""
        if self._passes > 0:
            raise MisuseError("the state is asked for inside a step: call optimizer.step() or zero_grad() first")

    def _begin_step(self) -> None:
        self.engine.begin_step(micro_batches=self._most, open_ended=self._most > 1, absent="skip", decides_at_end=True)
        self._passes = 1
        self._committed.clear()
        self._gave_any = False
        self._in_backward = False

    def enter_module(self) -> None:
        """A forward of the whole module begins."""
        self.take_writes()
        self.refresh_loose()

    def refresh_loose(self) -> None:
        """Copies the newest weights into loose parameters."""
        if self._loose is not None and not self._loose.is_current(self.engine.step):
            with torch.no_grad(), self.scope(), self.fetch(self._loose.unit) as guard:
                self._loose.set_from(guard, self.engine.step)

    def leave_module(self) -> None:
        """A forward of the whole module has ended, perhaps by an exception."""
        self._leave_evaluation()

    # Weights.

    def fetch(self, unit: Unit) -> Weights:
        return self.engine.fetch(unit.layer, self._stream.get())

    def weights_of(self, guard: Weights) -> list[torch.Tensor]:
        """Tensors over a unit's weights, in the order of its members, of the layout's shapes. The guard is released once they are gone."""
        return tensors_of(guard, self._on_host)

    def release(self, guard: Weights, unit: Unit) -> None:
        """Gives weights back. Raises MisuseError where something still refers to them."""
        try:
            guard.release()
        except MisuseError as error:
            guard.release(force=True)
            raise MisuseError(f"unit '{unit.name}' keeps its weights beyond its use ({error}): it returns or stores them, or an autograd "
                              "function of it stores them otherwise than by save_for_backward; it cannot be streamed") from None

    def take_writes(self) -> None:
        """Gives the engine what the program has written into loose parameters. Raises MisuseError inside a step."""
        if self._loose is not None:
            for member in self._loose.written():
                self.write_weight(member.name, member.parameter)

    def read_weight(self, name: str) -> torch.Tensor:
        """A copy on the host."""
        self.take_writes()
        known = self._copies.get(name)
        if known is not None:
            return known
        unit, member = self._members[name]
        with torch.no_grad(), self.scope(), self.fetch(unit) as guard:
            copy = tensor_of(guard[member.short_name]).view(member.parameter.shape).cpu().clone()
        self._copies[name] = copy
        return copy

    def state_of(self, name: str) -> torch.Tensor:
        """Value in a state dict: a copy on the host; while the model is saved, a tensor that is read when written."""
        return self.read_weight(name) if self.deferred is None else self.deferred.defer(self._members[name][1].parameter, name)

    def write_weight(self, name: str, values: torch.Tensor) -> None:
        """Sets weights; masters keep the bits below theirs (`masters_of`). Raises MisuseError inside a step."""
        if self._passes > 0:
            raise MisuseError(f"parameter '{name}' is written inside a step: do it between optimizer.step() and the next forward")
        unit, member = self._members[name]
        if values.shape != member.parameter.shape:
            raise MisuseError(f"parameter '{name}' is of shape {tuple(member.parameter.shape)}, and what is written of {tuple(values.shape)}")
        written = values.detach().to("cpu", member.parameter.dtype).contiguous()
        self.engine.write(member.full_name, masters_of(written, self.engine.read(member.full_name)))
        self._copies.pop(name, None)
        if self._loose is not None and unit is self._loose.unit:
            self._loose.expire()

    def forget_copies(self) -> None:
        """Copies that read_weight gave are of older weights."""
        self._copies.clear()

    def after_update(self) -> None:
        """Updates have begun: whatever shows weights shows the new ones."""
        self.forget_copies()
        self.refresh_loose()

    def name_of(self, parameter: torch.nn.Parameter) -> str | None:
        """Name by which its weights are read and written; None: it is none of the units'."""
        return next((m.name for u in self.units for m in u.members if m.parameter is parameter), None)

    def expire(self) -> None:
        """All weights have been written."""
        self.forget_copies()
        if self._loose is not None:
            self._loose.expire()

    # Backward.

    def begin_backward(self) -> None:
        """Called in backward: sees to it that what is open at its end is committed."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        for one in list(reversed(self._open)):
            one.finish()
        if self._loose is not None:
            self._commit_loose(self._loose)

    def open(self, one: UnitPass) -> None:
        if one not in self._open:
            self._open.append(one)

    def closed(self, one: UnitPass) -> None:
        if one in self._open:
            self._open.remove(one)

    def add(self, one: UnitPass, index: int, gradient: torch.Tensor) -> None:
        """Copies a gradient of a unit's use into the engine's buffer."""
        guard = self._gradients.get(one)
        if guard is None:
            self.open(one)
            guard = self._gradients[one] = self._begin_gradients(one.unit)
        member = one.unit.members[index]
        if not member.gradient:
            raise MisuseError(f"parameter '{member.name}' did not require a gradient when the module was streamed: stream it after unfreezing")
        if gradient.layout is not torch.strided:
            raise MisuseError(f"the gradient of parameter '{member.name}' is sparse: make it dense")
        self._put(gradient, guard, member)

    def _put(self, gradient: torch.Tensor, guard: Gradients, member: Member) -> None:
        if self._on_host and member.gradient == "bf16" and is_plain(gradient, torch.bfloat16):
            return guard.copy_in(member.short_name, gradient.data_ptr(), gradient.nbytes)
        view = guard[member.short_name]
        assert view is not None
        target = tensor_of(view).view(gradient.shape)
        if member.gradient == "f32":
            target.add_(gradient)  # tied parameters add up
        else:
            target.copy_(gradient)

    def _begin_gradients(self, unit: Unit) -> Gradients:
        if self._passes == 0:
            raise MisuseError("backward outside a step: the graph is of a forward before optimizer.step() or zero_grad()")
        if unit.layer in self._committed:
            if self._passes == self._most:
                raise MisuseError(f"unit '{unit.name}' is used in backward more than {self._most} times in a step: stream the module with "
                                  f"accumulation={2 * self._most}, or as many as the step's backward passes, times the uses of a unit in each")
            self.engine.begin_micro_batch()
            self._passes += 1
            self._committed.clear()
        return self.engine.gradients(unit.layer, self._stream.get())

    def commit(self, one: UnitPass) -> None:
        """Commits what gradients of a unit's use there are."""
        guard = self._gradients.pop(one, None)
        if guard is not None:
            self._commit(one.unit, guard, one.arrived)

    def _commit(self, unit: Unit, guard: Gradients, arrived: set[int]) -> None:
        for index, member in enumerate(unit.members):
            updated = self.updated is None or member.name in self.updated
            if member.gradient and (index not in arrived or not updated):
                guard.leave_out(member.short_name)
            elif index in arrived:
                member.mark_taken()
        guard.commit()
        self._committed.add(unit.layer)
        self._gave_any = True

    def _commit_loose(self, loose: LooseParameters) -> None:
        gradients = loose.take_gradients()
        if not gradients:
            return
        guard = self._begin_gradients(loose.unit)
        for index, gradient in gradients.items():
            if loose.unit.members[index].gradient:
                self._put(gradient, guard, loose.unit.members[index])
        self._commit(loose.unit, guard, set(gradients))

    # The end of a step.

    def end(self) -> None:
        """The step's gradients are complete. Raises MisuseError where there are none."""
        self.engine  # noqa: B018  raises where it is closed
        if self._passes == 0 or not self._gave_any:
            raise MisuseError("step: no parameter has a gradient; call backward first")
        self._passes = 0

    def drop(self) -> None:
        """Drops an open step, its gradients and what its backward holds."""
        for one in self._open:
            one.drop()
        self._open.clear()
        self._gradients.clear()
        if self._loose is not None:
            self._loose.take_gradients()
        if self._passes > 0:
            self._passes = 0
            self.engine.abort_step()

    def close(self) -> None:
        """Gives all of the engine's memory back."""
        if self._engine is not None:
            self.drop()
            if self._loose is not None:
                self._loose.close()
            engine, self._engine = self._engine, None
            engine.close()
