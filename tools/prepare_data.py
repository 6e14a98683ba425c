#!/usr/bin/env python3
"""Text to a token file for tandem: NAME.bin (uint16 or uint32) and NAME.json beside it.

    tools/prepare_data.py --tokenizer DIR|NAME --out data/train.bin text.txt folder/ ...

The tokenizer is a Hugging Face one (`pip install transformers`, or a folder with tokenizer.json and
`pip install tokenizers`). Folders are read recursively in byte order of path; after each file comes the
tokenizer's end-of-text token, where it has one (--no-separator leaves it out).
"""
import argparse
import array
import json
import os
import pathlib
import sys


def fail(message):
    sys.exit(f"prepare_data.py: error: {message}")


def files_of(name):
    path = pathlib.Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        fail(f"{name}: no such file or folder")
    found = [p for p in path.rglob("*") if p.is_file() and not p.is_symlink()]
    return sorted(found, key=lambda p: os.fsencode(p))


def load_tokenizer(name):
    """Returns (encode: str -> list of ids, vocabulary size, end-of-text id or None)."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        AutoTokenizer = None
    if AutoTokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return lambda text: tokenizer.encode(text, add_special_tokens=False), len(tokenizer), tokenizer.eos_token_id
    file = pathlib.Path(name) / "tokenizer.json" if pathlib.Path(name).is_dir() else pathlib.Path(name)
    if not file.is_file():
        fail(f"{name}: no tokenizer.json there; install transformers to load tokenizers by name")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail("neither transformers nor tokenizers is installed; try pip install tokenizers")
    tokenizer = Tokenizer.from_file(str(file))
    ends = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|end_of_text|>", "</s>"))
    return (lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.get_vocab_size(),
            next((e for e in ends if e is not None), None))


def main():
    parser = argparse.ArgumentParser(description="Text to a token file for tandem.")
    parser.add_argument("--tokenizer", required=True, help="Hugging Face name, folder, or tokenizer.json")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="the .bin to write")
    parser.add_argument("--no-separator", action="store_true", help="no end-of-text token between files")
    parser.add_argument("inputs", nargs="+", help="text files and folders")
    arguments = parser.parse_args()
    if arguments.out.suffix != ".bin":
        fail(f"--out {arguments.out}: the name must end in .bin")
    encode, vocabulary, end = load_tokenizer(arguments.tokenizer)
    dtype, code = ("uint16", "H") if vocabulary <= 1 << 16 else ("uint32", "I")
    total = 0
    beside = arguments.out.with_suffix(".bin.tmp")
    with beside.open("wb") as out:
        for name in arguments.inputs:
            for file in files_of(name):
                ids = encode(file.read_text(encoding="utf-8", errors="replace"))
                if end is not None and not arguments.no_separator:
                    ids.append(end)
                tokens = array.array(code, ids)
                if sys.byteorder == "big":
                    tokens.byteswap()
                tokens.tofile(out)
                total += len(ids)
    description = {"dtype": dtype, "vocab_size": vocabulary, "tokens": total, "tokenizer": arguments.tokenizer}
    arguments.out.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")
    beside.replace(arguments.out)
    print(f"{total} tokens of {dtype} in {arguments.out}")


if __name__ == "__main__":
    main()
