"""Modules of PyTorch whose weights, gradients and Adam state an engine keeps, and brings to the device unit by unit."""
from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from .. import _core
from .._core import Device, GroupValues, OffloadEngine, OffloadOptions, ParameterLayout, Plan
from ..errors import MisuseError, UsageError
from .dry_step import DryStep
from .engine_optimizer import EngineOptimizer
from .forward_hooks import hook_module, wrap_unit
from .held_parameters import DTYPES, check_parameter, common_device, layout_shape
from .loose_parameters import loose_bytes
from .saving import save_in_pieces
from .stream_runtime import StreamRuntime
from .streamed_parameter import StreamedParameter
from .tensors import open_device_for
from .unit_pass import Recompute
from .units import Unit, find_units, owners_of
from .weight_files import read_weights

_FOREIGN = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel")


def stream(module: torch.nn.Module, *, units: Sequence[str] | str = "auto", resident: Sequence[str] = (),
           device_memory: int | str | None = None, host_memory: int | str | None = None, policy: str = "auto", state: str = "split",
           recompute: Recompute = "units", accumulation: int = 1, reserved_device_memory: int | str = 0, example: Any = None,
           state_folder: str | os.PathLike[str] | None = None, device: str | Device = "auto", seed: int = 0,
           source: str | os.PathLike[str] | None = None) -> torch.nn.Module:
    """Gives the parameters of a module to an engine, and returns the module, whose forwards and backwards fetch them unit by unit.

    Weights, gradients, masters and moments lie where the plan says; each unit's weights are on the device while it computes. A
    unit is a module whose own forward is the only one to use its parameters: with "auto" the parts of module lists and what lies
    beside these, else the modules that `units` names. `resident`: names of modules whose parameters stay on the device for the whole
    forward and backward, for programs that read them outside of their module, as the losses of TRL read `lm_head.weight`; a parameter
    that is tied to one of them stays, too. `recompute="units"` keeps only the inputs of units and computes the rest again in backward;
    "none" keeps what operations save. `accumulation`: uses of a unit in backward that a step may have: backward passes of a step, times
    uses of a unit in each. `device_memory="least"`: the lowest ceiling that there is a plan for. `reserved_device_memory`: bytes of
    `device_memory` for activations and whatever else PyTorch takes but loose parameters; "auto": what the tensors of one forward and
    backward take, which are run on `example` before anything is planned: a mapping, a tuple or a tensor that the module is called with, or
    a function that is given the module and returns a loss. Other options as of tandem.optim.AdamW. `source`: folder of safetensors
    files with the weights of a module that was made within `empty_parameters()`; they are read tensor by tensor, so that there is one
    copy of the weights in all.

    The module is changed: `module.tandem` is a StreamedModule, whose `optimizer` trains it. Parameters have no memory between uses:
    `state_dict`, `load_state_dict` and `module.tandem.gathered(name)` read and write them, all other uses raise MisuseError.

    Blocks while weights are copied. Raises MisuseError for modules that cannot be streamed, PlanError where limits are too low,
    InputError where the files lack weights.
    """
    _refuse_foreign(module)
    if recompute not in ("units", "none"):
        raise UsageError(f"recompute={recompute!r}: 'units' or 'none'")
    if accumulation < 1:
        raise UsageError(f"accumulation={accumulation}: at least 1")
    if isinstance(units, str) and units != "auto":
        raise UsageError(f"units={units!r}: 'auto', or a list of names of modules")
    if isinstance(resident, str):
        raise UsageError(f"resident={resident!r}: a list of names of modules")
    if (reserved_device_memory == "auto") != (example is not None):
        raise UsageError("reserved_device_memory=\"auto\" and example=... go together: give a batch, or a function of the module that "
                         "returns a loss")
    found = find_units(module, None if isinstance(units, str) else list(units), resident)
    _refuse_compiled(module, found)
    for unit in found:
        for member in unit.members:
            check_parameter(member.parameter, member.name, empty=source is not None)
    opened, target = open_device_for(device, _target(found, source is not None))
    least = device_memory == "least"
    layout = _layout(found)
    measured = reserved_device_memory == "auto"
    # Any gradient may be missing from a step, so that no update of it runs ahead of the norm.
    options = OffloadOptions(device_memory=None if least else device_memory, host_memory=host_memory, policy=policy, state=state, seed=seed,
                             state_folder=state_folder, max_micro_batches=accumulation, speculate="off",
                             reserved_device_memory=0 if measured else reserved_device_memory)
    options.reserved_device_memory += loose_bytes(found, gradients=not measured)
    if measured:
        options.reserved_device_memory += DryStep(module, found, opened, target, recompute).bytes(example)
    if least:
        options.device_memory = _core.smallest_device_memory(layout, options) + opened.info.reserved
    plan = _core.make_plan(layout, options, opened)
    engine = OffloadEngine(opened, layout, options, plan)
    if source is None:
        members = {member.full_name: member for member in owners_of(found).values()}
        engine.initialize(lambda parameter: members[parameter.full_name].parameter.detach().contiguous().cpu())
    else:
        _fill(module, source, found, engine, target)
    runtime = StreamRuntime(engine, found, target, recompute, accumulation)
    streamed = StreamedModule(module, runtime)
    object.__setattr__(module, "tandem", streamed)
    return module


