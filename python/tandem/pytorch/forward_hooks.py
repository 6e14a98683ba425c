"""Hooks at the beginning and the end of forwards of a streamed module and of its units."""
from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch

from .stream_runtime import StreamRuntime
from .unit_pass import UnitPass
from .units import Unit


def wrap_unit(unit: Unit, runtime: StreamRuntime) -> None:
    """Puts fetches around the forward of a unit."""
    assert unit.module is not None
    call = unit.module.forward

    @functools.wraps(call)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        with runtime.scope():
            one = UnitPass(runtime, unit, call)
            return one.run(arguments, keywords) if torch.is_grad_enabled() else one.run_without_gradients(arguments, keywords)

    unit.module.__dict__["forward"] = forward


def _keeps_keys(module: torch.nn.Module) -> bool:
    """Whether a model of transformers, or a part that has a configuration of its own, keeps keys and values unless told not to."""
    config = getattr(module, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    if not any(getattr(one, "use_cache", False) for one in configs):
        return False
    known = inspect.signature(module.forward).parameters
    return "use_cache" in known or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())


def hook_module(module: torch.nn.Module, runtime: weakref.ref[StreamRuntime]) -> list[Any]:
    """Tells a runtime of each forward of the whole module. Returns the hooks, to be removed."""
    return [module.register_forward_pre_hook(_enter_module(runtime), with_kwargs=True),
            module.register_forward_hook(_leave_module(runtime), always_call=True)]


def _enter_module(runtime: weakref.ref[StreamRuntime]) -> Any:
    def enter(module: torch.nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        found = runtime()
        if found is not None:
            found.enter_module()
        if torch.is_grad_enabled() and "use_cache" not in keywords and _keeps_keys(module):
            return arguments, {**keywords, "use_cache": False}  # a second forward would add to the keys and values of the first
        return None
    return enter


def _leave_module(runtime: weakref.ref[StreamRuntime]) -> Any:
    def leave(*_: Any) -> None:
        found = runtime()
        if found is not None:
            found.leave_module()
    return leave
