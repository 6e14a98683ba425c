#!/usr/bin/env python3
"""Checks how the source tree hangs together, from the text of its files alone.

Usage: check_dependencies.py ROOT

Reports one line "FILE:LINE: RULE: WHAT" for each violation and ends with 1 where there is one:
  dependency   a module includes a module that the table does not allow, or spells an include otherwise
               than "module/file.hpp"
  part         a part of a module (a folder in it) includes a part that the table does not allow, or has no
               README.md, or a file lies beside the parts
  crowded      a folder has more than 30 source files of its own
  length       a source file has more than 600 lines
  conditional  a header outside core/numerics/ has a preprocessor conditional
  public       a public header, or one that it includes, includes a header of CUDA, TBB, hwloc or oneDNN
  named        the README.md of a module or of its part names a source file nowhere: not as `file.hpp`, which stands for
               file.cpp too, nor by a pattern such as `adam_*.cpp` or `{linear,norms}.cpp`
"""
import fnmatch
import functools
import re
import sys
from pathlib import Path

LONGEST_FILE = 600
FULL_FOLDER = 30

# Modules that each module may include. Every module may include itself.
MAY_INCLUDE = {
    "core": set(),
    "cpu_ops": {"core"},
    "gpu_ops": {"core"},
    "scheduler": {"core"},
    "offload": {"core", "scheduler", "io"},
    "models": {"core"},
    "data": {"core"},
    "io": {"core"},
    "comm": {"core"},
    "api": {"core", "cpu_ops", "gpu_ops", "scheduler", "offload", "io", "comm"},
}
MAY_INCLUDE["train"] = set(MAY_INCLUDE) - {"cpu_ops", "gpu_ops"}
MAY_INCLUDE["cli"] = set(MAY_INCLUDE)
MAY_INCLUDE["python"] = set()  # nothing but the public headers
MODULES = set(MAY_INCLUDE)
# Parts that each part of a module may include, for modules that have parts. Every part may include itself.
PARTS = {
    "core": {
        "numerics": set(),
        "base": set(),
        "tensor": {"base", "numerics"},
        "memory": {"base", "tensor"},
        "host": {"base", "tensor", "memory"},
        "device": {"base", "tensor", "memory"},
        "ops": {"base", "numerics", "tensor", "memory", "host", "device"},
        "params": {"base", "numerics", "tensor", "memory", "device"},
    },
    "cpu_ops": {
        "threads": set(),
        "update": set(),
        "kernels": set(),
        "reference": set(),
        "device": {"threads", "update", "kernels"},
    },
    "gpu_ops": {
        "base": set(),
        "device": set(),
        "cuda": {"base", "device"},
        "emulation": {"base", "device"},
        "kernels": {"base"},
        "ops": {"base", "device"},
    },
    "scheduler": {
        "plan": set(),
        "tasks": {"plan"},
        "machine": {"plan", "tasks"},
        "simulation": {"plan", "tasks", "machine"},
        "search": {"plan", "tasks", "machine", "simulation"},
    },
    "offload": {
        "storage": set(),
        "execution": {"storage"},
        "state": {"storage", "execution"},
        "engine": {"storage", "execution", "state"},
    },
    "models": {
        "config": set(),
        "hf": {"config"},
        "transformer": {"config"},
    },
    "train": {
        "config": set(),
        "hf": {"config"},
        "saving": {"config"},
        "setup": {"config", "hf", "saving"},
        "runtime": {"config", "setup"},
        "sampling": {"config", "hf", "setup", "runtime"},
        "report": {"config"},
        "loop": {"config", "hf", "saving", "setup", "runtime", "report"},
    },
    "cli": {
        "common": set(),
        "bench": {"common"},
        "sampling": {"common"},
        "commands": {"common"},
        "program": {"common"},
    },
}
# Folders that may include a part of a module that theirs may not.
MORE_FROM = {"comm/nccl": {"gpu_ops/device"}}
# Modules that may include some parts of another alone.
ONLY_PARTS = {("offload", "scheduler"): {"plan", "tasks"}}
# Modules that some parts of another alone may include.
ONLY_FROM = {("offload", "io"): {"engine"}}
# include/tandem/ is the outer face of api. No other module may depend on it but those above api.
PUBLIC = "tandem"
PUBLIC_USERS = {"api", "train", "cli", "python"}
# Not modules: they may include everything, and their own files.
OUTSIDE = {"tests", "bench", "examples"}

