"""Weights of a folder as Hugging Face writes it, read tensor by tensor into a module whose parameters have no memory."""
from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, UsageError
from .patches import environment, replaced

#: Takes the weights of a parameter, by its name in the module.
Taker = Callable[[str, torch.Tensor], None]


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that are made within have parameters without memory, on the device `meta`; their buffers are real.

    For `tandem.stream(module, source=folder)`. Not for several threads at once.
    """
    register = torch.nn.Module.register_parameter

    def without_memory(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            kind, known = type(parameter), dict(vars(parameter))
            module._parameters[name] = kind(parameter.to("meta"), parameter.requires_grad)
            vars(module._parameters[name]).update(known)

    with replaced(torch.nn.Module, "register_parameter", without_memory):
        yield


def read_weights(module: torch.nn.Module, folder: str | os.PathLike[str], take: Taker) -> None:
    """Reads every parameter and buffer of a module that the folder's safetensors files have, one tensor, or one that is made of
    several, at a time; `take` gets those of parameters, as the module has them.

    Names and forms are those of the module, or, for models of transformers, what transformers makes of the file's: parameters that
    were renamed, experts that are kept in one tensor. Raises InputError where there are no files, a parameter is missing or has
    another shape, and UsageError where safetensors is not installed.
    """
    files = _files(Path(folder))
    try:
        from safetensors import safe_open
    except ImportError:
        raise UsageError("source: safetensors is not installed; pip install 'tandem-trainer[hf]'") from None
    with contextlib.ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for file in files:
            try:
                whole = opened.enter_context(safe_open(file, framework="pt"))
            except Exception as error:
                raise InputError(f"source: {file}: {str(error).splitlines()[0]}") from None
            tensors.update({name: whole.get_slice(name) for name in whole.keys()})
        missing = _convert(module, tensors, take) if _is_of_transformers(module) else _copy(module, tensors, take)
    if missing:
        raise InputError(f"source: {folder} has no weights for {', '.join(sorted(missing)[:5])}{' and others' if len(missing) > 5 else ''}")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"source: {index} is no index of safetensors files") from None
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise InputError(f"source: {folder} has no {absent[0]}: give a folder of safetensors files, as save_pretrained writes it")
    return files


def _is_of_transformers(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _place(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    owner, _, last = name.rpartition(".")
    return module.get_submodule(owner), last


def _set(module: torch.nn.Module, name: str, values: torch.Tensor, take: Taker) -> None:
    """Gives a tensor to where it belongs."""
    owner, last = _place(module, name)
    known = owner._parameters.get(last)
    target = known if known is not None else owner._buffers.get(last)
    if target is None:
        return
    if target.shape != values.shape:
        raise InputError(f"source: '{name}' is of shape {tuple(values.shape)} in the files, and of {tuple(target.shape)} in the module")
    if known is not None:
        take(name, values)
    else:
        target.copy_(values)


def _copy(module: torch.nn.Module, tensors: dict[str, Any], take: Taker) -> set[str]:
    """Copies tensors by equal names; returns the names that are missing, ties counted once."""
    wanted = {name for name, _ in module.named_parameters()} | {name for name in module.state_dict() if name not in tensors}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    there: set[int] = set()
    for name in [*parameters, *(name for name, _ in module.named_buffers())]:
        if name in tensors:
            _set(module, name, tensors[name][...], take)
            there.add(id(parameters.get(name)))
    return {name for name in wanted if name not in tensors and id(parameters.get(name)) not in there}


def _convert(module: Any, tensors: dict[str, Any], take: Taker) -> set[str]:
    """Converts tensors as transformers itself would, one parameter at a time."""
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig
        from transformers.utils.loading_report import LoadStateDictInfo  # noqa: F401  what the conversions tell, since 5.1
    except ImportError:
        raise UsageError("source: this version of transformers has no conversions of weights; install transformers 5.1 or later") from None
    load = core_model_loading.convert_and_load_state_dict_in_model
    older: dict[str, Any] = {"tp_plan": None} if "tp_plan" in inspect.signature(load).parameters else {}

    read: set[str] = set()

    def keep(model: Any, name: str, values: Any, info: Any, *_: Any) -> None:
        info.missing_keys.discard(name)
        read.add(name)
        _set(model, name, values.detach(), take)

    conversions: Any = get_model_conversion_mapping(module)
    settings = LoadStateDictConfig(weight_mapping=conversions)
    # One after another: threads would load all at once.
    with environment("HF_DEACTIVATE_ASYNC_LOAD", "1"), replaced(core_model_loading, "set_param_for_module", keep), torch.no_grad():
        info, _ = load(model=module, state_dict=tensors, load_config=settings, **older)
    if info.conversion_errors:
        name, why = next(iter(info.conversion_errors.items()))
        raise InputError(f"source: '{name}' cannot be made of the files' tensors: {str(why).splitlines()[0]}")
    return _missing(module, read)


def _missing(module: torch.nn.Module, read: set[str]) -> set[str]:
    """Parameters of which no name was read."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {each[0] for each in names.values() if not read.intersection(each)}
