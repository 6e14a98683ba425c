#!/usr/bin/env python3
"""Entropy of a byte given the byte before it, in nats per byte, over text files.

The counts are those of the text itself, so no bigram model, however it was trained, can have a lower
mean loss on these bytes: a model that does has learnt more than pairs of letters.

Example: tools/bigram_entropy.py build/quickstart/text/held-out
"""
import argparse
import math
import os
import sys
from collections import Counter
from pathlib import Path


def contents(paths):
    """Bytes of files, and of files below folders in byte order of path."""
    for path in paths:
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file() and not f.is_symlink()]
        for file in sorted(files, key=os.fsencode):
            yield file.read_bytes()


def conditional_entropy(texts):
    """H(next | previous) in nats over the pairs inside each text; ValueError without any pair."""
    pairs = Counter()
    for text in texts:
        pairs.update(zip(text, text[1:]))
    total = sum(pairs.values())
    if total == 0:
        raise ValueError("no text")
    previous = Counter()
    for (first, _), count in pairs.items():
        previous[first] += count
    return sum(count * math.log(previous[first] / count) for (first, _), count in pairs.items()) / total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    args = parser.parse_args()
    try:
        print(f"{conditional_entropy(contents(args.paths)):.4f}")
    except (OSError, ValueError) as error:
        print(f"bigram_entropy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