def _refuse_foreign(module: torch.nn.Module) -> None:
    for part in module.modules():
        if type(part).__name__ in _FOREIGN:
            raise MisuseError(f"the module is, or has, a {type(part).__name__}: one of the two keeps the weights; stream the module inside")
        if "tandem" in part.__dict__:
            raise MisuseError("the module, or a part of it, is streamed already: close it by module.tandem.close() first")
        if getattr(part, "gradient_checkpointing", False) is True:
            raise MisuseError("the module computes parts of itself again in backward (gradient checkpointing), as units do: turn that off "
                              "by module.gradient_checkpointing_disable() first")
        if "_hf_hook" in part.__dict__:
            raise MisuseError("the module has been dispatched by accelerate (device_map): load it without device_map")
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise MisuseError("torch.distributed has several processes: streaming is for one")


def _refuse_compiled(module: torch.nn.Module, units: list[Unit]) -> None:
    """A compiled call would take the fetches of units for a part of the program that it compiles."""
    if type(module).__name__ == "OptimizedModule":
        raise MisuseError("the module is compiled: stream the one inside (module._orig_mod), and compile its parts by torch.compile(part)")
    for name, part in [("the module", module), *((f"unit '{unit.name}'", unit.module) for unit in units if unit.module is not None)]:
        if part._compiled_call_impl is not None:
            raise MisuseError(f"{name} was compiled by its method compile(): put torch.compile(part) in its place before streaming")


def _fill(module: torch.nn.Module, source: str | os.PathLike[str], units: list[Unit], engine: OffloadEngine, target: torch.device) -> None:
    """Reads the weights of a folder into the engine, and moves buffers to where the module computes."""
    engine.initialize_pieces(lambda _, __, count: numpy.zeros(count, numpy.float32))
    owners = owners_of(units)
    names = dict(module.named_parameters(remove_duplicate=False))

    def take(name: str, values: torch.Tensor) -> None:
        member = owners[id(names[name])]
        engine.write(member.full_name, values.to(member.parameter.dtype).float().contiguous())

    try:
        read_weights(module, source, take)
    except BaseException:
        engine.close()
        raise
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(target)


def _target(units: list[Unit], empty: bool) -> torch.device | None:
    """The device that parameters are on; None where they have no memory."""
    if empty and all(member.parameter.is_meta for unit in units for member in unit.members):
        return None
    return common_device((member.name, member.parameter) for unit in units for member in unit.members)


def _layout(units: list[Unit]) -> ParameterLayout:
    """A layer for each unit; each parameter is a group of its own, so that an optimizer's groups may be any."""
    layout = ParameterLayout()
    owners = owners_of(units)
    uses = collections.Counter(id(member.parameter) for unit in units for member in unit.members)
    number = 0
    for unit in units:
        unit.layer = len(layout)
        layer = layout.add_layer(unit.name)
        for member in unit.members:
            parameter = member.parameter
            member.short_name = member.name.removeprefix(unit.name + ".")
            member.full_name = f"{unit.name}.{member.short_name}"
            weight = DTYPES[parameter.dtype]
            whole = weight == "bf16" and uses[id(parameter)] == 1
            gradient = "bf16" if whole else "f32"
            member.gradient = gradient if parameter.requires_grad else ""
            layer.add(member.short_name, layout_shape(parameter), group=number, trainable=parameter.requires_grad, weight=weight,
                      gradient=gradient)
            number += owners[id(parameter)] is member
    for unit in units:
        for member in unit.members:
            owner = owners[id(member.parameter)]
            if owner is not member:
                layout.tie(owner.full_name, member.full_name)
    return layout


