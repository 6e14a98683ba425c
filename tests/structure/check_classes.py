#!/usr/bin/env python3
"""Checks how long the classes of the source tree are, from the text of its files alone.

Usage: check_classes.py ROOT [--list]

A class is as long as all lines that define it, in all files of its module: the body, nested classes and comments in it,
and every member that is defined outside of it, with the comment right above. What is behind a pointer, `struct X::Impl`
and its members, counts to X. Reports one line "FILE:LINE: class: WHAT" for each class of more than 500 lines and ends
with 1 where there is one. A class of KNOWN may be as long as it says there, and is reported too once it needs no such
exception, so that the list is emptied. --list prints the longest classes instead.
"""
import bisect
import re
import sys
from pathlib import Path

LONGEST_CLASS = 500
# Module and class: lines that it may have until it is cut.
KNOWN = {}

FOLDERS = ["core", "cpu_ops", "gpu_ops", "scheduler", "offload", "models", "data", "io", "comm", "api", "include", "train",
           "cli", "python", "tests", "bench", "examples"]
SOURCES = {".hpp", ".h", ".cpp", ".cu", ".cuh"}

# Text that is no code: comments, literals and directives. A quote between digits separates them.
NO_CODE = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"([^\s()\\]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*", re.S | re.M)
TOKEN = re.compile(r"[A-Za-z_]\w*|::|->|[{}();<>=:,~\[\]]|\S")
OPENING = {"(": ")", "[": "]", "{": "}"}
WORD = re.compile(r"[A-Za-z_]\w*$")
CLASS_WORDS = {"class", "struct", "union"}


def code_of(text):
    """The text with all that is no code as blanks, so that lines and columns stay."""
    return NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


class Definition:
    """Lines [begin, end) of a file that define a class, or a member outside of it. `names`: qualified as written."""

    def __init__(self, path, begin, end, scope, names, is_class):
        self.path, self.begin, self.end = path, begin, end
        self.scope, self.names, self.is_class = scope, names, is_class


class File:
    """Finds the definitions of one file."""

    def __init__(self, path, text):
        self.path = path
        self.lines = text.splitlines()
        code = code_of(text)
        self.starts = [0] + [i + 1 for i, c in enumerate(code) if c == "\n"]
        self.tokens = [(m.group(), m.start()) for m in TOKEN.finditer(code)]
        self.definitions = []
        self.unbalanced = None
        self.matches = self.match()
        if self.unbalanced is None:
            self.parse(0, len(self.tokens), ())

    def line(self, token):
        return bisect.bisect_right(self.starts, self.tokens[token][1]) - 1

    def match(self):
        """Index of the closing bracket for each index of an opening one."""
        matches, open_ones = {}, []
        for i, (word, _) in enumerate(self.tokens):
            if word in OPENING:
                open_ones.append(i)
            elif word in (")", "]", "}"):
                if not open_ones or OPENING[self.tokens[open_ones[-1]][0]] != word:
                    self.unbalanced = self.line(i)
                    return matches
                matches[open_ones.pop()] = i
        if open_ones:
            self.unbalanced = self.line(open_ones[-1])
        return matches

    def angle_end(self, i):
        """Behind the `>` that closes the `<` at i."""
        depth = 0
        while i < len(self.tokens):
            word = self.tokens[i][0]
            if word in OPENING:
                i = self.matches[i]
            elif word == "<":
                depth += 1
            elif word == ">":
                depth -= 1
                if depth == 0:
                    return i + 1
            elif word == ";":
                return i
            i += 1
        return i

    def parse(self, i, end, scope):
        """Declarations of a namespace, `scope` naming it and those around it."""
        while i < end:
            i = self.declaration(i, end, scope)

    def declaration(self, first, end, scope):
        """Takes one; returns where the next begins."""
        i = first
        while i < end and self.tokens[i][0] == "template" and self.word(i + 1) == "<":
            i = self.angle_end(i + 1)
        start = i
        words = []  # up to the first parenthesis
        parameters = False  # there was one
        initializers = False  # in a list of initializers of members
        while i < end:
            word = self.word(i)
            if word == ";":
                return i + 1
            if word == "}":
                return i + 1  # stray
            if word == "{":
                kind = self.brace(words, parameters, initializers, i)
                close = self.matches[i]
                if kind == "value":
                    i = close + 1
                    continue
                if kind == "namespace":
                    names = [w for w in words[words.index("namespace") + 1:] if WORD.match(w)]
                    self.parse(i + 1, close, scope + tuple(names or ["(unnamed)"]))
                    return close + 1
                if kind == "open":
                    self.parse(i + 1, close, scope)
                    return close + 1
                if kind == "class":
                    self.add(first, close, scope, self.class_names(words), True)
                    i = close + 1  # a variable may follow, and a semicolon does
                    words = ["="]
                    continue
                if kind == "function":
                    self.add(first, close, scope, self.function_names(start, i), False)
                return close + 1 if kind == "function" else self.behind_enum(close)
            if word in "([":
                if word == "(" and self.word(i - 1) not in ("alignas", "__attribute__", "decltype", "noexcept"):
                    parameters = True
                i = self.matches[i] + 1
                continue
            if word == "<" and not parameters and words and words[-1] != "operator" and WORD.match(words[-1]):
                i = self.angle_end(i)
                continue
            if word == ":" and parameters:
                initializers = True
            if not parameters:
                words.append(word)
            i += 1
        return i

    def behind_enum(self, close):
        while close < len(self.tokens) and self.word(close) != ";":
            close += 1
        return close + 1

    def word(self, i):
        return self.tokens[i][0] if 0 <= i < len(self.tokens) else ""

    def brace(self, words, parameters, initializers, i):
        """Kind of thing that a brace opens, by what is before it."""
        before = self.word(i - 1)
        if "=" in words and "operator" not in words:
            return "value"
        if parameters:
            if initializers and (WORD.match(before) or before == ">") and before != "try":
                return "value"  # initializer of a member
            return "function"
        if "namespace" in words:
            return "namespace"
        if "enum" in words:
            return "enum"
        if CLASS_WORDS & set(words):
            return "class"
        if words == ["extern"]:
            return "open"
        return "value"

    def class_names(self, words):
        """`X`, or `X::Impl`: what stands behind the last word of a class, attributes and bases left out."""
        at = max(i for i, w in enumerate(words) if w in CLASS_WORDS)
        names = []
        for i, word in enumerate(words[at + 1:], at + 1):
            if word == ":" or word == "final":
                break
            if word == "::":
                continue
            if WORD.match(word):
                names = names + [word] if words[i - 1] == "::" else [word]  # else it was a macro
        return names

    def function_names(self, first, end):
        """`X::Impl::run` as a list; the qualified name before the parameters, arguments of templates left out."""
        i = first
        names, joined = [], False
        while i < end:
            word = self.word(i)
            if word == "(":
                if self.word(i - 1) not in ("alignas", "decltype", "__attribute__"):
                    break
                i = self.matches[i] + 1
                continue
            if word == "operator":
                names = names + [word] if joined else [word]
                break
            if word == "[":
                i = self.matches[i] + 1
                continue
            if word == "<" and names:
                i = self.angle_end(i)
                continue
            if word == "::":
                joined = True
            elif word == "~":
                pass
            elif WORD.match(word):
                names = names + [word] if joined and names else [word]
                joined = False
            else:
                names, joined = [], False
            i += 1
        return names

    def add(self, first, close, scope, names, is_class):
        begin = self.line(first)
        while begin > 0 and self.lines[begin - 1].lstrip().startswith("//"):
            begin -= 1
        self.definitions.append(Definition(self.path, begin, self.line(close) + 1, scope, names, is_class))


