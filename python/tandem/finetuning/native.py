"""Training by tandem's own models: whether the program has this one, whether it fits, how long it takes, and the run itself."""
from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import adapting
from .model_facts import is_quantized
from .processes import ask, ask_json, run
from .refusal import Refusal
from .run_state import RunFolder, write_whole
from .settings import Settings


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Numbers of a run that follow from its data."""

    steps: int
    micro_batch: int
    accumulation: int
    lr: float
    warmup_steps: int
    evaluate_every: int
    checkpoint_every: int


def refusal_of_model(model: Path) -> str | None:
    """The reason for which the program does not have the model; None where it does. Raises Refusal for weights that cannot be read."""
    adapters = ["--lora-rank", "1"] if is_quantized(model) else []  # the only way to train such weights
    try:
        ask("plan", "--model", str(model), *adapters, "--device", "host", "--policy", "host", "--seq-len", "16", "--json")
    except Refusal as refusal:
        if refusal.code == 2:
            return str(refusal)
        if refusal.code != 3:
            raise
    return None


def machine_flags(settings: Settings) -> list[str]:
    """Flags of time, memory and the type that is computed in."""
    given = (("--device-memory", settings.device_memory), ("--host-memory", settings.host_memory), ("--state-dir", settings.state_folder),
             ("--compute", settings.compute))
    return ["--device", settings.device, "--policy", settings.policy, "--state", settings.state,
            *(word for flag, value in given if value is not None for word in (flag, str(value)))]


def check_machine(settings: Settings) -> None:
    """Refuses flags of time and memory that are wrong for each model."""
    try:
        ask("plan", "--model", "tiny-gpt2", *machine_flags(settings), "--seq-len", "16", "--json")
    except Refusal as refusal:
        if refusal.code != 3:
            raise


def plan_flags(settings: Settings, model: Path, row_length: int, micro_batch: int, accumulation: int = 1) -> list[str]:
    """Flags of a plan without data."""
    return ["--model", str(model), *adapting.flags(settings), *machine_flags(settings), "--seq-len", str(row_length - 1), "--micro-batch", str(micro_batch),
            "--grad-accum", str(accumulation)]


def plan(settings: Settings, model: Path, row_length: int, micro_batch: int, accumulation: int = 1) -> dict[str, Any]:
    """The plan of a run, as `tandem plan --json` prints it. Raises Refusal, with code 3 where it does not fit."""
    return ask_json("plan", *plan_flags(settings, model, row_length, micro_batch, accumulation))


def fitting_plan(settings: Settings, model: Path, row_length: int, micro_batch: int, accumulation: int = 2) -> dict[str, Any] | None:
    """The plan, unless told otherwise with the sums of gradients that several micro-batches have; None where it does not fit. Raises
    Refusal for another reason than memory."""
    try:
        return plan(settings, model, row_length, micro_batch, accumulation)
    except Refusal as refusal:
        if refusal.code == 3:
            return None
        raise


def fits(settings: Settings, model: Path, row_length: int, micro_batch: int, accumulation: int = 2) -> bool:
    """Whether the plan fits, as `fitting_plan` makes it."""
    return fitting_plan(settings, model, row_length, micro_batch, accumulation) is not None


def predicted_seconds(settings: Settings, model: Path, row_length: int, schedule: Schedule, say: Callable[[str], None]) -> float | None:
    """Predicted seconds of a step. Calibrates the machine, where no run has; None where that fails, which is told."""
    facts = plan(settings, model, row_length, schedule.micro_batch, schedule.accumulation)
    if not facts["predicted"]:
        say("measuring this machine once, for predictions: up to half a minute")
        try:
            ask("calibrate", "--device", settings.device)
        except Refusal as refusal:
            say(f"how long it takes is not known: {refusal}")
            return None
        facts = plan(settings, model, row_length, schedule.micro_batch, schedule.accumulation)
    return float(facts["predicted"]["step_seconds"]) if facts["predicted"] else None


def has_trained(folder: RunFolder) -> bool:
    """Whether the training has come to its end."""
    try:
        return json.loads((folder.out / "summary.json").read_bytes()).get("ended_by") in ("steps", "patience")
    except FileNotFoundError:
        return False


def train(settings: Settings, folder: RunFolder, model: Path, row_length: int, schedule: Schedule, lock: int) -> None:
    """Trains, or goes on, to the end. Raises Ended where the program has said why."""
    validation = folder.tokens.with_name("train-validation.bin")
    held_out = ["--eval-data", str(validation), "--eval-every", str(schedule.evaluate_every), "--keep-best"] if validation.is_file() else []
    patience = ["--patience", str(settings.patience)] if held_out and settings.patience else []
    run(["train", "--model", str(model), "--data", str(folder.tokens), *held_out, *patience, *adapting.flags(settings),
         *machine_flags(settings), "--out", str(folder.out),
         "--seq-len", str(row_length - 1), "--micro-batch", str(schedule.micro_batch), "--grad-accum", str(schedule.accumulation), "--steps", str(schedule.steps),
         "--lr", repr(schedule.lr), "--lr-schedule", settings.schedule, "--warmup-steps", str(schedule.warmup_steps),
         "--weight-decay", repr(settings.weight_decay), "--beta1", repr(settings.betas[0]), "--beta2", repr(settings.betas[1]),
         "--clip", repr(settings.clip), "--seed", str(settings.seed), "--checkpoint-every", str(schedule.checkpoint_every), "--keep", "1",
         *(["--resume"] if (folder.out / "config.toml").is_file() else [])], lock)


def export(folder: RunFolder, result: Path, *flags: str) -> Path:
    """Writes the best state, or the last one where none was held out, into a folder beside `result`, which it returns."""
    part = result.with_name(f".{result.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    best = ["--best"] if folder.tokens.with_name("train-validation.bin").is_file() else []
    ask("export", str(folder.out), *best, *flags, "--to", str(part))
    return part


def name_base(adapter: Path, name: str) -> None:
    """Names the base in an adapter's folder as the hub does, not by a folder of this machine's cache."""
    file = adapter / "adapter_config.json"
    write_whole(file, json.dumps({**json.loads(file.read_bytes()), "base_model_name_or_path": name}, indent=2) + "\n")


def complete_model(model: Path, template: Path | None, turn_end: int | None, base: Path | None = None) -> None:
    """Adds to a model's folder what `tandem chat` and transformers ask it by: a chat template, and the token that ends an answer. `base`: of
    an adapter, which has no config.json."""
    if template is not None:
        shutil.copyfile(template, model / template.name)
    if turn_end is None:
        return
    file = model / "generation_config.json"
    config = json.loads(file.read_bytes() if file.is_file() else ((base or model) / "config.json").read_bytes())
    ends = config.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if turn_end in known:
        return
    generation = config if file.is_file() else {"bos_token_id": config.get("bos_token_id")}
    ends = [turn_end, *known] if known else turn_end
    write_whole(file, json.dumps({**{k: v for k, v in generation.items() if v is not None}, "eos_token_id": ends}, indent=2) + "\n")


def report(folder: RunFolder) -> None:
    """Writes OUT/report.html, which replaces an earlier one. Raises Refusal."""
    ask("report", str(folder.out))
