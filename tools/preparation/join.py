"""Parts in order into token files, with a share of the records in a file of their own for validation."""
import array
import bisect
import collections
import contextlib
import hashlib
import itertools
import json
import os
import sys

from .errors import Refusal, flush, writing
from .outputs import WRITER, is_masked
from .packing import pack

TARGET, FIRST = 1, 2  # bits of a mask's byte; a record's first token has the second one, in packed rows alone
OPEN_PARTS = 100  # files of parts that are kept open at once


def read_array(path):
    """Numbers of 32 bits in a file of a part."""
    values = array.array("I")
    values.frombytes(path.read_bytes())
    return values


def narrow(values, code):
    """Bytes of token ids, little endian, of the width that `code` has in the module array."""
    tokens = array.array(code, values)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def chosen_for_validation(records, share):
    """Indices of the records that are held out: those with the smallest hash of their index, at least one and not all.
    They depend on the number of records alone."""
    if not share:
        return set()
    if records < 2:
        raise Refusal(f"--validation {share:g}: {records} record cannot be split; give more records, or a file of its own "
                      "for validation")
    count = min(max(round(share * records), 1), records - 1)
    order = sorted(range(records), key=lambda i: hashlib.sha256(f"tandem validation {i}".encode()).digest())
    return set(order[:count])


class TokenFile:
    """One token file and its mask while they are written."""

    def __init__(self, folder, files, code, row_length, padding, packed):
        self._tokens_file, self._mask_file = (folder / files.built_tokens).open("wb"), (folder / files.built_mask).open("wb")
        self._code, self._row_length, self._padding = code, row_length, padding
        self._padding_begins = bytes([FIRST] if packed else [0])
        self.tokens = self.filled = self.targets = self.records = 0

    def add(self, ids, mask, records):
        """Ids and mask of records one behind another; of one row, where there are rows."""
        self.targets += mask.count(TARGET)
        self.records += records
        self.filled += len(ids)
        missing = self._row_length - len(ids) if self._row_length else 0
        if missing:
            ids = ids + array.array("I", [self._padding]) * missing
            mask = mask + self._padding_begins + bytes(missing - 1)
        self._tokens_file.write(narrow(ids, self._code))
        self._mask_file.write(mask)
        self.tokens += len(ids)

    def close(self, durable=False):
        """Closes both files; with `durable` they are on the disk then."""
        for file in (self._tokens_file, self._mask_file):
            if durable:
                file.flush()
                os.fsync(file.fileno())
            file.close()


