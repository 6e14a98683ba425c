#!/usr/bin/env python3
"""Text, instructions and chats to token files for tandem, with a Hugging Face tokenizer.

    tools/prepare_data.py --tokenizer model/ --out data/train.bin corpus/ more.txt
    tools/prepare_data.py --tokenizer model/ --out data/chat.bin --layout rows --row-length 513 chat.jsonl
    tools/prepare_data.py --tokenizer model/ --out data/chat.bin --layout packed --row-length 4097 chat.jsonl

Writes NAME.bin (uint16, or uint32 for vocabularies beyond 65,536), NAME.json beside it, and NAME.mask.bin
where not every token is a target: a byte per token, 1 where it is one, in packed rows 2 at the first token of a record.
With --validation R also NAME-validation.bin and what lies beside it. Existing files of these names, and a folder
NAME.parts, are replaced only if this tool wrote them and none of them is an input; else nothing is done (exit 2).

Inputs are files and folders (read recursively in byte order of path; links, hidden files, outputs of this tool and
descriptions of data sets in them are left out). Names are read in any case:
  .jsonl .ndjson .json    a record a line; an array of records; also with .gz or .zst behind
  .parquet .arrow         a record a row (needs the Python package pyarrow)
  every other name        one document of text in UTF-8; also with .gz or .zst behind

Records, recognised by their fields:
  messages   {"messages": [{"role": "...", "content": "..."}], "tools": [...]}   what the assistant says is learnt
  sharegpt   {"conversations": [{"from": "human", "value": "..."}]}              likewise
  alpaca     {"instruction": "...", "input": "...", "output": "..."}             the output
  prompt     {"prompt": "...", "completion": "..."}, as text or as messages      the completion
  text       {"text": "..."}                                                     all
  preference {"prompt": "...", "chosen": "...", "rejected": "..."}, as text or as messages; a pair for train --objective dpo.
             Without a prompt, or with whole conversations, the common beginning of both is the prompt
Chats are written by the template that the tokenizer's folder brings (needs the Python package jinja2, which runs it in its
sandbox), else with a line <|role|> before each content. See docs/data.md.

Layouts: stream joins documents by the end token, to be cut in windows; rows gives each record a row of its own,
padded, and never joins two; packed puts several whole records into a row, which do not see each other, and pads what
is left of it. Work is done in parts of --part-bytes of input, in parallel. They lie in NAME.parts,
which is removed at the end, also after an error, Ctrl-C or SIGTERM. After SIGKILL or a power failure the same command
goes on with the parts that are missing.

Exit codes: 2 for a mistake in flags or data, 7 where an output cannot be written, 128+n where signal n ends it.
"""
import argparse
import os
import signal
import sys
from pathlib import Path

from preparation.errors import Fault, Interrupted, Refusal, WriteFailure, fault_of
from preparation.records import FORMATS
from preparation.run import Settings, prepare
from preparation.signals import Signals
from preparation.templates import DATE


def settings(arguments, program):
    """Settings of the command line."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.replace("tools/prepare_data.py", program),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="files and folders")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder that holds one")
    parser.add_argument("--out", required=True, type=Path, metavar="NAME.bin",
                        help="the .bin to write; existing files are replaced only if this tool wrote them")
    parser.add_argument("--format", dest="form", choices=FORMATS, default="auto",
                        help="of the records (default auto: by their fields)")
    parser.add_argument("--show", type=int, default=1, metavar="N",
                        help="show the first N records as the model will see them (default 1; 0: none)")
    parser.add_argument("--validation", type=float, default=0.0, metavar="R",
                        help="share of the records for NAME-validation.bin, such as 0.02 (default: none)")
    parser.add_argument("--layout", choices=("stream", "rows", "packed"), help="default stream, of preferences rows")
    parser.add_argument("--row-length", type=int, metavar="TOKENS",
                        help="of rows, also packed ones: one more than train's --seq-len; longer records are cut (default: the "
                        "longest)")
    parser.add_argument("--end-token", metavar="TOKEN",
                        help="behind each text (default: the one that the tokenizer's folder names)")
    parser.add_argument("--no-end-token", action="store_true", help="nothing between documents")
    parser.add_argument("--no-special-tokens", dest="special_tokens", action="store_false",
                        help="no token before a text, even where the tokenizer itself adds one")
    parser.add_argument("--date", default=DATE, metavar="YYYY-MM-DD",
                        help=f"today, for chat templates that write it (default {DATE}, so that tokens stay the same)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--part-bytes", type=int, default=1 << 24, help="input of a part (default 16 MiB)")
    return Settings(**vars(parser.parse_args(arguments)))


def main(arguments=None, program="tools/prepare_data.py"):
    """Runs the command, by the process's arguments unless others are given; returns its exit code."""
    given = settings(arguments, program)
    name = "tandem" if program.startswith("tandem ") else "prepare_data.py"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    signals = Signals()
    try:
        prepare(given, signals)
    except Refusal as refusal:
        return ended(name, refusal, 2)
    except WriteFailure as failure:
        return ended(name, failure, 7)
    except Interrupted as interrupted:
        number = interrupted.args[0]
        return ended(name, f"ended by {signal.Signals(number).name}: nothing was written; give the command again", 128 + number)
    except OSError as error:
        return ended(name, error, 1)
    except Fault as fault:
        return ended(name, fault, 1)
    except MemoryError:
        return ended(name, "too little memory; try a smaller --row-length or --part-bytes, or fewer --workers", 2)
    except Exception as error:
        return ended(name, fault_of(error), 1)
    return 0


def ended(name, why, code):
    """Writes one line on standard error; returns the exit code."""
    print(f"{name}: error: {' '.join(str(why).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
