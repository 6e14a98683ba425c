"""Parts that the tests of the documentation share: which pages there are, and their parts."""
import re
from pathlib import Path

FENCE = re.compile(r"^(```+|~~~+)\s*(\w*)\s*$")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def folders(root):
    """Folders of the tree at its root, without what is built or hidden."""
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "build")) and p.name != "shared")


def pages(root):
    """All Markdown files of the tree, as paths relative to it."""
    found = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "THIRD_PARTY.md")]
    for folder in folders(root):
        found += sorted(folder.rglob("*.md"))
    return [p.relative_to(root) for p in found if p.is_file()]


def user_pages(root):
    """README, docs/ without the dated notes, CONTRIBUTING and the pages of the benchmarks: what must be true today."""
    return [p for p in pages(root) if p.name in ("README.md", "CONTRIBUTING.md") and len(p.parts) == 1
            or p.parts[0] == "docs" and "design" not in p.parts or p.parts[0] == "bench"]


def split(text):
    """Lines of prose as (number, line), and fenced blocks as (number of the first line in it, language, lines)."""
    prose, blocks, fence = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line.strip())
        if fence is None and match:
            fence = match.group(1)
            blocks.append((number + 1, match.group(2), []))
        elif fence is not None and line.strip() == fence:
            fence = None
        elif fence is not None:
            blocks[-1][2].append(line)
        else:
            prose.append((number, line))
    return prose, blocks


def anchors(text):
    """Names that a link to a part of this page may end in: GitHub's of each heading, and those given as {#name}."""
    names = set()
    for _, line in split(text)[0]:
        if not line.startswith("#"):
            continue
        given = re.search(r"\{#([\w-]+)\}\s*$", line)
        if given:
            names.add(given.group(1))
        title = re.sub(r"\s*\{#[\w-]+\}\s*$", "", line).lstrip("#").strip().lower()
        names.add(re.sub(r"[^\w\- ]", "", re.sub(r"`", "", title)).replace(" ", "-"))
    return names


def sentences(text):
    """Sentences of the prose with the number of the line in which each begins; a row of a table is a sentence."""
    result, words, start = [], [], 0
    for number, line in [*split(text)[0], (0, "")]:
        if not line.strip() or line.lstrip().startswith(("|", "#", "- ", "* ")):
            if words:
                result.append((start, " ".join(words)))
            words = []
        if not line.strip():
            continue
        if not words:
            start = number
        for part in [line.strip()] if line.startswith("#") else re.split(r"(?<=[.;:!?])\s+", line.strip()):
            words.append(part)
            if re.search(r"[.;!?]$", part) or line.startswith("#"):
                result.append((start, " ".join(words)))
                words, start = [], number
    return result
