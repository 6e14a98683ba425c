"""Reading of input files: compression, encodings, and records of JSON lines and JSON documents.

A part is what one worker reads at a time. Files of JSON lines that are not compressed are cut in parts that end at a line's
end, Parquet files in their row groups; every other file is one part.
"""
import contextlib
import json
import re
import sys
from collections import namedtuple

from .compression import is_compressed, opened
from .errors import Refusal
from .files import TABLES, VALUES, holds_records, stem_of
from .tables import row_groups, rows_before, table_records

# kind: "text", "lines", "document" (of JSON), "parquet" or "arrow". begin, end: bytes of the file, of "parquet" row groups; an
# end of None is the file's. size: bytes of the file, or a share of them, for the progress that is told.
Part = namedtuple("Part", "file kind begin end size")

HEAD = 1 << 12  # bytes in which a file's kind is looked for
BINARY = [  # (offset, bytes, what it is, what to do)
    (0, b"\x93NUMPY", "an array of NumPy", "token ids are trained on as they are: tandem train --data NAME.npy"),
    (0, b"MMIDIDX\0", "an index of Megatron's", "name the text that it was made of"),
    (0, b"PK\x03\x04", "a zip archive", "unpack it and name what is in it"),
    (0, b"%PDF", "a PDF", "extract its text first"),
    (0, b"\x89PNG", "an image", "leave it out; models here read text"),
    (0, b"\xff\xd8\xff", "an image", "leave it out; models here read text"),
    (0, b"GIF8", "an image", "leave it out; models here read text"),
    (8, b"WEBP", "an image", "leave it out; models here read text"),
    (0, b"PAR1", "Parquet", "name it NAME.parquet"),
    (0, b"ARROW1", "Arrow", "name it NAME.arrow"),
    (0, b"BZh", "compressed by bzip2", "unpack it first: bunzip2 FILE"),
    (0, b"\xfd7zXZ\0", "compressed by xz", "unpack it first: unxz FILE"),
    (0, b"7z\xbc\xaf", "a 7z archive", "unpack it and name what is in it"),
    (257, b"ustar", "a tar archive", "unpack it and name what is in it"),
    (0, b"GGUF", "a model in GGUF", "leave it out; it holds no text"),
    (8, b'{"', "a safetensors file", "leave it out; it holds no text"),
    (0, b"SQLite format 3", "a data base of SQLite", "export its text first"),
    (0, b"\x7fELF", "a program", "leave it out; it holds no text"),
]
WIDE = [(b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x80-\xff]")  # a text may say "GGUF" first
SPACE = re.compile(r"[ \t\r\n]*")


class Place:
    """Position of a record, as text: file and line, in a table or an array also the record. Lines before a part are counted
    only when they are asked for."""

    def __init__(self, part, line, record=None, column=None):
        self.part, self.line, self.record, self.column = part, line, record, column

    def __str__(self):
        part = self.part
        if part.kind == "text":
            return part.file
        if part.kind in ("parquet", "arrow"):
            return f"{part.file}, record {rows_before(part) + self.record}"
        line = lines_before(part) + self.line
        return f"{part.file}, line {line}" + (f" (record {self.record})" if self.record else "")


def lines_before(part):
    """Lines of a file before the part's first byte; 0 where that cannot be read again."""
    count, left = 0, part.begin
    with contextlib.suppress(OSError), open(part.file, "rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


# -- lines ----------------------------------------------------------------------------------------------------

def lines_of(stream):
    """Lines of a binary stream, with their ends; of unpacked ones too."""
    rest = []
    while block := stream.read(1 << 20):
        *whole, last = block.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest)


# -- what a file is -------------------------------------------------------------------------------------------

def refuse_binary(name, head):
    """Refuses a file whose first bytes are those of no text."""
    for mark, encoding in WIDE:
        if head.startswith(mark):
            raise Refusal(f"{name}: byte 0: text in {encoding}; convert it: iconv -f {encoding} -t UTF-8 FILE")
    for at, mark, what, advice in BINARY if head.startswith(b"%PDF-") or CONTROL.search(head) else ():
        if head[at:at + len(mark)] == mark:
            raise Refusal(f"{name}: byte {at}: {what}, no text; {advice}")
    refuse_nul(name, head, 0)


def refuse_nul(where, content, begin):
    """Refuses bytes with a NUL, by its place in the file. `begin`: bytes of the file before them."""
    at = content.find(b"\0")
    if at >= 0:
        wide = content[at + 1:at + 2] not in (b"", b"\0") and content[at + 2:at + 3] == b"\0"
        convert = "text in UTF-16 is converted by iconv -f UTF-16 -t UTF-8 FILE; else "
        advice = (convert if wide else "") + "leave it out"
        raise Refusal(f"{where}: byte {begin + at} is NUL: no text; {advice}")


def text_of(where, content, begin=0):
    """Bytes as text in UTF-8; refuses what is none, by byte. `begin`: bytes of the file before them."""
    refuse_nul(where, content, begin)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise Refusal(f"{where}: byte {begin + error.start} (0x{byte:02x}) is not UTF-8; if the text is in Latin-1, convert "
                      "it: iconv -f LATIN1 -t UTF-8 FILE") from None


def kind_of(path):
    """Kind of a file by name and first bytes, with refusals of what is read as none. No name beside a .bin ends in .idx."""
    name = str(path)
    stem = stem_of(path)
    if stem.endswith(VALUES):
        tabs = ", sep='\\t'" if stem.endswith(".tsv") else ""
        raise Refusal(f"{name}: a table of values, and records are read from JSON lines and Parquet; convert it: "
                      f"pandas.read_csv('{path.name}'{tabs}).to_json('NAME.jsonl', orient='records', lines=True)")
    if stem.endswith(".parquet"):
        return "parquet"
    if stem.endswith(TABLES):
        return "arrow"
    if stem.endswith(".bin") and path.with_suffix(".idx").exists():
        raise Refusal(f"{name}: token ids beside an index {path.with_suffix('.idx').name}, no text; name the text that "
                      "they were made of")
    with opened(name) as stream:
        head = stream.read(HEAD)
        refuse_binary(name, head)
        if not holds_records(path):
            return "text"
        head = head.removeprefix(BYTE_ORDER_MARK).lstrip()
        first, end, _ = head.partition(b"\n")
        # An array, or an object over several lines, as programs write it that indent.
        spread = stem.endswith(".json") and head[:1] == b"{" and end and not is_json(first)
        return "document" if head[:1] == b"[" or spread else "lines"


def is_json(text):
    """Whether a text is one whole value of JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def parts_of(paths, part_bytes):
    """Parts of the files, in order."""
    parts = []
    for path in paths:
        name, size, kind = str(path), path.stat().st_size, kind_of(path)
        if kind == "parquet":
            groups = row_groups(name)
            parts += [Part(name, kind, i, i + 1, size // groups) for i in range(groups)]
        elif kind != "lines" or size <= part_bytes or is_compressed(name):
            parts.append(Part(name, kind, 0, None, size))
        else:
            begin = 0
            with opened(name) as file:
                while begin < size:
                    file.seek(min(begin + part_bytes, size))
                    file.readline()
                    end = file.tell()
                    parts.append(Part(name, kind, begin, end, end - begin))
                    begin = end
    return parts


# -- records --------------------------------------------------------------------------------------------------

def records_of(part):
    """(place, record) of each in a part. A document of text is {"text": ...}; a record of a file is what its JSON is."""
    if part.kind in ("parquet", "arrow"):
        yield from ((Place(part, 1, number), record) for number, record in table_records(part))
    elif part.kind == "lines":
        yield from line_records(part)
    elif part.kind == "document":
        yield from document_records(part)
    else:
        with opened(part.file) as stream:
            content = stream.read()
        refuse_binary(part.file, content)
        yield Place(part, 1), {"text": text_of(part.file, content).removeprefix("\ufeff")}


def line_records(part):
    """Records of a part of a file of JSON lines."""
    with opened(part.file) as stream:
        if part.begin:
            stream.seek(part.begin)
        at, number = part.begin, 0
        for line in lines_of(stream):
            if part.end is not None and at >= part.end:
                break
            number += 1
            place, begin = Place(part, number), at
            at += len(line)
            if begin == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield place, parse(place, text_of(place, line, begin))


class DoubledKey(Exception):
    """A key that stands twice in one object of JSON."""


def object_of(pairs):
    """An object of JSON by its keys and values; of a key that stands twice Python would take the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DoubledKey(next(key for key in keys if keys.count(key) > 1)[:40])
    return found


def refuse_json(error, place, what):
    """The Refusal of a record for what the module json threw. `what`: for an error of syntax, with {} in the place of it."""
    if isinstance(error, RecursionError):
        return Refusal(f"{place}: its JSON is nested too deep; leave that record out")
    if isinstance(error, DoubledKey):
        return Refusal(f"{place}: the key {json.dumps(str(error))} stands twice in one object; leave one of them out")
    if "integer string conversion" in str(error):
        return Refusal(f"{place}: a number of more than {sys.get_int_max_str_digits()} digits; write it as text")
    return Refusal(f"{place}: " + what.format(error))


def parse(place, text):
    """The value that a line of JSON holds."""
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except (RecursionError, DoubledKey, ValueError) as error:
        raise refuse_json(error, place, "not a line of JSON ({}); each line holds one record, {{...}}") from None


def document_records(part):
    """Records of a JSON document: the entries of an array, or objects one after another."""
    with opened(part.file) as stream:
        text = text_of(part.file, stream.read()).removeprefix("\ufeff")
    decoder, at, in_array = json.JSONDecoder(object_pairs_hook=object_of), 0, False
    number, line, counted = 0, 1, 0
    try:
        while True:
            at = SPACE.match(text, at).end()
            if at == len(text):
                if in_array:
                    raise ValueError("the array has no end")
                return
            if text[at] == "[" and not in_array:
                in_array, at = True, SPACE.match(text, at + 1).end()
                if text[at:at + 1] != "]":
                    continue
            if in_array and text[at] == "]":
                in_array, at = False, at + 1
                continue
            number += 1
            line, counted = line + text.count("\n", counted, at), at
            value, at = decoder.raw_decode(text, at)
            yield Place(part, line, number), value
            if in_array:
                at = SPACE.match(text, at).end()
                if text[at:at + 1] == ",":
                    at += 1
                elif text[at:at + 1] != "]":
                    raise ValueError(f"no comma after record {number}")
    except (RecursionError, DoubledKey) as error:
        raise refuse_json(error, Place(part, line, number), "") from None
    except ValueError as error:
        where = f"{part.file}, line {getattr(error, 'lineno', line + text.count(chr(10), counted, at))}"
        raise refuse_json(error, where, "not JSON ({}); mend it there") from None
