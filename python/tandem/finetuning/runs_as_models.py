"""Folders of runs and checkpoints, where a model is wanted: what is to be named in their place."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .refusal import Refusal
from .settings import SETTINGS, from_toml


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