def add_part(folder, index, held_out, first, files, whole, group=1):
    """Adds the records of one part, the first of which has the index `first`; returns the index behind the last.
    `whole`: whether records need not be told apart. `group`: so many of them in a row are held out together."""
    ids, mask = read_array(folder / f"{index:06}.ids"), (folder / f"{index:06}.mask").read_bytes()
    lengths = read_array(folder / f"{index:06}.lengths")
    if whole:
        files[0].add(ids, mask, len(lengths))
        return first + len(lengths)
    at = 0
    for number, length in enumerate(lengths, first):
        files[number // group in held_out].add(ids[at:at + length], mask[at:at + length], 1)
        at += length
    return first + len(lengths)


class PartRecords:
    """Records of all parts by number, read where they are asked for."""

    def __init__(self, folder, count):
        self._folder, self._open = folder, collections.OrderedDict()
        self._begins, self.lengths = array.array("Q", [0]), array.array("I")  # tokens before each part, and of each record
        for index in range(count):
            lengths = read_array(folder / f"{index:06}.lengths")
            self._begins.append(self._begins[-1] + sum(lengths))
            self.lengths.extend(lengths)
        self._offsets = array.array("Q", itertools.accumulate(self.lengths, initial=0))

    def read(self, number):
        """Ids and mask of one record."""
        part = bisect.bisect_right(self._begins, self._offsets[number]) - 1
        at, length = self._offsets[number] - self._begins[part], self.lengths[number]
        ids_file, mask_file = self._files(part)
        ids = array.array("I")
        ids.frombytes(os.pread(ids_file, length * ids.itemsize, at * ids.itemsize))
        return ids, os.pread(mask_file, length, at)

    def _files(self, part):
        if part in self._open:
            self._open.move_to_end(part)
            return self._open[part]
        if len(self._open) == OPEN_PARTS:
            self._close(self._open.popitem(last=False)[1])
        files = self._open[part] = [os.open(self._folder / f"{part:06}.{kind}", os.O_RDONLY) for kind in ("ids", "mask")]
        return files

    @staticmethod
    def _close(files):
        for file in files:
            os.close(file)

    def close(self):
        """Closes all files."""
        while self._open:
            self._close(self._open.popitem()[1])


def add_packed(records, chosen, file, row_length):
    """Adds the records with the numbers `chosen` in rows, several in each."""
    members, ends = pack(array.array("I", map(records.lengths.__getitem__, chosen)), row_length)
    begin = 0
    for end in ends:
        ids, mask = array.array("I"), bytearray()
        for member in members[begin:end]:
            more, more_mask = records.read(chosen[member])
            mask += more_mask
            mask[len(ids)] = FIRST
            ids += more
        file.add(ids, mask, end - begin)
        begin = end


def add_all_packed(folder, count, held_out, files, row_length):
    """Adds the records of all parts in rows, several in each; those that are held out in rows of their own."""
    with contextlib.closing(PartRecords(folder, count)) as records:
        for number, file in enumerate(files):
            chosen = (i for i in range(len(records.lengths)) if (i in held_out) == bool(number))
            add_packed(records, array.array("I", chosen), file, row_length)


def add_all(folder, count, held_out, files, whole, group=1):
    """Adds the records of all parts, in order; arguments as add_part has them."""
    first = 0
    for index in range(count):
        first = add_part(folder, index, held_out, first, files, whole, group)


def build(folder, count, outputs, total, layout, row_length, share, pipeline, pairs=False):
    """Writes all outputs into the work folder, from its parts. Returns of each a description, and how many of its tokens are
    those of records and no padding. `pairs`: whether two records in a row are one preference."""
    if total["tokens"] == 0 and total["cut_off"]:
        raise Refusal(f"--row-length {row_length}: no record has a target within it, and the longest record has "
                      f"{total['uncut']} tokens; give a larger one, or shorter records")
    if total["tokens"] == 0:
        raise Refusal("no tokens: the inputs are empty, or no record has a target; give others")
    group = 2 if pairs else 1
    held_out = chosen_for_validation(total["records"] // group, share)
    rows, packed = layout != "stream", layout == "packed"
    row_length = (row_length or max(2, total["longest"])) if rows else None
    vocabulary = max(pipeline.vocabulary, total["largest"] + 1)
    dtype, code = ("uint16", "H") if vocabulary <= 1 << 16 else ("uint32", "I")
    end = pipeline.end and pipeline.end.id
    with writing(folder):
        files = [TokenFile(folder, files, code, row_length, end or 0, packed) for files in outputs.sets]
        try:
            if packed:
                add_all_packed(folder, count, held_out, files, row_length)
            else:
                add_all(folder, count, held_out, files, not rows and not held_out, group)
        finally:
            for file in files:
                file.close(durable=True)
        descriptions = [{"written_by": WRITER, "dtype": dtype, "vocab_size": vocabulary, "end_token": end, "layout": layout,
                         **({"row_length": row_length} if rows else {}), **({"pairs": True} if pairs else {}), "tokens": file.tokens, "targets": file.targets,
                         "records": file.records, **({"rows": file.tokens // row_length} if packed else {}),
                         "tokenizer": pipeline.file.name} for file in files]
        if share:
            descriptions[1]["validation_of"] = outputs.tokens.name
        for description, paths in zip(descriptions, outputs.sets):
            if not description["targets"]:
                raise Refusal(f"{paths.tokens.name} would have no target; give more records" +
                              (", or another --validation" if share else ""))
            flush(folder / paths.built_description, (json.dumps(description, indent=2) + "\n").encode())
    return descriptions, [file.filled for file in files]


def masked(descriptions):
    """Whether each set has a mask."""
    return [is_masked(d["layout"], d["tokens"], d["targets"]) for d in descriptions]
