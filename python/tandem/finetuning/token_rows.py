"""Rows of prepared token files: their tokens, targets and documents, and the order in which training visits them."""
from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from .refusal import Refusal

#: Id in the place of a token that is no target; PyTorch's losses leave it out.
NO_TARGET = -100
_TARGET, _FIRST = 1, 2  # bits of a mask's byte
_TYPES = {"uint16": "<u2", "uint32": "<u4"}
_AT_ONCE = 1 << 24  # bytes that are hashed at once

Ints = NDArray[numpy.int64]


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens that a model is fed, and what it is to predict after each: of equal lengths, the last target last."""

    inputs: Ints
    targets: Ints


@dataclasses.dataclass(frozen=True)
class Row:
    """A row as a model is fed: all its tokens but the last. `positions` begin anew with each document. What lies behind the last
    target is left out: no target sees it."""

    inputs: Ints
    positions: Ints
    targets: Ints

    @property
    def target_count(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    def documents(self) -> Iterator[Document]:
        """The documents that have a target, each as it would be in a row of its own."""
        begins = numpy.flatnonzero(self.positions == 0)
        for begin, end in zip(begins, [*begins[1:], len(self.inputs)], strict=True):
            last = numpy.flatnonzero(self.targets[begin:end] != NO_TARGET)
            if len(last):
                cut = slice(begin, begin + last[-1] + 1)
                yield Document(self.inputs[cut], self.targets[cut])


class TokenRows:
    """The rows of a token file NAME.bin, with NAME.json and NAME.mask.bin beside it, of the layouts `rows` and `packed`."""

    def __init__(self, file: Path) -> None:
        """Raises Refusal where the files are not those of rows."""
        self.file = file
        self._mask_file = file.with_suffix(".mask.bin")
        try:
            told: dict[str, Any] = json.loads(file.with_suffix(".json").read_bytes())
            self.packed, self.row_length, self.targets = told["layout"] == "packed", int(told["row_length"]), int(told["targets"])
            self.vocabulary = int(told["vocab_size"])
            tokens = numpy.memmap(file, _TYPES[told["dtype"]], "r")
            masks = numpy.memmap(self._mask_file, numpy.uint8, "r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refusal(f"DATA {file}: cannot be read as rows of tokens ({type(error).__name__}: {error}); prepare it again by tandem prepare "
                          "--layout packed", 4) from None
        if self.row_length < 2 or len(tokens) != told.get("tokens") or len(masks) != len(tokens) or len(tokens) % self.row_length:
            raise Refusal(f"DATA {file}: it is not as long as {file.with_suffix('.json').name} says; prepare it again", 4)
        self._tokens, self._masks = tokens.reshape(-1, self.row_length), masks.reshape(-1, self.row_length)

    def __len__(self) -> int:
        return len(self._tokens)

    def row(self, index: int) -> Row:
        """A row. Raises Refusal where one of its tokens is beyond the vocabulary."""
        tokens, mask = self._tokens[index].astype(numpy.int64), self._masks[index]
        if int(tokens.max()) >= self.vocabulary:
            raise Refusal(f"DATA {self.file}: token {int(tokens.max())} in row {index}, and the vocabulary has {self.vocabulary}; prepare "
                          "it again", 4)
        starts = (mask & _FIRST) != 0 if self.packed else numpy.zeros(len(mask), bool)
        starts[0] = True
        targets = numpy.where(((mask & _TARGET) != 0) & ~starts, tokens, NO_TARGET)[1:]
        last = numpy.flatnonzero(targets != NO_TARGET)
        length = int(last[-1]) + 1 if len(last) else 1
        places = numpy.arange(length)
        positions = places - numpy.maximum.accumulate(numpy.where(starts[:length], places, 0))
        return Row(tokens[:length], positions, targets[:length])

    def digest(self) -> str:
        """Digest of tokens, masks and row length."""
        found = hashlib.blake2b(f"{self.row_length} {self.packed}".encode(), digest_size=16)
        for file in (self.file, self._mask_file):
            with file.open("rb") as opened:
                while block := opened.read(_AT_ONCE):
                    found.update(block)
        return found.hexdigest()


class Order:
    """The rows of each step: an epoch visits each row once, in an order that depends on seed and epoch alone."""

    def __init__(self, rows: int, rows_of_step: int, seed: int) -> None:
        self._rows, self._rows_of_step, self._seed = rows, rows_of_step, seed
        self._epoch, self._order = -1, numpy.zeros(0, numpy.int64)

    def rows_of(self, step: int) -> list[int]:
        """Numbers of the rows of step 1 and on."""
        first = (step - 1) * self._rows_of_step
        return [self._row(place) for place in range(first, first + self._rows_of_step)]

    def _row(self, place: int) -> int:
        epoch, within = divmod(place, self._rows)
        if epoch != self._epoch:
            random = numpy.random.Generator(numpy.random.Philox(key=[self._seed % 2**64, epoch]))
            self._epoch, self._order = epoch, random.permutation(self._rows)
        return int(self._order[within])


def groups_of(documents: list[Document], tokens: int) -> list[list[Document]]:
    """Documents in groups, the longest first, each of which takes no more than so many tokens when its documents are padded to the
    longest of them; one that is longer is a group of its own."""
    groups: list[list[Document]] = []
    for document in sorted(documents, key=lambda each: -len(each.inputs)):
        if groups and (len(groups[-1]) + 1) * len(groups[-1][0].inputs) <= tokens:
            groups[-1].append(document)
        else:
            groups.append([document])
    return groups
