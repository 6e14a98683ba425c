"""The base of an adapter: what a run notes of it, and whether a model still is what the adapter was trained over.

A folder of PEFT's names its base and says nothing of its weights. A run of `tandem finetune` keeps a hash of each tensor beside it, as a
stage of its own."""
from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import hub
from .model_facts import Tensor, tensors_in, weight_files
from .model_folder import ADAPTER_FILES, base_of, read_config
from .refusal import Refusal
from .run_state import RunFolder

_STAGE, _FIELDS = "base", ("name", "config", "tensors")
_BLOCK = 1 << 22  # bytes that are read at once
#: Keys of config.json that say nothing of what the model computes.
_APART = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def note(folder: RunFolder, base: Path, name: str) -> None:
    """Notes the base of a run, which the user has called `name`, unless that is done. Reads all weights."""
    if not folder.has(_STAGE):
        folder.finish(_STAGE, {"name": name, **_facts_of(base)})


def of_adapter(adapter: Path) -> dict[str, Any] | None:
    """Record of an adapter's base; None where the adapter is not in the folder of its run."""
    place = Path(os.path.abspath(adapter))
    run = RunFolder(place.parent)
    return run.require(_STAGE, _FIELDS) if place == run.adapter and run.begun and run.has(_STAGE) else None


def require_same(adapter: Path, base: Path, what: str) -> None:
    """Refuses another base than an adapter was trained over, as far as that is noted. `what`: "MODEL name" or the like. Reads all weights."""
    before = of_adapter(adapter)
    found = None if before is None else _difference(before, _facts_of(base))
    if before is not None and found:
        raise Refusal(f"{what}: it is not what the adapter {adapter} was trained over, {before['name']} as it was: {found}; name that, or put it back", 4)


def require_named(adapter: Path, name: str) -> None:
    """Refuses as require_same() a base that is given as a folder or by its name in the hub's cache. Passes others on, which the program
    finds or refuses."""
    base = _folder_named(name)
    if base is not None:
        require_same(adapter, base, f"MODEL {name}")


def require_own(adapter: Path) -> None:
    """Refuses an adapter whose own base has changed since, as far as it is noted and the base is there. Reads all weights."""
    name = base_of(adapter)
    base, before = _folder_named(name), of_adapter(adapter)
    found = None if before is None or base is None else _difference(before, _facts_of(base))
    if found:
        raise Refusal(f"adapter {adapter}: its base {name} has changed since it was trained: {found}; put the base back as it was, or name where it "
                      f"is: tandem chat BASE --adapter {adapter}", 4)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter as PEFT writes it, and no model."""
    return not (folder / "config.json").exists() and any((folder / name).exists() for name in ADAPTER_FILES)


def _folder_named(name: str) -> Path | None:
    """The folder that the program takes for a base of this name; None where it has none."""
    if name and Path(name).exists():
        return Path(name) if (Path(name) / "config.json").is_file() else None
    return hub.cached_snapshot(name)


def _facts_of(base: Path) -> dict[str, Any]:
    """Description and hashes of a model."""
    tensors = [tensor for file in weight_files(base) for tensor in tensors_in(file)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        hashes = dict(zip((tensor.name for tensor in tensors), threads.map(_hash, tensors)))
    config = {key: value for key, value in read_config(base / "config.json", f"MODEL {base}", frozen=True).items() if key not in _APART}
    return {"config": config, "tensors": hashes}


def _hash(tensor: Tensor) -> str:
    """Hash of a tensor's type, shape and bytes. Raises Refusal where the file ends within it."""
    digest = hashlib.sha256(json.dumps([tensor.kind, tensor.shape]).encode())
    left = tensor.end - tensor.begin
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.begin)
        while left > 0 and (block := stream.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
    if left:
        raise Refusal(f"{tensor.file}: it ends within {tensor.name}; get it again", 4)
    return digest.hexdigest()


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first difference between two models, in words; None where they are the same."""
    for name in sorted(before["tensors"].keys() | now["tensors"].keys()):
        was, value = before["tensors"].get(name), now["tensors"].get(name)
        if was != value:
            return f"it has no {name}" if value is None else f"{name} was not there" if was is None else f"{name} has other values"
    for key in sorted(before["config"].keys() | now["config"].keys()):
        was, value = before["config"].get(key), now["config"].get(key)
        if was != value:
            return f"config.json has {key} {json.dumps(value)}, and had {json.dumps(was)}"
    return None