class Class:
    def __init__(self, module, name, path, line):
        self.module, self.name, self.path, self.line = module, name, path, line
        self.lines, self.files = 0, set()

    def add(self, definition):
        self.lines += definition.end - definition.begin
        self.files.add(definition.path)


class Classes:
    """All of one module. Those of an unnamed namespace are each file's own."""

    def __init__(self, module, files):
        self.module = module
        self.by_name = {}
        members = []
        for file in files:
            for d in file.definitions:
                if d.is_class and len(d.names) == 1:
                    self.add_class(d)
                elif len(d.names) > 1:
                    members.append(d)
        for d in members:
            owner = self.owner_of(d)
            if owner is not None:
                owner.add(d)

    def key(self, scope, name, path):
        return (scope, name, path if "(unnamed)" in scope else None)

    def add_class(self, d):
        key = self.key(d.scope, d.names[0], d.path)
        if key not in self.by_name:
            self.by_name[key] = Class(self.module, d.names[0], d.path, d.begin + 1)
        self.by_name[key].add(d)

    def owner_of(self, d):
        """The outermost class that a qualified name names; None where it names namespaces alone."""
        for depth in range(len(d.scope), -1, -1):
            scope = d.scope[:depth]
            for name in d.names if d.is_class else d.names[:-1]:
                for where in (scope, scope + ("(unnamed)",)):
                    found = self.by_name.get(self.key(where, name, d.path))
                    if found is not None:
                        return found
                scope += (name,)
        return None


def module_of(path):
    top = path.split("/")[0]
    return "api" if top == "include" else top


def classes_of(root):
    """Every class of the tree, and a line for each file that could not be read."""
    files, violations = {}, []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SOURCES or not path.is_file():
                continue
            name = path.relative_to(root).as_posix()
            file = File(name, path.read_text(encoding="utf-8", errors="replace"))
            if file.unbalanced is not None:
                violations.append(f"{name}:{file.unbalanced + 1}: class: brackets that do not match")
            files.setdefault(module_of(name), []).append(file)
    found = [c for module, of_module in files.items() for c in Classes(module, of_module).by_name.values()]
    return found, violations


def check(root):
    classes, violations = classes_of(root)
    seen = {}
    for c in classes:
        name = f"{c.module}/{c.name}"
        allowed = KNOWN.get(name, LONGEST_CLASS)
        seen[name] = max(c.lines, seen.get(name, 0))
        if c.lines > allowed:
            violations.append(f"{c.path}:{c.line}: class: {c.name} has {c.lines} lines in {len(c.files)} files, "
                              f"{allowed} at most")
    for name in KNOWN:
        if seen.get(name, 0) <= LONGEST_CLASS:
            violations.append(f"{Path(__file__).name}:1: class: {name} need not be in KNOWN any more")
    return classes, violations


def main(arguments):
    if len(arguments) not in (2, 3) or arguments[2:] not in ([], ["--list"]):
        print(__doc__, file=sys.stderr)
        return 2
    root = Path(arguments[1]).resolve()
    if not (root / "core").is_dir():
        print(f"no source tree at {root}", file=sys.stderr)
        return 2
    classes, violations = check(root)
    if arguments[2:]:
        for c in sorted(classes, key=lambda c: -c.lines)[:40]:
            print(f"{c.lines:5} {c.module}/{c.name} ({', '.join(sorted(c.files))})")
        return 0
    for violation in violations:
        print(violation)
    print(f"{len(classes)} classes, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