SOURCES = {".hpp", ".h", ".cpp", ".cu", ".cuh", ".py", ".in"}
HEADERS = {".hpp", ".h", ".cuh"}
HIDDEN_LIBRARIES = re.compile(
    r"^(cuda|cublas|cudnn|nccl|nvml|nvtx|nvToolsExt|cub/|thrust/|tbb/|oneapi/tbb|hwloc|dnnl|oneapi/dnnl)"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]')
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|elifdef|elifndef|else)\b")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
BRACES = re.compile(r"\{([^{}]*)\}")
BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.S)


def is_header(path):
    return path.suffix in HEADERS or path.name.endswith(".hpp.in")


def once_a_file(function):
    """A function of a file's text, which is read again only where the file has changed."""
    known = {}

    @functools.wraps(function)
    def of(path):
        found = path.stat()
        state = (found.st_ino, found.st_mtime_ns, found.st_size)
        if known.get(path, (None,))[0] != state:
            known[path] = (state, function(path))
        return known[path][1]

    return of


@once_a_file
def code_lines(path):
    """Lines without block comments, so that an include in a comment counts for nothing."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return BLOCK_COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text).splitlines()


@once_a_file
def includes_of(path):
    """(line, whether in quotes, name) of each include."""
    matches = ((number, INCLUDE.match(line)) for number, line in enumerate(code_lines(path), 1))
    return [(number, found.group(1) == '"', found.group(2)) for number, found in matches if found]


@once_a_file
def conditionals_of(path):
    """(line, word) of each conditional of the preprocessor."""
    matches = ((number, CONDITIONAL.match(line)) for number, line in enumerate(code_lines(path), 1))
    return [(number, found.group(1)) for number, found in matches if found]


@once_a_file
def length_of(path):
    return len(path.read_text(encoding="utf-8", errors="replace").splitlines())


def stem_of(path):
    """Path without suffixes, `version` for version.hpp.in."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.split(".")[0]


def in_full(pattern):
    """Words that a pattern with braces stands for, as in a shell."""
    found = BRACES.search(pattern)
    if not found:
        return [pattern]
    before, after = pattern[:found.start()], pattern[found.end():]
    return [name for word in found.group(1).split(",") for name in in_full(before + word + after)]


def names_in(readme):
    """Every `name` of a README.md; none where there is no such file."""
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return {name for span in CODE_SPAN.findall(text) for name in in_full(span)}


def covers(name, path):
    """Whether a name in a module's README.md means the file at `path`, which is relative to the module's folder."""
    if "*" in name:
        return fnmatch.fnmatchcase(path, name)
    return "." in name and stem_of(name) == stem_of(path)


