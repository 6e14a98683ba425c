"""The command line of `tandem finetune`."""
from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..commands.arguments import number
from ..errors import Error
from . import defaults
from .adapting import BASES, folder_of
from .advice import MayFit, NotFitting
from .processes import Ended, end_by_signals
from .refusal import Refusal
from .settings import Settings
from .stages import FineTuning

_EPILOG = """
examples:
  tandem finetune meta-llama/Llama-3.2-1B-Instruct chats.jsonl --device-memory 11GiB
  tandem finetune model/ HuggingFaceH4/no_robots --out runs/helper
  tandem finetune model/ chats.jsonl --lora-rank 16 --base nf4 --out runs/adapter
  tandem finetune model/ preferences.jsonl --objective dpo --out runs/preferred
Give the same command again to go on with a run that was ended, at any stage. docs/from-a-chat-file.md explains the defaults.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"finetune: {message}; tandem finetune --help explains all flags", 2)


def _parser() -> argparse.ArgumentParser:
    many = 10**12
    parser = _Parser(prog="tandem finetune", description="From records and a model to a model that answers: prepares the data, trains, keeps "
                     "the best state, and writes a Hugging Face folder and a report.", epilog=_EPILOG,
                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or org/name of the hub, which is downloaded where it is not in the local cache")
    add("data", metavar="DATA", nargs="+", help="files and folders of chats, instructions, text or preferences (JSON lines, JSON, Parquet, Arrow), or "
        "org/name of a data set")
    add("--out", type=Path, metavar="RUN", help="folder of the run (default runs/MODEL-DATA)")
    add("--engine", choices=("auto", "native", "torch"), default="auto", help="native: tandem's own models; torch: any causal model of "
        "transformers, streamed (default auto: native where tandem has the architecture)")
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--format", choices=("auto", "sharegpt", "alpaca", "messages", "prompt", "text", "preference"), default="auto", help="of the records (default auto: by "
        "their fields)")
    add("--split", default="train", help="of a data set (default train)")
    add("--validation", type=number(0, 0.9), default=defaults.VALIDATION, metavar="SHARE", help="of the records that are held out, to find the "
        f"best state (default {defaults.VALIDATION}; 0: none)")
    add("--row-length", type=number(2, 1 << 24, int), metavar="TOKENS", help="rows that records are packed in, one more than a sequence; longer "
        f"records are cut (default {defaults.USUAL_ROW + 1}, of few records four times their mean; more where one is longer; never beyond the "
        "model's positions; with --objective dpo the longest answer with its prompt)")
    add("--revision", help="branch, tag or commit of a model of the hub (default main)")
    add("--offline", action="store_true", help="download nothing")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--lr", type=number(0, 1e3, above=True), metavar="RATE", help="peak learning rate (default 2e-5 for a billion parameters, times the root of a billion over their "
        "number, 2e-3 at most; of adapters ten times that, 2e-4 to 2e-3; with --objective dpo 1e-6, of adapters 1e-5)")
    add("--lr-schedule", dest="schedule", choices=("constant", "linear", "cosine", "wsd"), default="cosine", help="how the rate falls, to a tenth "
        "(default cosine)")
    add("--warmup", type=number(0, 1), default=defaults.WARMUP, metavar="SHARE", help="of the steps, in which the rate rises (default "
        f"{defaults.WARMUP})")
    add("--epochs", type=number(0, 1e6, above=True), default=0.0, metavar="TIMES", help="how often the data are gone through (default 15 for a thousand records or less, 2 for "
        "36,000 or more; with --objective dpo 1)")
    add("--steps", type=number(1, many, int), help="how many steps to train, in place of --epochs")
    add("--tokens-per-batch", type=number(1, many, int), metavar="TOKENS", help="tokens of a step (default: those of 128 records or pairs, or of a thirtieth of "
        "them where that is less, of 8 at least)")
    add("--micro-batch", type=number(1, many, int), metavar="ROWS", help=f"rows that are computed at once (default: {defaults.USUAL_MICRO_BATCH} tokens, less where "
        "they do not fit)")
    add("--weight-decay", type=number(0, 1e3), default=0.0, help="of AdamW (default 0)")
    add("--beta1", type=number(0, 0.999999), default=0.9, help="of AdamW (default 0.9)")
    add("--beta2", type=number(0, 0.999999), default=0.95, help="of AdamW (default 0.95)")
    add("--clip", type=number(0, 1e9), default=1.0, help="limit of the gradient norm (default 1; 0: off)")
    add("--seed", type=number(0, (1 << 63) - 1, int), default=42, help="of the order of data (default 42)")
    add("--patience", type=number(0, many, int), default=defaults.PATIENCE, metavar="EVALUATIONS", help="end the run after so many evaluations in a "
        f"row without a lower loss (default {defaults.PATIENCE}; 0: off)")
    add("--eval-every", dest="evaluate_every", type=number(1, many, int), metavar="STEPS", help="evaluate every so many steps (default: twice an epoch)")
    add("--checkpoint-every", type=number(1, many, int), metavar="STEPS", help="save every so many steps (default: as often as it evaluates)")
    add("--objective", choices=("lm", "dpo"), default="lm", help="lm learns each target; dpo which of two answers is preferred, from records with "
        "chosen and rejected (default lm)")
    add("--dpo-beta", type=number(0, 1e6, above=True), metavar="BETA", help="of --objective dpo: factor of the rewards (default 0.1)")
    add("--dpo-reference", choices=("auto", "before", "step"), help="of --objective dpo: its reference is computed before the first step, or in each "
        "step of adapters, with the same result (default auto: what is predicted to take less time)")
    add("--freeze", metavar="REGEX", help="parameters, by their names in the model's files, that are not trained, such as 'embed|layers\\.[0-7]\\.'; of "
        "tandem's own models (default: all are trained)")
    add("--compute", choices=("fp32", "bf16", "fp8"), help="type that tandem's own models compute in (default fp32 on the host device, bf16 on GPUs)")
    _add_adapters(parser)
    group = parser.add_argument_group("memory and speed; none of these changes the result but --state")
    add = group.add_argument
    add("--device", default="auto", help="auto, cuda, cuda:N or host (default auto)")
    add("--device-memory", metavar="BYTES", help="hard limit, such as 11GiB (default: what is free, less a margin)")
    add("--host-memory", metavar="BYTES", help="hard limit (default: what is free)")
    add("--state", choices=("fp32", "split", "bf16-moments", "8bit-moments"), default="fp32", help="of the optimizer: 12, 10 (the same bits), 6 or "
        "about 4 bytes a parameter (default fp32)")
    add("--state-dir", dest="state_folder", type=Path, metavar="DIR", help="folder on a fast disk for state that host memory has no room for")
    add("--policy", default="auto", help="where state lies and who updates it (default auto)")
    return parser


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    """Flags of adapters."""
    add = parser.add_argument_group("adapters, for tandem's own models; docs/adapters.md explains them").add_argument
    add("--lora-rank", type=number(1, 1 << 16, int), metavar="RANK", help="train low-rank adapters of this rank, such as 16, and not the model "
        "(default: the model)")
    add("--lora-alpha", type=number(0, 1e6, above=True), metavar="ALPHA", help="adapters count alpha / rank times (default twice the rank)")
    add("--lora-targets", metavar="NAMES|REGEX", help="linear layers that have adapters: names with commas between them, or a regular expression "
        "that whole names match (default all-linear, as of tandem train)")
    add("--lora-experts", metavar="NAMES", help="matrices of a mixture's experts that have adapters too: all, or gate_up_proj or down_proj (default "
        "none)")
    add("--lora-dropout", type=number(0, 1), metavar="SHARE", help="of the inputs of adapters that is set to zero in training (default 0)")
    add("--lora-rslora", action="store_const", const=True, help="adapters count alpha / sqrt(rank) times")
    add("--lora-modules-to-save", metavar="NAMES", help="modules whose names end so are trained whole, such as lm_head (default none)")
    add("--adapter", type=Path, metavar="DIR", help="go on from this adapter: a folder of PEFT's, a run or a checkpoint with adapters")
    add("--base", choices=BASES, help="format that the frozen model, or what --freeze leaves untrained, is kept in (default: as its files have "
        "it)")
    add("--merged", action="store_true", help="write a whole model, too, to which the adapter is added")


def _word(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(name).name.split(".")[0] if Path(name).is_file() else Path(name).name) or "model"


def _expanded(name: str | Path) -> Path:
    """A path whose `~` is the home folder. Raises Refusal."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise Refusal(f"{name}: the home folder that ~ stands for is not known; write the whole path", 2) from None


