"""AdamW of PyTorch's interface, whose masters and moments lie where a plan says."""
from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch

from .. import _core
from .._core import Device, GroupValues, OffloadEngine, OffloadOptions, Plan
from ..errors import MisuseError, PlanError, UsageError
from .engine_optimizer import EngineOptimizer
from .gradients import KeptGradients, Sink, TakenGradients
from .held_parameters import Held, HeldParameters, check_memory, check_parameter, common_device
from .module_waits import ModuleWaits
from .tensors import CurrentStream, open_device_for

#: Optimizer of each parameter that an engine holds.
_holders: Any = torch.utils.weak.WeakIdKeyDictionary()


class AdamW(EngineOptimizer):
    """torch.optim.AdamW whose fp32 masters and moments lie, and are updated, where a plan says: on the device, in host memory by
    the CPU, or streamed through the device (Loshchilov and Hutter, arXiv 1711.05101, with decay times the learning rate).

    Weights stay in the module, in memory of the engine on the module's device. bf16 weights are the rounding of fp32 masters, fp32
    weights are masters themselves. Parameter groups have their own lr, betas, eps and weight_decay, read at each step; schedulers,
    hooks, closures and `zero_grad` work as with torch's. A parameter whose gradient is None stays as it is, its moments and its
    count of steps too. A step whose gradients are not all finite changes nothing: it is counted by `skipped_steps` and told to the
    logger "tandem". What a program writes into a parameter between steps, as `load_state_dict` of a module does, is taken over by the
    next step.

    Make it after the module has its type and device. Its errors are those of tandem: MisuseError above all.
    """

    def __init__(self, params: Any, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
                 device_memory: int | str | None = None, host_memory: int | str | None = None, policy: str = "auto", state: str = "split",
                 weights: Literal["as they are", "bf16"] = "as they are", module: torch.nn.Module | None = None,
                 gradients: Literal["keep", "take"] = "keep", accumulation: int = 1, state_folder: str | os.PathLike[str] | None = None,
                 device: str | Device = "auto", seed: int = 0) -> None:
        """Takes over the parameters, books the plan's memory and copies the weights into it. Blocks.

        `device_memory`: ceiling in bytes, or a text such as "2GiB", of all that tandem takes on the device, the weights included;
        None: what is free. `host_memory`: ceiling of masters, moments and buffers in host memory. `policy`, `state`: as
        `OffloadOptions`. `weights="bf16"` keeps fp32 parameters in bf16, with masters of their present values. `module`: `step`
        returns while updates run, and the modules inside wait for their weights when they are called. `gradients="take"`: each
        gradient is taken when backward completes it and its memory freed; a step then adds up `accumulation` backward passes at
        most, and gradients are clipped by `optimizer.clip_grad_norm_`. `state_folder`: folder on a fast disk for what
        `host_memory` has no room for. `device`: "host" or "cuda:0", or one that is open already; by default that of the parameters.
        `foreach`, `fused` and `capturable` choose among programs of torch's and are ignored.

        Raises ValueError on hyperparameters out of range, PlanError where the limits are too low, MisuseError for parameters that
        cannot be held.
        """
        for name, on in (("amsgrad", amsgrad), ("maximize", maximize), ("differentiable", differentiable)):
            if on:
                raise UsageError(f"tandem.optim.AdamW has no {name}: leave it out")
        if weights not in ("as they are", "bf16"):
            raise UsageError(f"weights={weights!r}: 'as they are' or 'bf16'")
        if gradients not in ("keep", "take"):
            raise UsageError(f"gradients={gradients!r}: 'keep' or 'take'")
        if accumulation < 1 or (accumulation > 1 and gradients == "keep"):
            raise UsageError(f"accumulation={accumulation}: a number of backward passes, with gradients=\"take\" alone")
        # Any gradient may be missing from a step, so that no update of it runs ahead of the norm.
        self._options = OffloadOptions(device_memory=device_memory, host_memory=host_memory, policy=policy, state=state, seed=seed,
                                       state_folder=state_folder, max_micro_batches=accumulation, speculate="off")
        self._bf16 = weights == "bf16"
        self._takes = gradients == "take"
        self._device: str | Device = device
        self._module = module
        self._engine: OffloadEngine | None = None
        self._given: list[Held] = []  # parameters of this step's gradients
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._attach()

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Later than the constructor, it makes a new plan and moves all state there, by way of the host."""
        engine = self._engine
        if engine is None:
            super().add_param_group(param_group)
            self._check_group(self.param_groups[-1])
            return
        state = self.state_dict()["state"]
        self.close()
        try:
            super().add_param_group(param_group)
            self._check_group(self.param_groups[-1])
        finally:
            self._attach()
            self._write_state(state)

    def _held_of_groups(self) -> list[Held]:
        names = {id(p): n for n, p in self._module.named_parameters()} if self._module is not None else {}
        found: list[Held] = []
        for index, group in enumerate(self.param_groups):
            for number, parameter in enumerate(group["params"]):
                given = group["param_names"][number] if "param_names" in group else names.get(id(parameter), f"group{index}.{number}")
                if parameter.requires_grad and parameter.numel() > 0:
                    found.append(Held(parameter, given, index))
        if self._module is not None:
            order = {id(p): i for i, p in enumerate(self._module.parameters())}
            found.sort(key=lambda held: order.get(id(held.tensor), len(order)))
        return found

    # The engine.

    def _attach(self) -> None:
        """Makes plan and engine for the parameters of all groups, which need a gradient."""
        held = self._held_of_groups()
        if not held:
            raise MisuseError("no parameter requires a gradient: there is nothing to train")
        for one in held:
            check_parameter(one.tensor, one.name)
            other = _holders.get(one.tensor, lambda: None)()
            if other is not None and other._engine is not None:
                raise MisuseError(f"{one.text()} belongs to another optimizer: close() that one first, or delete it")
            one.weight = "bf16" if self._bf16 else ""
        check_memory(held)
        self._opened, _ = open_device_for(self._device, common_device((one.name, one.tensor) for one in held))
        self._parameters = HeldParameters(held)
        self._stream = CurrentStream(self._opened)
        options = self._options.replace(resident_layers=len(self._parameters.layers))
        self._engine = OffloadEngine(self._opened, self._parameters.layout, options, self._make_plan(options))
        self._parameters.move_into(self._engine)
        accumulation = self._options.max_micro_batches
        sink = Sink(self._engine, self._parameters, self._stream)
        self._source = TakenGradients(sink, accumulation, weakref.WeakMethod(self._take_writes)) if self._takes else KeptGradients(sink)
        self._waits = ModuleWaits(self._module, self._parameters, self._wait_for) if self._module is not None else None
        for one in held:
            _holders[one.tensor] = weakref.ref(self)

    def _make_plan(self, options: OffloadOptions) -> Plan:
        try:
            return _core.make_plan(self._parameters.layout, options, self._opened)
        except PlanError as error:
            needed = sum(held.tensor.numel() * (2 if held.weight == "bf16" else 4) for held in self._parameters.all)
            text = f"{error} (the weights of {needed / 2**20:.1f} MiB stay on the device: device_memory must have room for them)"
            told = PlanError(text)
            told.table, told.entries = error.table, error.entries
            raise told from None

    def _open_engine(self) -> OffloadEngine:
        if self._engine is None:
            raise MisuseError("the optimizer is closed")
        return self._engine

    def _take_writes(self) -> None:
        """Takes over what the program has written into weights, once those of the last step are there."""
        self._settle()
        self._parameters.take_writes(self._open_engine())

    def _settle(self) -> None:
        """Waits for updates that modules have not waited for yet."""
        if self._waits is not None:
            self._waits.settle()

    def _wait_for(self, layers: Sequence[int]) -> None:
        engine, stream = self._open_engine(), self._stream.get()
        for layer in layers:
            engine.wait_for_weights(layer, stream)
            self._stream.wait_on_host()
            self._parameters.remember(self._parameters.layers[layer])  # while updates of the next ones run

    def _trained(self) -> Sequence[Held]:
        return self._parameters.all

    # Steps.

    def _give_gradients(self) -> None:
        if self._takes:
            self._parameters.require_unchanged()
        else:
            self._settle()
            self._parameters.take_marked_writes(self._open_engine())
        self._given = self._source.give()

    def _values(self) -> list[GroupValues]:
        return [self._values_of(group) for group in self.param_groups]

    def _after_update(self) -> None:
        """Without `module` returns when weights are final, on a GPU for work queued from here on."""
        given, self._given = self._given, []
        self._parameters.mark_updated(given)
        layers = sorted({held.layer for held in given})
        if self._waits is not None:
            self._waits.expect(layers)
        else:
            self._wait_for(layers)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the global norm of all gradients to `max_norm`, as torch.nn.utils.clip_grad_norm_, and returns the norm before.

        With gradients="take" that is the engine's norm, and the gradients of this step are complete from here on.
        """
        if not self._takes:
            return torch.nn.utils.clip_grad_norm_([held.tensor for held in self._parameters.all], max_norm)
        return self.clip_by_engine(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties gradients; with gradients="take" those that were taken and not used yet, too."""
        if self._takes:
            self._drop_gradients()
            self._source.clear()
            set_to_none = True
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Blocks until the weights of all parameters are those of the last step; on a GPU, queues that for PyTorch's current
        stream. Needed before weights are read without a call of the modules, where the optimizer was given `module`."""
        if self._waits is not None:
            self._waits.settle()
        else:
            self._wait_for(range(len(self._parameters.layers)))

    # State.

    def _before_read(self) -> None:
        self._take_writes()

    def _after_write(self) -> None:
        self._parameters.mark_updated(self._parameters.all)
        self._wait_for(range(len(self._parameters.layers)))

    def close(self) -> None:
        """Gives the parameters memory of PyTorch's and all of the engine's memory back. The optimizer cannot be used any more."""
        engine = self._engine
        if engine is None:
            return
        self._drop_gradients()
        self._source.close()
        self._take_writes()
        if self._waits is not None:
            self._waits.close()
        self._parameters.move_out()
        self._engine = None
        engine.close()
