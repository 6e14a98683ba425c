"""Facts that a folder's files alone tell of a model."""
from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from .refusal import Refusal

_MOST_HEADER = 1 << 28  # bytes
_SCALES = ".weight."  # in the names of what bitsandbytes writes beside a quantized matrix
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model")


def files_of(folder: Path) -> list[Path]:
    """Files of a model's folder that a run depends on."""
    return sorted(path for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")) if path.suffix in _SUFFIXES)


def parameters_in(folder: Path) -> int:
    """Number of values in the safetensors files of a folder, tied ones counted as often as they are there. Raises Refusal."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    return sum(map(_values_in, files))


def _values_in(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MOST_HEADER:
                raise ValueError
            header = json.loads(stream.read(size))
        return sum(_values_of(tensor) for name, tensor in header.items() if name != "__metadata__" and _SCALES not in name)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        raise Refusal(f"{file}: it is no safetensors file; get it again", 4) from None


def _values_of(tensor: dict[str, Any]) -> int:
    """Values of a tensor; a byte is two codes of NF4."""
    return int(math.prod(tensor["shape"])) * (2 if tensor["dtype"] == "U8" else 1)


def architecture_of(folder: Path) -> str:
    """Name of the class of the model; its model_type where it names none."""
    config = json.loads((folder / "config.json").read_bytes())
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    return str(names[0])


def is_quantized(folder: Path) -> bool:
    """Whether the weights are in fewer bits already."""
    return bool(json.loads((folder / "config.json").read_bytes()).get("quantization_config"))
