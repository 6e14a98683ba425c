#!/usr/bin/env python3
"""Checks what pages say of the tree, from the text of its files alone.

Usage: check_pages.py ROOT

Reports one line "FILE:LINE: RULE: WHAT" for each mistake and ends with 1 where there is one:
  link    a relative link whose file, or whose anchor in it, is not there; below docs/ also one without a file's name, which
          Doxygen does not resolve, and one to a page elsewhere, which is not part of what it builds
  path    a code span that names a file or folder of the tree which is not there: `core/base/error.hpp`, `adam_*.cpp`,
          `cpu_ops/{kernels,update}/`, or the bare name of a C++ or CUDA file
  gpu     a page says that something has not run on a GPU: bench/results/README.md alone does, in one list
  table   a row of that page's table "Run on a GPU" names a result that is not there
  stale   a term that the code no longer has
"""
import fnmatch
import re
import sys
from pathlib import Path

import pages

RESULTS = Path("bench/results/README.md")
CODE = {".hpp", ".h", ".cpp", ".cu", ".cuh"}
CHECKED = CODE | {".py", ".cmake", ".md", ".toml", ".txt", ".json", ".svg", ".png"}
# Files that a reader's own machine has, or that a run or a build makes.
MADE = re.compile(r"^(build|runs?|model|tuned|data/(train|chat)|docs/html|bench-\d|tandem-VERSION|checkpoints|NAME)\b")
DATED = {"CHANGELOG.md"}  # speak of the tree as it was
GPU = re.compile(r"\b(GPUs?|cards?|H100|H200|A100|CUDA|NVIDIA|WSL2?|Windows|cuDNN|RTX)\b")
NOT_RUN = re.compile(
    r"\b(has|have|had|was|were|is|are)(n't| not| never)( yet)?( been)? (yet )?(run|ran|tried|trained|tested)\b"
    r"|\b(not|never|nor)( yet)?( been)? (run|ran|tried|trained|tested) (yet )?(on|below|under|with) "
    r"|\bnever (run|ran)\b|\bdid not run\b|\bno runs? (on|stands?|of|was|has)\b"
    r"|\b([Nn]o|[Nn]one|[Nn]o two|[Nn]obody)\b[^.]{0,40}\b(has|have)( yet)?( been)? (run|ran|tried|trained)\b"
    r"|\bno [^.]{0,30} have run\b|\byet to (be )?run\b|\buntested on\b", re.I)
STALE = re.compile(r"\b(unfold(s|er|ed|ing)?|fold_gradient|exchange_gradient|landing buffers?|routing shares|crews?|lumps?)\b", re.I)


def names_of(root):
    """Paths of all files, their bare names, and paths of all folders."""
    found = [p for p in root.iterdir() if p.is_file()] + [p for f in pages.folders(root) for p in f.rglob("*") if p.is_file()]
    files = [p.relative_to(root) for p in found]
    return {p.as_posix() for p in files}, {p.name for p in files}, {q.as_posix() for p in files for q in p.parents}


def expand(pattern):
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    return [name for part in match.group(1).split(",") for name in expand(pattern[:match.start()] + part + pattern[match.end():])]


def is_there(word, page, tree):
    files, bare, folders = tree
    for name in expand(word.replace("NAME", "*")):
        name = name.rstrip("/")
        places = [name, f"include/{name}", (page.parent / name).as_posix()]
        if any(c in name for c in "*?["):
            found = any(fnmatch.fnmatch(f, p) for p in places for f in files | folders)
            found = found or "/" not in name and any(fnmatch.fnmatch(f, name) for f in bare)
        else:
            found = any(p in files or p in folders for p in places) or "/" not in name and name in bare
        if not found:
            return False
    return True


def looks_like_a_path(word, tree):
    if not re.fullmatch(r"[\w.{},*/+-]+", word) or MADE.match(word) or ".." in word:
        return False
    suffix = Path(word.rstrip("/")).suffix
    if "/" in word:
        top = word.split("/")[0]
        return (top in tree[2] or top == "tandem") and (suffix in CHECKED or not suffix)
    return suffix in CODE


def check_links(root, page, text):
    for number, line in pages.split(text)[0]:
        for target in pages.LINK.findall(pages.SPAN.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = root / page.parent / name if name else root / page
            if not name and page.parts[0] == "docs":
                yield number, "link", f"{target}: Doxygen needs the name of the page before it"
            if page.parts[0] == "docs" and path.suffix == ".md" and (root / "docs").resolve() not in path.resolve().parents:
                yield number, "link", f"{target} is no page of docs/: name the file in a code span"
            if not path.exists():
                yield number, "link", f"{target} is not there"
            elif anchor and path.suffix == ".md" and anchor not in pages.anchors(path.read_text()):
                yield number, "link", f"{target}: no heading of that name"


def check_paths(page, text, tree):
    for number, line in pages.split(text)[0]:
        for span in pages.SPAN.findall(line):
            for word in span.replace('"', " ").split():
                word = word.rstrip(".,:;")
                if looks_like_a_path(word, tree) and not is_there(word, page, tree):
                    yield number, "path", f"{word} is not there"


def check_gpu(page, text):
    for number, sentence in pages.sentences(text):
        if GPU.search(sentence) and NOT_RUN.search(sentence):
            yield number, "gpu", f"what has not run is listed in {RESULTS} alone: {sentence[:100]}"


def check_table(root, text):
    """Each file of the table lies in the folder of each card that has something to say of it."""
    cards = []
    for number, line in pages.split(text)[0]:
        if not line.startswith("|"):
            cards = []
            continue
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if cells[0] == "file":
            cards = [re.search(r"[A-Z]\d+", c).group(0).lower() for c in cells[1:]]
        for name in re.findall(r"`([\w.-]+\.json)`", cells[0]) if cards else []:
            for card, said in zip(cards, cells[1:]):
                if said and not (root / RESULTS.parent / card / name).exists():
                    yield number, "table", f"{card}/{name} is not there"


def mistakes_of(root, page, text, tree):
    """(line, rule, what) of each mistake in `page`, were `text` its text."""
    found = list(check_links(root, page, text))
    if page.name not in DATED and "design" not in page.parts:
        found += check_paths(page, text, tree)
    if page == RESULTS:
        found += check_table(root, text)
    elif page in pages.user_pages(root):
        found += check_gpu(page, text)
        found += [(n, "stale", m.group(0)) for n, line in pages.split(text)[0] for m in STALE.finditer(line)]
    return found


def mistakes(root):
    tree = names_of(root)
    for page in pages.pages(root):
        for number, rule, what in mistakes_of(root, page, (root / page).read_text(), tree):
            yield f"{page}:{number}: {rule}: {what}"


def main():
    found = list(mistakes(Path(sys.argv[1]).resolve()))
    print("\n".join(found) or "all pages are right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
