"""Parts in order into token files, with a share of the records in a file of their own for validation."""
import array
import hashlib
import json
import os
import sys

from .errors import Refusal, flush, writing
from .outputs import WRITER, is_masked


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

    def __init__(self, folder, files, code, row_length, padding):
        self._tokens_file, self._mask_file = (folder / files.built_tokens).open("wb"), (folder / files.built_mask).open("wb")
        self._code, self._row_length, self._padding = code, row_length, padding
        self.tokens = self.targets = self.records = 0

    def add(self, ids, mask, records):
        """Ids and mask of records one behind another; of one record, where it is padded to a row."""
        self.targets += sum(mask)
        self.records += records
        if self._row_length:
            missing = self._row_length - len(ids)
            ids, mask = ids + array.array("I", [self._padding]) * missing, mask + bytes(missing)
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


def add_part(folder, index, held_out, first, files, whole):
    """Adds the records of one part, the first of which has the index `first`; returns the index behind the last.
    `whole`: whether records need not be told apart."""
    ids, mask = read_array(folder / f"{index:06}.ids"), (folder / f"{index:06}.mask").read_bytes()
    lengths = read_array(folder / f"{index:06}.lengths")
    if whole:
        files[0].add(ids, mask, len(lengths))
        return first + len(lengths)
    at = 0
    for number, length in enumerate(lengths, first):
        files[number in held_out].add(ids[at:at + length], mask[at:at + length], 1)
        at += length
    return first + len(lengths)


def build(folder, count, outputs, total, layout, row_length, share, pipeline):
    """Writes all outputs into the work folder, from its parts. Returns a description of each."""
    if total["tokens"] == 0 and total["cut_off"]:
        raise Refusal(f"--row-length {row_length}: no record has a target within it, and the longest record has "
                      f"{total['uncut']} tokens; give a larger one, or shorter records")
    if total["tokens"] == 0:
        raise Refusal("no tokens: the inputs are empty, or no record has a target; give others")
    held_out = chosen_for_validation(total["records"], share)
    rows = layout == "rows"
    row_length = (row_length or max(2, total["longest"])) if rows else None
    vocabulary = max(pipeline.vocabulary, total["largest"] + 1)
    dtype, code = ("uint16", "H") if vocabulary <= 1 << 16 else ("uint32", "I")
    end = pipeline.end and pipeline.end.id
    with writing(folder):
        files = [TokenFile(folder, files, code, row_length, end or 0) for files in outputs.sets]
        try:
            first = 0
            for index in range(count):
                first = add_part(folder, index, held_out, first, files, not rows and not held_out)
        finally:
            for file in files:
                file.close(durable=True)
        descriptions = [{"written_by": WRITER, "dtype": dtype, "vocab_size": vocabulary, "end_token": end, "layout": layout,
                         **({"row_length": row_length} if rows else {}), "tokens": file.tokens, "targets": file.targets,
                         "records": file.records, "tokenizer": pipeline.file.name} for file in files]
        if share:
            descriptions[1]["validation_of"] = outputs.tokens.name
        for description, paths in zip(descriptions, outputs.sets):
            if not description["targets"]:
                raise Refusal(f"{paths.tokens.name} would have no target; give more records" +
                              (", or another --validation" if share else ""))
            flush(folder / paths.built_description, (json.dumps(description, indent=2) + "\n").encode())
    return descriptions


def masked(descriptions):
    """Whether each set has a mask."""
    return [is_masked(d["layout"], d["tokens"], d["targets"]) for d in descriptions]
