"""Folders of models as Hugging Face writes them: whether one can be trained, and why not."""
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .refusal import Refusal
from .settings import SETTINGS, from_toml

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
#: Files beside the weights that a model needs, or that say how it is asked.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
               "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
               "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
#: Other formats of weights, by the ends of their files' names.
_OTHER = {".gguf": "GGUF", ".bin": "PyTorch", ".pt": "PyTorch", ".pth": "PyTorch", ".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX"}
_LFS = b"version https://git-lfs"


def refuse_adapter(names: Iterable[str], what: str, base: str, place: str) -> None:
    """Refuses a model whose files are those of an adapter. `base`: the model that it belongs to, or empty; `place`: what --adapter takes."""
    names = set(names)
    found = sorted(names & set(ADAPTER_FILES))
    if found and "config.json" in names:
        raise Refusal(f"{what}: it holds a model and an adapter ({found[0]}); move the adapter to a folder of its own, and name that by --adapter "
                      "to go on from it", 2)
    if found:
        raise Refusal(f"{what}: it holds an adapter ({found[0]}){f' of {base}' if base else ''}, and no model; name {base or 'its base'} as MODEL, and "
                      f"the adapter by --adapter {place} to go on from it", 2)


def refuse_other_formats(names: Iterable[str], what: str, source: str) -> None:
    """Refuses a model that has weights, but none as safetensors. `source`: what transformers would load."""
    files = sorted(names)
    if WEIGHTS in files or INDEX in files:
        return
    for name in files:
        kind = _OTHER.get(Path(name).suffix)
        if kind is None or name == "training_args.bin" or "/" in name:
            continue
        more = f", gguf_file='{name}'" if kind == "GGUF" else ""
        raise Refusal(f"{what}: its weights are in another format ({name}: {kind}); make safetensors of it: python -c \"from transformers import "
                      f"AutoModelForCausalLM as M; M.from_pretrained('{source}'{more}).save_pretrained('{Path(source).name}-safetensors')\"", 4)
    raise Refusal(f"{what}: it has no {WEIGHTS} and no {INDEX}; name a model with weights", 4)


def read_config(file: Path, what: str, frozen: bool = False) -> dict[str, Any]:
    """The description of a model. Raises Refusal where it is none, or of quantized weights, unless they stay `frozen`."""
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Refusal(f"{what}: {file} cannot be read ({error}); get it again", 2) from None
    if not isinstance(config, dict):
        raise Refusal(f"{what}: {file} describes no model; get it again", 2)
    quantized = config.get("quantization_config")
    if quantized and not frozen:
        told = quantized if isinstance(quantized, dict) else {}
        method = told.get("quant_method")
        is_base = method == "bitsandbytes" and told.get("bnb_4bit_quant_type") == "nf4"
        raise Refusal(f"{what}: its weights are quantized{f' ({method})' if method else ''}, which cannot be trained; name the model that it was "
                      f"made of{', or train adapters over it: --lora-rank 16' if is_base else ''}", 4)
    return config


def shards_of(index: Path, what: str) -> list[str]:
    """Files that an index names."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Refusal(f"{what}: {index} is no index of safetensors files; get it again", 4) from None
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise Refusal(f"{what}: {index} names no files of its own folder; get it again", 4)
    return names


def base_of(folder: Path) -> str:
    """Base model in an adapter's description, as far as it can be read."""
    try:
        base = json.loads((folder / ADAPTER_FILES[0]).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return base if isinstance(base, str) else ""


def weights_in(folder: Path, what: str) -> list[Path]:
    """Files of weights. Raises Refusal where one is missing or stands for one that is elsewhere."""
    names = shards_of(folder / INDEX, what) if (folder / INDEX).is_file() else [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise Refusal(f"{what}: {missing[0]}{f' and {len(missing) - 1} others' if len(missing) > 1 else ''} of its weights are missing; get the "
                      "model again", 4)
    for name in names:
        with (folder / name).open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise Refusal(f"{what}: {name} is a pointer of Git LFS, and no weights; git lfs pull in its folder", 4)
    return [folder / name for name in names]


def check_folder(folder: Path, what: str, frozen: bool = False) -> None:
    """Refuses a folder that holds no whole model with weights as safetensors and a tokenizer. `frozen`: whether the weights are not
    trained, and may be quantized."""
    names = [path.name for path in folder.iterdir()]
    refuse_adapter(names, what, base_of(folder), str(folder))
    if "config.json" not in names:
        refuse_run(folder, what)
        inner = f"; name {folder / 'model'}" if (folder / "model" / "config.json").is_file() else ""
        raise Refusal(f"{what}: the folder has no config.json{inner or '; name a folder that save_pretrained wrote, or one of the hub'}", 2)
    read_config(folder / "config.json", what, frozen)
    refuse_other_formats(names, what, str(folder))
    weights_in(folder, what)
    refuse_without_tokenizer(names, what, str(folder))


def refuse_without_tokenizer(names: Iterable[str], what: str, source: str) -> None:
    """Refuses a model without the tokenizer that data is prepared with."""
    if "tokenizer.json" not in names:
        raise Refusal(f"{what}: it has no tokenizer.json; put one beside its weights: python -c \"from transformers import AutoTokenizer as T; "
                      f"T.from_pretrained('{source}').save_pretrained('DIR')\"", 2)


def refuse_run(folder: Path, what: str) -> None:
    """Refuses a folder that a run or checkpoint lies in. Passes others on."""
    settings = _settings_in(folder)
    manifest = _manifest_in(folder)
    if settings is None and manifest is None:
        return
    kind = "a checkpoint" if (folder / "manifest.json").is_file() else "a run of tandem finetune" if settings else "a run of tandem train"
    adapter = (manifest or {}).get("adapter")
    base = str((settings or {}).get("model") or (adapter or {}).get("base_model_name_or_path") or "its base")
    whole = folder / "model"
    if adapter:
        also = f", or {whole} to train the whole model further" if (whole / "config.json").is_file() else ""
        raise Refusal(f"{what}: it is {kind} with an adapter of {base}, and no model; name {base} as MODEL, and the adapter by --adapter "
                      f"{folder} to go on from it{also}", 2)
    if settings is None:
        raise Refusal(f"{what}: it is {kind}; make a model of it, and name that: tandem export {folder} --to DIR", 2)
    if (whole / "config.json").is_file():
        raise Refusal(f"{what}: it is {kind}; name {whole}", 2)
    raise Refusal(f"{what}: it is {kind} that has no model yet; give its command again, and then name {whole}", 2)


def _settings_in(run: Path) -> dict[str, Any] | None:
    """Settings of a run of `tandem finetune`; None where there are none."""
    try:
        return from_toml((run / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _manifest_in(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or of a run's newest one; None where there is none."""
    newest = sorted(folder.glob("checkpoints/*/manifest.json"))[-1:]
    try:
        found = json.loads((newest or [folder / "manifest.json"])[0].read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "model_config" in found else None
