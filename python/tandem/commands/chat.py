"""`tandem chat`: a conversation with the model of a run."""
from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import program
from ..finetuning import adapting, base_record, native
from ..finetuning.processes import environment
from ..finetuning.refusal import Refusal
from ..finetuning.run_state import RunFolder
from ..finetuning.settings import SETTINGS, from_toml
from .arguments import number


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"chat: {message}; tandem chat --help explains all flags", 2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tandem chat", description="Keeps a conversation with a model: a line in, an answer out. Flags that are not listed are "
                     "those of `tandem sample`.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="run of `tandem finetune` or `tandem train`, or a folder with a model")
    parser.add_argument("--adapter", metavar="DIR", type=Path, help="adapter over the model of RUN: a folder of PEFT's, a checkpoint or a run, of "
                        "`tandem finetune` its best state (default: its own)")
    parser.add_argument("--model", metavar="DIR", type=Path, help="where the base of RUN's adapter is now (default: where it was)")
    parser.add_argument("--system", metavar="TEXT", help="system message that the conversation begins with")
    parser.add_argument("--max-tokens", type=number(1, 1 << 31, int), default=1000, metavar="N", help="of an answer (default 1000)")
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.8, help="0: always the likeliest token (default 0.8)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Goes on as the program where that has the model; else returns the exit code."""
    try:
        given, others = _parser().parse_known_args(list(arguments))
        return _chat(given, others)
    except Refusal as refusal:
        print(f"tandem: error: {refusal}", file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        return 130


def _chat(given: argparse.Namespace, others: list[str]) -> int:
    run = RunFolder(given.run)
    if not run.begun:
        if given.adapter is None and given.model is None and _is_for_torch(given.run):
            return _converse(given.run, given, others)
        return _sample(given.run, given, others)
    results = [folder for folder in (run.model, run.adapter) if run.has_result(folder.name)]
    if not results:
        gone = [folder.name for folder in (run.model, run.adapter) if run.has(folder.name)]
        why = f"its folder {gone[0]} is not there any more" if gone else "its training has not ended"
        raise Refusal(f"{given.run}: {why}; give its `tandem finetune` again", 2)
    settings = from_toml((given.run / SETTINGS).read_text(encoding="utf-8"))
    if (run.stage("choices") or {}).get("engine") != "torch":
        device = [] if "--device" in others or settings["device"] == "auto" else ["--device", settings["device"]]
        return _sample(results[0], given, [*device, *others])
    return _converse(results[0], given, others)


def _is_for_torch(folder: Path) -> bool:
    """Whether it is a folder of transformers' whose model the program does not have."""
    if not (folder / "config.json").is_file() or importlib.util.find_spec("transformers") is None:
        return False
    return native.refusal_of_model(folder) is not None


def _converse(model: Path, given: argparse.Namespace, others: list[str]) -> int:
    """A conversation by PyTorch."""
    unknown = others or [flag for flag, value in (("--adapter", given.adapter), ("--model", given.model)) if value is not None]
    if unknown:
        raise Refusal(f"chat: {unknown[0]} is not known for a model that PyTorch runs; leave it out", 2)
    with_torch = importlib.import_module("tandem.finetuning.with_torch")
    with_torch.chat(model, system=given.system, max_tokens=given.max_tokens, temperature=given.temperature, stream_in=sys.stdin,
                    stream_out=sys.stdout)
    return 0


def _sample(model: Path, given: argparse.Namespace, others: list[str]) -> int:
    """Goes on as `tandem sample --chat`, where an adapter's base is what it was. Of a run's checkpoints the program sees to that."""
    file = program.path()
    named = ["--model", os.fspath(model)] if given.model is None else [os.fspath(model), "--model", os.fspath(given.model)]
    system = [] if given.system is None else ["--system", given.system]
    adapter = [] if given.adapter is None else ["--adapter", os.fspath(adapting.folder_of(given.adapter))]
    if given.adapter is not None:
        base_record.require_named(Path(adapter[1]), os.fspath(model))
    elif base_record.is_adapter(model):
        base_record.require_own(model) if given.model is None else base_record.require_named(model, os.fspath(given.model))
    os.execve(file, [os.fspath(file), "sample", *named, *adapter, "--chat", *system, "--max-tokens", str(given.max_tokens),
                     "--temperature", str(given.temperature), *others], environment())
    return 0
