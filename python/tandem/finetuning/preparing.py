"""Data of a run: its first records, which decide how it is packed, and the token files."""
from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from . import tools
from .processes import Ended
from .refusal import Refusal

_SAMPLE = 2000  # records
_LONG_TEXT = 1 << 16  # characters, more tokens than a row has
_PART_BYTES = 1 << 24
CHATS = ("messages", "sharegpt", "alpaca")


class Sample(NamedTuple):
    """The first records of the data, as the model will see them."""

    records: int
    complete: bool  # whether these are all
    longest: int  # tokens
    mean: float
    positions: int | None  # positions of the model
    chats: bool  # whether one of them is a chat
    texts: bool  # whether all are texts
    has_template: bool
    turn_end: int | None  # id of the special token that every answer of a chat ends with
    pairs: bool  # whether they are preferences, of two answers each


@contextmanager
def errors() -> Iterator[None]:
    """Errors of the tools as those of a command. Raises Refusal, and Ended for a signal."""
    kinds = tools.load("preparation.errors")
    try:
        yield
    except kinds.Refusal as refusal:
        raise Refusal(str(refusal), 2) from None
    except kinds.WriteFailure as failure:
        raise Refusal(str(failure), 7) from None
    except kinds.Fault as fault:
        raise Refusal(str(fault), 1) from None
    except kinds.Interrupted as interrupted:
        raise Ended(128 + interrupted.args[0]) from None


def pipeline_of(tokenizer: Path, form: str) -> Any:
    """The Pipeline of a tokenizer's folder. Raises Refusal."""
    with errors():
        return tools.load("preparation.pipeline").Pipeline(str(tokenizer), form=form)


def take_sample(pipeline: Any, data: Sequence[Path], tokens: Path) -> Sample:
    """Prepares the first records. `tokens`: the token file that is to be written. Raises Refusal."""
    inputs = tools.load("preparation.inputs")
    lengths, forms, ends, chats, records = [], set(), set(), False, 0
    with errors():
        paths, _ = tools.load("preparation.files").find_inputs(list(map(str, data)), tools.load("preparation.outputs").Outputs(tokens, True))
        complete = True
        for path in paths:  # some of each, as files may be of different formats
            found = ((place, raw) for part in inputs.parts_of([path], _PART_BYTES) for place, raw in inputs.records_of(part))
            for place, raw in itertools.islice(found, max(1, _SAMPLE // len(paths))):
                raw, times = _shortened(raw)
                records += 1
                for prepared in pipeline.prepare_all(raw, place):
                    forms.add(prepared.form)
                    chats = chats or prepared.form in CHATS or bool(prepared.roles)
                    lengths.append(round(len(prepared.encoded.ids) * times))
                    if prepared.targets:
                        ends.add(_turn_end(prepared.encoded, pipeline.tokenizer))
            complete = complete and next(found, None) is None
    if not lengths:
        raise Refusal(f"DATA {' '.join(map(str, data))}: it holds no record; name files with some", 2)
    return Sample(records, complete, max(lengths), sum(lengths) / len(lengths), pipeline.positions, chats, forms == {"text"},
                  bool(pipeline.sources), ends.pop() if len(ends) == 1 else None, "preference" in forms)


def _shortened(raw: Any) -> tuple[Any, float]:
    """A record whose text is not as long as a book, and how many times as long it was."""
    if isinstance(raw, dict) and set(raw) == {"text"} and isinstance(raw["text"], str) and len(raw["text"]) > _LONG_TEXT:
        return {"text": raw["text"][:_LONG_TEXT]}, len(raw["text"]) / _LONG_TEXT
    return raw, 1.0


def _turn_end(encoded: Any, tokenizer: Any) -> int | None:
    """The last of the targets that is a special token; None where there is none."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return next((i for i, learnt in zip(reversed(encoded.ids), reversed(encoded.mask)) if learnt and i in special), None)


def prepare(data: Sequence[Path], tokenizer: Path, tokens: Path, form: str, layout: str, row_length: int | None, validation: float) -> None:
    """Writes the token files in a layout of the tool, in parallel, and shows the first record. Goes on with the parts of a call that was
    killed. Blocks. Raises Refusal, and Ended for a signal."""
    run = tools.load("preparation.run")
    settings = run.Settings(inputs=list(map(str, data)), tokenizer=str(tokenizer), out=tokens, row_length=row_length, form=form,
                            layout=layout, validation=validation)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with errors():
            run.prepare(settings, tools.load("preparation.signals").Signals())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
