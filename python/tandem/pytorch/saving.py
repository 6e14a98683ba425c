"""Saving a streamed model by its own `save_pretrained`, piece by piece: no more than one parameter of it has memory at a time."""
from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import WriteError
from .deferred_tensor import LastRead, computed
from .patches import replaced
from .stream_runtime import StreamRuntime

#: Names of types in safetensors files.
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
#: Modules that write safetensors files, by a function of their own name for it.
_WRITERS = ("transformers.modeling_utils", "peft.peft_model")
_ALIGNMENT = 8


def write_safetensors(tensors: Mapping[str, torch.Tensor], file: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file tensor by tensor, in the place of safetensors.torch.save_file; deferred ones are computed one after
    another. The file has its name when it is whole. Raises WriteError."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each is aligned
    path = Path(file)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb") as out:
            out.write(_header(tensors, order, metadata))
            for name in order:
                out.write(_bytes(computed(tensors[name])))
        os.replace(unfinished, path)
    except OSError as error:
        raise WriteError(f"save_pretrained: {path}: {error.strerror}; free some space or name another folder") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _header(tensors: Mapping[str, torch.Tensor], order: list[str], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, which is kept as long as this is."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def _deferring(runtime: StreamRuntime) -> Iterator[None]:
    """`state_dict` has deferred weights within, and writers of files take them."""
    with contextlib.ExitStack() as patched:
        patched.enter_context(replaced(runtime, "deferred", LastRead(runtime.read_weight)))
        for name in _WRITERS:
            if hasattr(sys.modules.get(name), "safe_save_file"):
                patched.enter_context(replaced(sys.modules[name], "safe_save_file", write_safetensors))
        yield


def save_in_pieces(module: torch.nn.Module, runtime: weakref.ref[StreamRuntime]) -> None:
    """Makes a module's `save_pretrained`, where it has one, read its weights as it writes them."""
    save: Callable[..., Any] | None = getattr(module, "save_pretrained", None)
    if save is None:
        return
    of = weakref.ref(module)
    kind: Any = type(module)
    function = kind.save_pretrained

    @functools.wraps(save)
    def save_pretrained(*arguments: Any, **keywords: Any) -> Any:
        found, target = runtime(), of()
        with _deferring(found) if found is not None else contextlib.nullcontext():
            return function(target, *arguments, **keywords)

    module.__dict__["save_pretrained"] = save_pretrained