def settings_of(arguments: Sequence[str]) -> Settings:
    """The settings of a command line. Raises Refusal; ends the process after --help."""
    given = vars(_parser().parse_intermixed_args(list(arguments)))
    if given["steps"] is not None and given["epochs"]:
        raise Refusal("--steps and --epochs: both given; give one of them", 2)
    betas = given.pop("beta1"), given.pop("beta2")
    given["out"] = _expanded(given["out"] or Path("runs") / f"{_word(given['model'])}-{_word(given['data'][0])}")
    given["data"] = tuple(str(_expanded(name).absolute()) if _expanded(name).exists() else name for name in given["data"])
    if _expanded(given["model"]).exists():
        given["model"] = str(_expanded(given["model"]).absolute())
    if given["state_folder"] is not None:
        given["state_folder"] = _expanded(given["state_folder"]).absolute()
    if given["adapter"] is not None:
        given["adapter"] = folder_of(_expanded(given["adapter"]).absolute())
    if given["validation"] == 0:
        given["patience"] = 0
    return Settings(betas=betas, **given)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        end_by_signals()
        settings = settings_of(arguments)
        try:
            FineTuning(settings).run()
        except NotFitting as refusal:
            for command in refusal.commands(settings, arguments):
                print(f"would fit {command}", file=sys.stderr)
            raise
        except MayFit as refusal:
            for command in refusal.commands(arguments):
                print(f"takes less: {command}", file=sys.stderr)
            raise
    except Refusal as refusal:
        print(f"tandem: error: {refusal}", file=sys.stderr)
        return refusal.code
    except Ended as ended:
        return _ended(ended.code)
    except KeyboardInterrupt:
        return _ended(130)
    except Error as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"tandem: error: {error.filename or 'finetune'}: {error.strerror or error}; make room or give rights there, and give the command "
              "again", file=sys.stderr)
        return 7
    except MemoryError:
        print("tandem: error: finetune: too little host memory; close other programs, or give a smaller --row-length", file=sys.stderr)
        return 3
    except Exception as error:
        print(f"tandem: error: {_fault(error)}", file=sys.stderr)
        return 1
    return 0


def _fault(error: Exception) -> str:
    """An exception that no user can have caused, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"a fault of tandem itself: {type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno}); report it with this line"


def _ended(code: int) -> int:
    if code > 128:
        print("ended by a signal; the same command goes on", file=sys.stderr)
    return code
