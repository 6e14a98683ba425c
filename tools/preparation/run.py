"""A whole preparation: from settings to published token files, and what is said of it."""
import contextlib
import hashlib
import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import Refusal
from .files import find_inputs
from .inputs import parts_of, records_of
from .join import build, masked
from .outputs import Outputs
from .parts import make_parts, totals
from .pipeline import Pipeline
from .records import KNOWN_ROLES
from .show import described
from .templates import DATE, parse_date

# Version of what records become: parts of another one are not gone on with.
FORMAT_VERSION = 3
MOST_ROW_LENGTH = 1 << 24  # tokens; a row is put together in memory, and no model has so many positions
ROW_LENGTH = "--row-length: at least 2, and with --layout rows or --layout packed"
SHOWN_TEXT = 4000  # characters of a text that are encoded only to be shown


@dataclass
class Settings:
    """Settings of a preparation, with the defaults of the flags of tools/prepare_data.py."""
    inputs: list
    tokenizer: str
    out: Path
    layout: str | None = None  # None: rows for preferences, else stream
    row_length: int | None = None
    form: str = "auto"
    end_token: str | None = None
    no_end_token: bool = False
    special_tokens: bool = True
    date: str = DATE
    validation: float = 0.0
    show: int = 1
    workers: int = os.cpu_count() or 1
    part_bytes: int = 1 << 24

    def check(self):
        """Refuses settings that contradict each other or are out of range."""
        if self.row_length is not None and (self.layout == "stream" or self.row_length < 2):
            raise Refusal(ROW_LENGTH)
        if self.row_length is not None and self.row_length > MOST_ROW_LENGTH:
            raise Refusal(f"--row-length {self.row_length}: at most {MOST_ROW_LENGTH:,}; give one more than the model's positions "
                          "at most")
        if self.workers < 1 or self.part_bytes < 1:
            raise Refusal("--workers and --part-bytes must be at least 1")
        if not 0 <= self.validation < 1:
            raise Refusal(f"--validation {self.validation:g}: a share of the records is below 1, such as 0.02")
        if self.end_token is not None and self.no_end_token:
            raise Refusal("--end-token and --no-end-token: give one of them")
        parse_date(self.date)
        if self.show < 0:
            raise Refusal("--show: a number of records, or 0 for none")

    def choose_layout(self, pairs):
        """Decides on the layout where none is given; refuses one that records of preferences, which `pairs` says they are, do not
        have."""
        if self.layout is None:
            self.layout = "rows" if pairs else "stream"
        if pairs and self.layout != "rows":
            raise Refusal(f"--layout {self.layout}: preferences lie in rows, an answer in each; leave it out")
        if self.row_length is not None and self.layout == "stream":
            raise Refusal(ROW_LENGTH)

    def pipeline(self):
        """Arguments of the Pipeline."""
        return {"tokenizer": self.tokenizer, "end_token": self.end_token, "no_end_token": self.no_end_token,
                "special_tokens": self.special_tokens, "form": self.form, "date": self.date}


