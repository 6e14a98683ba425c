#!/usr/bin/env python3
"""Checks how the comments of the source tree begin, from the text of its files alone.

Usage: check_comments.py ROOT

A comment says first what the thing is, with a noun of its own. One that begins with "Of", "The same", "What",
"Likewise", "Those of", "As above" or "..." needs another line to be understood. Reports one line "FILE:LINE: comment:
WHAT" for each comment that begins so, in small letters too, and ends with 1 where there is one.

Comments are what follows code on its line, and blocks: neighbouring lines of comment alone with the same marker (`//`,
`///`, `///<`; `#`, `#:` in Python). Only the first words of a comment count, not those of its other lines. Lines behind
a comment on a line of code continue it where they have its marker and stand in its column. In Python a string that is a
statement, such as a docstring, is a comment too.
"""
import io
import re
import sys
import tokenize
from pathlib import Path

FOLDERS = ["core", "cpu_ops", "gpu_ops", "scheduler", "offload", "models", "data", "io", "comm", "api", "include", "train",
           "cli", "python", "tests", "bench", "examples", "tools"]
CPP = {".hpp", ".cpp", ".cu", ".cuh"}
PYTHON = {".py"}

# Comments, and literals that may hold what looks like one. A quote between digits separates them.
TOKEN = re.compile(
    r'(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|R"([^\s()\\]{0,16})\(.*?\)\3"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.S)
MARKER = re.compile(r"///<|///|//|/\*+<?|#:|#|\w*(?:" + r'"""|"' + r"|'''|')")
DANGLING = re.compile(r"(?:(?:of|the same|what|likewise|those of|as above)\b(?![-_])|\.\.\.)", re.I)
# Kinds of Python tokens before a string that is a statement, and kinds that stand between any two tokens.
STATEMENT_BEGINS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}


class Comment:
    """One comment of a file, up to the end of its line. `before`: the part of the line in front of it. `own_line`:
    nothing but blanks is there. `is_block`: it ends with a marker of its own, so that no other line continues it."""

    def __init__(self, line, before, written, is_block):
        self.line = line
        self.column = len(before)
        self.own_line = not before.strip()
        self.is_block = is_block
        self.marker = MARKER.match(written).group()
        self.words = written[len(self.marker):].strip()

    def continues(self, before):
        """Whether it is a further line of the comment that `before` is a line of."""
        if before is None or self.is_block or not self.own_line:
            return False
        if self.line != before.line + 1 or self.marker != before.marker:
            return False
        return before.own_line or self.column == before.column


def comments_of_cpp(text):
    for found in TOKEN.finditer(text):
        if found.group("line") or found.group("block"):
            begin = text.rfind("\n", 0, found.start()) + 1
            yield Comment(text.count("\n", 0, found.start()) + 1, text[begin:found.start()], found.group(),
                          found.group("block") is not None)


def comments_of_python(text):
    lines = text.split("\n")
    last = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_statement = token.type == tokenize.STRING and last in STATEMENT_BEGINS
        if is_statement or token.type == tokenize.COMMENT:
            line, column = token.start
            yield Comment(line, lines[line - 1][:column], token.string, is_statement)
        if token.type not in NO_CODE:
            last = token.type


def dangling_in(text, suffix):
    """(line, first words) of every comment that begins so."""
    before = None
    for comment in comments_of_python(text) if suffix in PYTHON else comments_of_cpp(text):
        found = DANGLING.match(comment.words)
        if found and not comment.continues(before):
            yield comment.line, found.group()
        before = comment


def sources_of(root):
    return [p for folder in FOLDERS for p in sorted((root / folder).rglob("*"))
            if p.is_file() and p.suffix in CPP | PYTHON]


def main(arguments):
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    root = Path(arguments[1]).resolve()
    files = sources_of(root)
    if not files:
        print(f"no source files at {root}", file=sys.stderr)
        return 2
    count = 0
    for path in files:
        for line, words in dangling_in(path.read_text(encoding="utf-8", errors="replace"), path.suffix):
            count += 1
            print(f"{path.relative_to(root)}:{line}: comment: begins with '{words}', say first what the thing is")
    print(f"{len(files)} files, {count} violations")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
