#!/usr/bin/env python3
"""Split folders of text into a training part and whole held-out files.

Links are not followed, and files of the same content are taken once. A file may be held out when it
shares few runs of eight words with every other file, so that no sibling version of it is trained on;
of those, files are taken in byte order of their path until the share asked for is reached.

Example: tools/prepare_text.py /usr/share/common-licenses --out build/quickstart/text
writes OUT/train/ and OUT/held-out/, and OUT/split.json with what was decided.
"""
import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

RUN = 8  # words
WORD = re.compile(rb"\w+")


def regular_files(folders):
    """Files below `folders` in byte order of path; links are neither followed nor taken."""
    found = []
    for folder in folders:
        for parent, _, names in os.walk(folder, followlinks=False):
            paths = [Path(parent, name) for name in names]
            found += [path for path in paths if path.is_file() and not path.is_symlink()]
    return sorted(found, key=os.fsencode)


def without_duplicates(paths):
    """(path, content) of the first file of each content, and the paths left out."""
    seen, unique, duplicates = set(), [], []
    for path in paths:
        content = path.read_bytes()
        key = hashlib.sha256(content).digest()
        if not content or key in seen:
            duplicates.append(path)
            continue
        seen.add(key)
        unique.append((path, content))
    return unique, duplicates


def word_runs(content):
    words = WORD.findall(content.lower())
    return {hash(tuple(words[i:i + RUN])) for i in range(len(words) - RUN + 1)}


def overlaps(contents):
    """For each content, the share of its word runs that some other content has too."""
    runs = [word_runs(content) for content in contents]
    holders = {}
    for own in runs:
        for run in own:
            holders[run] = holders.get(run, 0) + 1
    return [sum(holders[run] > 1 for run in own) / max(len(own), 1) for own in runs]


def choose_held_out(files, max_overlap, share):
    """Indices of the files to hold out."""
    shared = overlaps([content for _, content in files])
    wanted = share * sum(len(content) for _, content in files)
    chosen, taken = [], 0
    for i, (_, content) in enumerate(files):
        if shared[i] <= max_overlap and taken < wanted:
            chosen.append(i)
            taken += len(content)
    return chosen


def flat_name(path, taken):
    name = path.name
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def write(folder, files):
    folder.mkdir(parents=True)
    taken, names = set(), []
    for path, content in files:
        names.append(flat_name(path, taken))
        (folder / names[-1]).write_bytes(content)
    return names


def refuse_other_files(out, folders):
    """Ends with 2 where --out holds more than an earlier run left, or holds what is to be read."""
    written = {"train", "held-out", "split.json"}
    if any(out.resolve() == folder.resolve() or out.resolve() in folder.resolve().parents for folder in folders):
        why = "it holds what is to be read"
    elif out.is_symlink() or (out.exists() and not out.is_dir()):
        why = "it is no folder"
    elif out.is_dir() and (names := {path.name for path in out.iterdir()}) and (names - written or "split.json" not in names):
        why = f"it holds files that are not of this tool: {' '.join(sorted(names - written)[:3]) or 'no split.json'}"
    else:
        return
    print(f"prepare_text: --out {out}: {why}; name another folder", file=sys.stderr)
    sys.exit(2)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of text")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; replaced where this tool wrote it")
    parser.add_argument("--max-overlap", type=float, default=0.10,
                        help="a held-out file shares at most this part of its eight-word runs (default 0.10)")
    parser.add_argument("--share", type=float, default=0.15, help="part of all bytes to hold out (default 0.15)")
    return parser.parse_args()


def main():
    args = arguments()
    refuse_other_files(args.out, args.folders)
    files, duplicates = without_duplicates(regular_files(args.folders))
    chosen = choose_held_out(files, args.max_overlap, args.share)
    if not chosen or len(chosen) == len(files):
        print(f"prepare_text: cannot split {len(files)} files: none differs enough from the others; "
              "try more folders or a larger --max-overlap", file=sys.stderr)
        return 1
    shutil.rmtree(args.out, ignore_errors=True)
    held = [files[i] for i in chosen]
    rest = [file for i, file in enumerate(files) if i not in set(chosen)]
    split = {"train": write(args.out / "train", rest), "held_out": write(args.out / "held-out", held),
             "train_bytes": sum(len(content) for _, content in rest),
             "held_out_bytes": sum(len(content) for _, content in held),
             "duplicates_left_out": [path.name for path in duplicates]}
    (args.out / "split.json").write_text(json.dumps(split, indent=2) + "\n")
    print(f"train: {len(rest)} files, {split['train_bytes']} bytes: {' '.join(split['train'])}")
    print(f"held out: {len(held)} files, {split['held_out_bytes']} bytes: {' '.join(split['held_out'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