def tell(text):
    """A line on standard output; a reader that has gone does not end the work."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def fingerprint(settings, paths, pipeline):
    """Two commands with the same one make the same parts."""
    facts = [FORMAT_VERSION, settings.layout, settings.row_length, settings.part_bytes, pipeline.facts(),
             hashlib.sha256(pipeline.file.read_bytes()).hexdigest(),
             [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def shown(raw):
    """A record cut to what is shown of it: a text alone may be as long as a book."""
    if isinstance(raw, dict) and isinstance(raw.get("text"), str) and len(raw) == 1 and len(raw["text"]) > SHOWN_TEXT:
        return {"text": raw["text"][:SHOWN_TEXT]}, True
    return raw, False


def preview(parts, pipeline, count, row_length):
    """Tells the end token, what was recognised, and the first records as the model will see them. Refuses the first ones
    where they cannot be prepared, before any work. Returns whether the first one is a preference."""
    pairs = False
    if pipeline.end is not None:
        tell(f"end token {pipeline.end.text!r} (id {pipeline.end.id}): {pipeline.end.source}" +
             ("; a chat ends as its template writes it" if pipeline.sources else ""))
    everything = ((place, raw) for part in parts for place, raw in records_of(part))
    for number, (place, raw) in enumerate(itertools.islice(everything, max(count, 1))):
        raw, cut = shown(raw)
        prepared, *rejected = pipeline.prepare_all(raw, place)
        if number == 0:
            pairs = bool(rejected)
            template = "by the tokenizer's chat template" if prepared.targets else "without a chat template"
            tell(f"recognised: {prepared.form}" + (f", written {template}" if prepared.roles else ""))
        for record, name in ((prepared, place), *((record, f"{place}, rejected") for record in rejected)) if number < count else ():
            for line in described(record, name, pipeline.tokenizer, row_length):
                tell(line)
        if cut and number < count:
            tell(f"  (its first {SHOWN_TEXT} characters)")
    return pairs


def warn(total, settings, outputs, pipeline):
    """Tells on standard error what became of records otherwise than one may think."""
    first, strange = total["first_dropped"], total["first_unknown_role"]
    cut_off = f", {total['cut_off']} of them as their targets stand beyond --row-length" if total["cut_off"] else ""
    for key, what in (
            ("cut", "records cut at --row-length"),
            ("without_target", f"records left out: without any target{cut_off}" if settings.layout != "stream" else
             "records without any target: they are only read"),
            ("untaught", "answers are no targets: the chat template rewrites them once others follow"),
            ("dropped", f"messages or thoughts are not, or not whole, in what the chat template writes (the first: {first})"),
            ("unknown_roles", f"messages have a role that is none of {' '.join(KNOWN_ROLES)}: their text is context, never learnt "
             f"(the first: {strange})"),
            ("joined", "chats have content parts that the chat template does not take: it is given one text of them"),
            ("tools_dropped", "chats have tools that the chat template does not write"),
            ("quoted", "chats where the template writes arguments of calls, which are text, as a text within a text: write "
             "them as objects"),
            ("open_ended", "chats where the template's {% generation %} blocks leave out the end of the turn: it is not "
             "learnt"),
            ("doubled", "texts begin with the tokenizer's beginning token: it is not written twice")):
        if total[key]:
            print(f"{total[key]} {what}", file=sys.stderr)
    for setting, value, before in pipeline.overridden:
        print(f"{pipeline.file} has {json.dumps(before)} for {setting}, and tokenizer_config.json with its tokenizer_class "
              f"{json.dumps(value)}, which is taken, as in transformers", file=sys.stderr)
    if pipeline.end is None and not settings.no_end_token and set(total["forms"]) - {"messages", "sharegpt"}:
        print("no end token: the tokenizer's folder names none, so nothing says where a text ends; name one with --end-token",
              file=sys.stderr)
    if total["largest"] >= pipeline.vocabulary:
        print(f"ids beyond {pipeline.file.name}, as transformers gives them: {' '.join(pipeline.new_tokens)}", file=sys.stderr)
    stale = outputs.stale_validation()
    if stale:
        print(f"{stale} is of an earlier run: its records are in {outputs.tokens} too; prepare it again with --validation",
              file=sys.stderr)


def require_positions(length, what, pipeline):
    """Refuses rows that the model whose config.json lies beside the tokenizer cannot take: it feeds all but their last token."""
    if pipeline.positions is not None and length > pipeline.positions + 1:
        raise Refusal(f"{what}: {pipeline.file.parent / 'config.json'} has {pipeline.positions} positions, for rows of "
                      f"{pipeline.positions + 1} tokens at most; give --row-length {pipeline.positions + 1}, which cuts longer "
                      "records, or for another model its own folder")


def prepare(settings, signals):
    """Prepares data. Raises Refusal, WriteFailure or Interrupted; then no output is written."""
    settings.check()
    outputs = Outputs(settings.out, settings.validation > 0)
    paths, left_out = find_inputs(settings.inputs, outputs)
    pipeline = Pipeline(**settings.pipeline())
    require_positions(settings.row_length or 0, f"--row-length {settings.row_length}", pipeline)
    parts = parts_of(paths, settings.part_bytes)
    left_out.say()
    pairs = preview(parts, pipeline, settings.show, settings.row_length)
    settings.choose_layout(pairs)
    command = fingerprint(settings, paths, pipeline)[:16]
    with outputs.work_folder(command, signals) as folder:
        options = {"pipeline": settings.pipeline(), "folder": str(folder), "rows": settings.layout != "stream",
                   "row_length": settings.row_length, "pairs": pairs}
        make_parts(folder, parts, options, settings.workers, signals)
        total = totals(folder, len(parts))
        if settings.layout != "stream":
            require_positions(total["longest"], f"the longest record has {total['longest']} tokens", pipeline)
        descriptions, filled = build(folder, len(parts), outputs, total, settings.layout, settings.row_length,
                                     settings.validation, pipeline, pairs)
        outputs.publish(folder, masked(descriptions), signals)
    warn(total, settings, outputs, pipeline)
    if len(total["forms"]) > 1:
        tell("formats: " + ", ".join(f"{count} {form}" for form, count in sorted(total["forms"].items())))
    for description, files, tokens in zip(descriptions, outputs.sets, filled):
        if settings.layout == "packed":
            tell(f"packed {description['records']:,} records in {description['rows']:,} rows of {description['row_length']:,}: "
                 f"{tokens / description['tokens']:.1%} full")
        records = f"{description['records'] // 2} pairs" if pairs else f"{description['records']} records"
        tell(f"{records}, {description['tokens']} tokens of {description['dtype']}, "
             f"{description['targets']} of them targets, in {files.tokens}")