class StreamedModule:
    """Type of `module.tandem`: the engine of a streamed module, and its optimizer."""

    def __init__(self, module: torch.nn.Module, runtime: StreamRuntime) -> None:
        self._module = weakref.ref(module)
        self._runtime = runtime
        self._hooks: list[Any] = []
        self._optimizer: weakref.ref[StreamOptimizer] | None = None
        self._replace_parameters()
        for unit in runtime.units:
            if unit.module is not None:
                wrap_unit(unit, runtime)
        self._watch(module)
        save_in_pieces(module, weakref.ref(runtime))

    def _replace_parameters(self) -> None:
        stands: dict[int, torch.nn.Parameter] = {}
        store = weakref.ref(self._runtime)
        for unit in self._runtime.units:
            if unit.module is None:  # they have memory, LooseParameters sees to that
                continue
            for member in unit.members:
                like = member.parameter
                stand = stands.setdefault(id(like), StreamedParameter(like, self._runtime.device, member.name, store))
                member.replace(stand)

    def _watch(self, module: torch.nn.Module) -> None:
        runtime = weakref.ref(self._runtime)
        self._hooks.extend(hook_module(module, runtime))
        owners = {id(place.owner): place.owner for unit in self._runtime.units for member in unit.members for place in member.places}
        for owner in owners.values():
            self._hooks.append(owner._register_state_dict_hook(_fill_state_dict(runtime)))  # type: ignore[no-untyped-call]

    @property
    def engine(self) -> OffloadEngine:
        """The engine, with its counters. Do not open steps of it."""
        return self._runtime.engine

    @property
    def plan(self) -> Plan:
        """Plan of the engine: the place of everything; shows as a table."""
        return self._runtime.engine.plan

    @property
    def units(self) -> list[str]:
        """Names of the units, in the order of the engine's layers."""
        return [unit.name for unit in self._runtime.units]

    @contextmanager
    def gathered(self, name: str) -> Iterator[torch.Tensor]:
        """The weights of a parameter, by its name, as a tensor on the host; what is written into it goes back at the end. Raises
        MisuseError where there is none of that name, and, where it was written, inside a step."""
        names = dict(self.named_parameters())
        if name not in names:
            raise MisuseError(f"gathered: the module has no parameter '{name}'")
        held = self._runtime.name_of(names[name])
        assert held is not None
        values = self._runtime.read_weight(held)
        version = values._version
        yield values
        if values._version != version:
            self._runtime.write_weight(held, values)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters of the module as it has them, every name of tied ones."""
        module = self._module()
        if module is None:
            raise MisuseError("the streamed module has gone")
        return module.named_parameters(remove_duplicate=False)

    def optimizer(self, params: Any = None, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                  weight_decay: float = 1e-2) -> StreamOptimizer:
        """AdamW on the state that the engine holds, of all parameters, or of those in `params`, which may be groups. One at a time."""
        known = self._optimizer() if self._optimizer is not None else None
        if known is not None:
            raise MisuseError("the module has an optimizer already: delete it first")
        module = self._module()
        if module is None:
            raise MisuseError("the streamed module has gone")
        made = StreamOptimizer(self._runtime, module.named_parameters() if params is None else params,
                               {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._optimizer = weakref.ref(made)
        return made

    def close(self) -> None:
        """Gives all of the engine's memory back. The weights go with it: take a `state_dict()` first."""
        self._runtime.close()
        for hook in self._hooks:
            hook.remove()
        module = self._module()
        for unit in self._runtime.units:
            if unit.module is not None:
                unit.module.__dict__.pop("forward", None)
        if module is not None:
            module.__dict__.pop("tandem", None)
            module.__dict__.pop("save_pretrained", None)


def _fill_state_dict(runtime: weakref.ref[StreamRuntime]) -> Any:
    def fill(owner: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        found = runtime()
        for name, parameter in owner._parameters.items():
            if parameter is None or prefix + name not in state:
                continue
            if found is None and isinstance(parameter, StreamedParameter):
                parameter.store()  # raises
            held = found.name_of(parameter) if found is not None else None
            if found is not None and held is not None:
                state[prefix + name] = found.state_of(held)
    return fill


class _Trained:
    """A trained parameter as EngineOptimizer knows it."""

    def __init__(self, tensor: torch.nn.Parameter, name: str, full_name: str) -> None:
        self.tensor, self.name, self.full_name = tensor, name, full_name


class StreamOptimizer(EngineOptimizer):
    """AdamW of a streamed module: torch.optim.AdamW's interface over the state that the engine holds. Gradients leave as backward
    completes them; clip by `clip_grad_norm_`. As tandem.optim.AdamW otherwise."""

    def __init__(self, runtime: StreamRuntime, params: Any, defaults: dict[str, Any]) -> None:
        self._runtime = runtime
        super().__init__(params, defaults)
        #: Parameters by the groups of the engine's layout.
        self._in_groups = [_Trained(member.parameter, member.name, member.full_name) for member in owners_of(runtime.units).values()]
        self._all = [one for one in self._in_groups if one.tensor.requires_grad]
        self._name_updated()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])
        if hasattr(self, "_all"):
            self._name_updated()

    def _name_updated(self) -> None:
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        known = {id(one.tensor) for one in self._all}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in known:
                    raise MisuseError("the optimizer was given a parameter that is not one of the streamed module")
        self._runtime.updated = {one.name for one in self._all if id(one.tensor) in mine}

    def _open_engine(self) -> OffloadEngine:
        return self._runtime.engine

    def _trained(self) -> Sequence[_Trained]:
        return self._all

    def _give_gradients(self) -> None:
        self._runtime.end()

    def _values(self) -> list[GroupValues]:
        values = {id(p): self._values_of(group) for group in self.param_groups for p in group["params"]}
        still = GroupValues(lr=0.0)
        return [values.get(id(one.tensor), still) for one in self._in_groups]

    def _after_update(self) -> None:
        self._runtime.after_update()

    def _after_write(self) -> None:
        self._runtime.expire()

    def _before_read(self) -> None:
        if self._norm is None:
            self._runtime.require_no_step()
            self._runtime.take_writes()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the global norm of the step's gradients, which are complete from here on, to `max_norm`; returns the norm before."""
        return self.clip_by_engine(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step has used."""
        self._drop_gradients()
        self._runtime.drop()
        super().zero_grad(set_to_none=True)