class Tree:
    def __init__(self, root):
        self.root = root
        self.violations = []
        folders = sorted(MODULES | OUTSIDE | {"include"})
        self.files = [
            p for folder in folders for p in sorted((root / folder).rglob("*")) if p.is_file() and p.suffix in SOURCES
        ]

    def report(self, path, line, rule, what):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {rule}: {what}")

    def owner(self, path):
        """The module of a file; that of include/tandem/ is api."""
        top = path.relative_to(self.root).parts[0]
        return "api" if top == "include" else top

    def resolve(self, include):
        """The file of the tree that an include names, or None."""
        for candidate in (self.root / include, self.root / "include" / include):
            if candidate.is_file():
                return candidate
        return None

    def check_dependencies(self, path):
        owner = self.owner(path)
        if owner in OUTSIDE:
            return
        for line, quoted, include in includes_of(path):
            target = include.split("/")[0] if "/" in include else ""
            if target == PUBLIC:
                allowed = owner in PUBLIC_USERS
            elif target in MODULES or target in OUTSIDE:
                folder = path.parent.relative_to(self.root).as_posix()
                allowed = (target == owner or target in MAY_INCLUDE[owner]
                           or include.rpartition("/")[0] in MORE_FROM.get(folder, ()))
            else:
                if quoted:
                    self.report(path, line, "dependency", f'"{include}" is not spelled "module/file.hpp"')
                continue
            if not allowed:
                self.report(path, line, "dependency", f"{owner} may not include {target} ({include})")

    def part_of(self, path):
        """(module, part) of a path below the root; None where it lies in no module that has parts. Part None: beside them."""
        parts = path.split("/")
        if parts[0] not in PARTS:
            return None
        return parts[0], parts[1] if len(parts) > 2 and parts[1] in PARTS[parts[0]] else None

    def check_parts(self, path):
        own = path.relative_to(self.root).as_posix()
        module, part = self.part_of(own) or (own.split("/")[0], None)
        if module in PARTS and part is None:
            self.report(path, 1, "part", f"lies in none of the parts of {module}: {' '.join(PARTS[module])}")
            return
        for line, _, include in includes_of(path):
            users = ONLY_FROM.get((module, include.split("/")[0]))
            if users is not None and part not in users:
                self.report(path, line, "part", f"{module}/{part} may not include {include}")
            target = self.part_of(include)
            if target is None:
                continue
            allowed = PARTS[module][part] | {part} if target[0] == module else ONLY_PARTS.get((module, target[0]))
            if allowed is not None and target[1] not in allowed:
                who = f"{module}/{part}" if target[0] == module else module
                self.report(path, line, "part", f"{who} may not include {target[0]}/{target[1]} ({include})")

    def check_folders(self):
        counts = {}
        for path in self.files:
            counts.setdefault(path.parent, []).append(path)
        for folder, files in counts.items():
            if len(files) > FULL_FOLDER:
                self.report(files[0], 1, "crowded",
                            f"{folder.relative_to(self.root)} has {len(files)} source files, {FULL_FOLDER} at most")
        for module, parts in PARTS.items():
            for part in parts:
                if not (self.root / module / part / "README.md").is_file():
                    self.report(self.root / module / part, 1, "part", "no README.md")

    def check_length(self, path):
        count = length_of(path)
        if count > LONGEST_FILE:
            self.report(path, count, "length", f"{count} lines, {LONGEST_FILE} at most")

    def check_conditionals(self, path):
        if not is_header(path) or path.relative_to(self.root).parts[:2] == ("core", "numerics"):
            return
        for number, word in conditionals_of(path):
            self.report(path, number, "conditional", f"#{word} in a header")

    def check_public(self):
        """Follows the includes of public headers through the tree."""
        waiting = [p for p in self.files if self.root / "include" in p.parents and is_header(p)]
        seen = set(waiting)
        while waiting:
            path = waiting.pop()
            for line, _, include in includes_of(path):
                if HIDDEN_LIBRARIES.match(include):
                    self.report(path, line, "public", f"{include} reaches users through a public header")
                target = self.resolve(include)
                if target is not None and target not in seen:
                    seen.add(target)
                    waiting.append(target)

    def check_named(self):
        stems, names = {}, {}
        for path in self.files:
            own = path.relative_to(self.root).as_posix()
            module = own.split("/")[0]
            if module in MODULES:
                place = "/".join(part for part in self.part_of(own) or (module,) if part)
                names.setdefault(place, names_in(self.root / place / "README.md"))
                name = own[len(place) + 1:]
                stems.setdefault((place, stem_of(name)), []).append((path, name))
        for (place, stem), files in stems.items():
            if not any(covers(word, name) for word in names[place] for _, name in files):
                self.report(files[0][0], 1, "named", f"{place}/README.md does not name {stem}")

    def check(self):
        for path in self.files:
            if path.suffix != ".py":
                self.check_dependencies(path)
                self.check_parts(path)
                self.check_conditionals(path)
            self.check_length(path)
        self.check_public()
        self.check_folders()
        self.check_named()


def main(arguments):
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    root = Path(arguments[1]).resolve()
    if not (root / "core").is_dir():
        print(f"no source tree at {root}", file=sys.stderr)
        return 2
    tree = Tree(root)
    tree.check()
    for violation in tree.violations:
        print(violation)
    print(f"{len(tree.files)} files, {len(tree.violations)} violations")
    return 1 if tree.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
