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

# Text, lines that must be reported.
PLANTED = [
    ("/// Of a stream whose kernels go first.\nint a;\n", [1]),
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
    # What is right must pass, or the check would prove nothing.
    ("/// Bytes of a block, the sum\n/// of all parts and\n/// What a line may begin with.\nint a;\n", []),
    ("int a = 0;  ///< bytes of a block, and\n            ///< of its neighbours\n", []),
    ("int a = 0;  // bytes, and\n            // what follows\n", []),
    ("auto a = \"// Of it\", b = R\"(\n// What it is\n/// Of it\n)\";\n", []),
    ("/// Offset in bytes.\n/// Often 0.\nint offset;  ///< offset of it\n", []),
    ("/// The samples.\nint a;  ///< whatever it is\n", []),
    ("/// Whatever the order.\nint a;  // of_each is a name\n", []),
    ("/// of_each counts.\nint a;\n", []),
    ("f(/*windowed=*/false);\n", []),
    ("char a = '\"';  // a quote\nchar b = '/';  // \" of it\n", []),
]
LEFT_OUT = ["tests/core/planted.hpp", "bench/planted.cpp", "examples/planted.cpp", "core/planted.py"]


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
                    for text, lines in PLANTED for suffix in sorted(check_comments.SOURCES)]
        outcomes += [try_planted(root, f"{module}/planted.hpp", *PLANTED[0]) for module in check_comments.FOLDERS]
        outcomes += [try_planted(root, name, PLANTED[0][0], []) for name in LEFT_OUT]
        empty_code, _ = check(Path(folder) / "nothing")
    outcomes.append("passed where there is no tree at all" if empty_code == 0 else None)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
