"""Facts that a folder's files alone tell of a model."""
from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple

from .model_folder import INDEX, WEIGHTS, shards_of
from .refusal import Refusal

_MOST_HEADER = 1 << 28  # bytes
_SCALES = ".weight."  # in the names of what bitsandbytes writes beside a quantized matrix
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model")


def files_of(folder: Path) -> list[Path]:
    """Files of a model's folder that a run depends on."""
    return sorted(path for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")) if path.suffix in _SUFFIXES)


class Tensor(NamedTuple):
    """A tensor in a safetensors file."""

    name: str
    kind: str  # "BF16", "U8" and the like
    shape: tuple[int, ...]
    file: Path
    begin: int  # byte of the file
    end: int

    @property
    def values(self) -> int:
        """Number of its values; a byte is two codes of NF4."""
        return math.prod(self.shape) * (2 if self.kind == "U8" else 1)


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files that a folder's model is read from. Raises Refusal where their index is none."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in shards_of(index, f"MODEL {folder}")]
    whole = folder / WEIGHTS
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def tensors_in(file: Path) -> list[Tensor]:
    """Tensors of a safetensors file. Raises Refusal where it is none."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MOST_HEADER:
                raise ValueError
            header = json.loads(stream.read(size))
        return [Tensor(name, str(told["dtype"]), tuple(map(int, told["shape"])), file, *(8 + size + int(place) for place in told["data_offsets"]))
                for name, told in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        raise Refusal(f"{file}: it is no safetensors file; get it again", 4) from None


def parameters_in(folder: Path) -> int:
    """Number of values in the safetensors files of a folder, tied ones counted as often as they are there. Raises Refusal."""
    return sum(tensor.values for file in weight_files(folder) for tensor in tensors_in(file) if _SCALES not in tensor.name)


def architecture_of(folder: Path) -> str:
    """Name of the class of the model; its model_type where it names none."""
    config = json.loads((folder / "config.json").read_bytes())
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    return str(names[0])


def is_quantized(folder: Path) -> bool:
    """Whether the weights are in fewer bits already."""
    return bool(json.loads((folder / "config.json").read_bytes()).get("quantization_config"))
