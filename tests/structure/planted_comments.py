#!/usr/bin/env python3
"""Shows that check_comments.py can fail: plants comments in a small tree, each of them alone.

Usage: planted_comments.py

Each comment that needs another line to be understood must be reported, with its file and line. What only looks like one
must pass: further lines of a comment, literals, and longer words.
"""
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import check_comments
from planted_report import report

# Text of C++ files, lines that must be reported.
PLANTED = [
    ("/// Of a stream whose kernels go first.\nint a;\n", [1]),
    ("/// Those of the folder.\nint a;\n", [1]),
    ("int a = 0;  ///< those of each block\n", [1]),
    ("/// As above, in slices.\nint a;\n", [1]),
    ("// The same in pieces.\nvoid f();\n", [1]),
    ("#pragma once\n// What a rank brings.\n", [2]),
    ("namespace a {\n  /// Likewise.\n  int a;\n}\n", [2]),
    ("/// ... and in a file.\nint a;\n", [1]),
    ("/* What it is. */\nint a;\n", [1]),
    ("///Of one.\nint a;\n", [1]),
    ("int a = 0;  ///< of it, the caller's own share\n", [1]),
    ("int a = 0;  ///< the same of host memory\n", [1]),
    ("int a = 0;  ///< What others read\n", [1]),
    ("int a = 0;  // of the first\n", [1]),
    ("int a = 0;  ///< bytes of\n            ///< what is copied\nint b;  ///< of these\n", [3]),
    ("int a = 0;  ///< bytes\n/// What follows.\nint b;\n", [2]),
    ("// -- sums ----\n/// Of all threads.\nint a;\n", [2]),
    ("/// Bytes.\n\n/// Of all.\nint a;\n", [3]),
    ("/// Bytes.\nint a;\n/// What is left.\nint b;\n", [3]),
    ("constexpr int a = 1'000;  ///< of one, and b = 2'000\n", [1]),
    ("auto a = \"//\";  ///< of it\n", [1]),
    # Right comments must pass, or the check would prove nothing.
    ("/// Bytes of a block, the sum\n/// of all parts and\n/// What a line may begin with.\nint a;\n", []),
    ("int a = 0;  ///< bytes of a block, and\n            ///< of its neighbours\n", []),
    ("int a = 0;  // bytes, and\n            // what follows\n", []),
    ("auto a = \"// Of it\", b = R\"(\n// What it is\n/// Of it\n)\";\n", []),
    ("/// Offset in bytes.\n/// Often 0.\nint offset;  ///< offset of it\n", []),
    ("/// The samples.\nint a;  ///< whatever it is\n", []),
    ("/// Whatever the order.\nint a;  // of_each is a name\n", []),
    ("/// of_each counts.\nint a;\n", []),
    ("/// Those with experts come first.\n/// As above, in slices.\nint a;\n", []),
    ("f(/*windowed=*/false);\n", []),
    ("char a = '\"';  // a quote\nchar b = '/';  // \" of it\n", []),
]
# Text of Python files, lines that must be reported.
PLANTED_PYTHON = [
    ("# Of a stream.\na = 1\n", [1]),
    ("a = 1  # of it\n", [1]),
    ("#: The same in pieces.\na = 1\n", [1]),
    ('"""What the tests share."""\n', [1]),
    ('#!/usr/bin/env python3\n# A licence.\n\n"""What the tests share.\n\nMore.\n"""\nimport sys\n', [4]),
    ("def f():\n    r'''Those of it.'''\n", [2]),
    ("class A:\n    'As above.'\n\n    a = 1  # likewise\n", [2, 4]),
    ('a = 1\n"""The same in bytes."""\n', [2]),
    ("a = 1  # bytes of\n       # what is copied\nb = 1  # of these\n", [3]),
    ("# Bytes.\n\n# Of all.\na = 1\n", [3]),
    # Right comments must pass, or the check would prove nothing.
    ("# Bytes of a block, the sum\n# of all parts.\na = 1\n", []),
    ("a = 1  # bytes, and\n       # what follows\n", []),
    ('a = "# of it", """\n# What it is\n"""\n', []),
    ("f(\n    'of it',\n    'What it is')\nb = 'the same'\n", []),
    ('def f():\n    """Bytes.\n\n    Of all.\n    """\n    return "Of it"\n', []),
    ("# of_each is a name\na = 1  # offset of it\n", []),
]
LEFT_OUT = ["docs/planted.hpp", "scripts/planted.py", "cmake/planted.cpp", "core/planted.md", "tests/planted.txt"]


def check(root):
    """(what it ends with, what it prints)"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = check_comments.main(["check_comments.py", str(root)])
    return code, out.getvalue()


def try_planted(root, name, text, lines):
    """An explanation of what went wrong, or None."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    code, output = check(root)
    file.unlink()
    reported = [int(l.split(":")[1]) for l in output.splitlines() if l.startswith(f"{name}:") and ": comment: " in l]
    if reported == lines and code == (1 if lines else 0):
        return None
    return f"expected lines {lines} of {name}, got {reported}, ended with {code}:\n{text}"


def main():
    with tempfile.TemporaryDirectory(prefix="tandem_comments_") as folder:
        root = Path(folder) / "tree"
        (root / "core").mkdir(parents=True)
        (root / "core/right.hpp").write_text("/// Number of parts.\nint a;\n", encoding="utf-8")
        outcomes = [try_planted(root, f"core/base/planted{suffix}", text, lines)
                    for text, lines in PLANTED for suffix in sorted(check_comments.CPP)]
        outcomes += [try_planted(root, "python/planted.py", text, lines) for text, lines in PLANTED_PYTHON]
        for top in check_comments.FOLDERS:
            outcomes.append(try_planted(root, f"{top}/planted.hpp", *PLANTED[0]))
            outcomes.append(try_planted(root, f"{top}/planted/planted.py", *PLANTED_PYTHON[0]))
        outcomes += [try_planted(root, name, PLANTED[0][0], []) for name in LEFT_OUT]
        empty_code, _ = check(Path(folder) / "nothing")
    outcomes.append("passed where there is no tree at all" if empty_code == 0 else None)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
