"""Files to read: those named, and those of the folders named, without what is no data."""
import os
import sys
from pathlib import Path

from .errors import Refusal
from .outputs import identity, is_own, is_own_file, is_own_folder, is_regular

# Files that describe a data set of the Hugging Face hub, or one written by the package datasets.
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
# Suffixes of files of records, each perhaps followed by one of COMPRESSIONS; in lower case.
LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow", ".feather")
VALUES = (".csv", ".tsv")  # tables that are not read
COMPRESSIONS = (".gz", ".zst")


def stem_of(path):
    """Name of a file in lower case, without a suffix of compression."""
    name = Path(path).name.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return name


def holds_records(path):
    """Whether a file holds records, by its name; every other file is a document of text."""
    return stem_of(path).endswith(LINES + TABLES)


def is_front_matter(path):
    """Whether a file begins like the card of a data set on the hub: with a block of YAML."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(b"---\n")
    except OSError:
        return False


def is_card(path, found):
    """Whether a file is the card of a data set, whose records lie beside it or in folders there."""
    beside = (path.parent in other.parents for other in found if holds_records(other))
    return path.name == "README.md" and any(beside) and is_front_matter(path)


def metadata_in(names):
    """Names of the files of one folder that describe a data set and are no data themselves."""
    found = {name for name in names if name in DESCRIPTIONS}
    if any(name.endswith(".arrow") for name in names):
        found |= {"state.json"} & set(names)
    return found


class LeftOut:
    """Files that a folder holds and that are not read, by reason."""

    def __init__(self):
        self.outputs, self.hidden, self.metadata, self.empty = [], [], [], []

    def say(self):
        """A line on standard error for each reason."""
        for paths, why in ((self.outputs, "as outputs of this tool"), (self.hidden, "as hidden"),
                           (self.metadata, "as descriptions of a data set"), (self.empty, "as empty")):
            named = sorted({str(path) for path in paths})
            if named:
                more = f" and {len(named) - 6} more" if len(named) > 6 else ""
                print(f"left out, {why}: {', '.join(named[:6])}{more}", file=sys.stderr)


def files_in(folder, taken, left_out):
    """Files of a folder and of those in it, in byte order of path, links not followed. Outputs of this tool, `taken` by
    identity and recognised ones, hidden files and folders, and descriptions of data sets go to `left_out`."""
    found = []
    for root, folders, files in os.walk(folder):
        here = Path(root)
        hidden = [name for name in folders if name.startswith(".")]
        own = [name for name in folders if name not in hidden and is_own_folder(here / name)]
        left_out.hidden += [here / name for name in hidden]
        left_out.outputs += [here / name for name in own]
        folders[:] = [name for name in folders if name not in own and name not in hidden]
        files = [name for name in files if is_regular(here / name)]
        metadata = metadata_in(files)
        for name in files:
            path = here / name
            if name.startswith("."):
                left_out.hidden.append(path)
            elif identity(path) in taken or is_own_file(path):
                left_out.outputs.append(path)
            elif name in metadata:
                left_out.metadata.append(path)
            else:
                found.append(path)
    cards = [path for path in found if is_card(path, found)]
    left_out.metadata += cards
    return sorted(set(found) - set(cards), key=os.fsencode)


def find_inputs(names, outputs):
    """Files to read, in order, and what is left out; refuses inputs that are outputs, and outputs in the place of other
    files. Changes nothing."""
    paths, taken = [Path(name) for name in names], outputs.existing()
    for path in paths:
        if identity(path) in taken:
            raise Refusal(f"--out {outputs.tokens}: {taken[identity(path)]} would be written and is an input ({path}); "
                          "name another --out")
    outputs.refuse_files_of_others()
    found, left_out = [], LeftOut()
    for path in paths:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise Refusal(f"{path}: not a regular file; write what it gives to a file, and name that")
        if not path.is_file() and not path.is_dir():
            raise Refusal(f"{path}: no such file or folder; check the name")
        if is_own(path):
            raise Refusal(f"{path}: an output of this tool, no text; name what it was made of")
        if path.is_file():
            found.append(path)
            continue
        before = len(left_out.outputs)
        files = files_in(path, taken, left_out)
        if not files:
            raise Refusal(f"{path}: it holds no files" +
                          (" but outputs of this tool" if len(left_out.outputs) > before else
                           " but hidden ones and descriptions" if left_out.hidden or left_out.metadata else "") +
                          "; name files or folders of data")
        found += files
    left_out.empty = [path for path in found if path.stat().st_size == 0]
    found = [path for path in found if path.stat().st_size]
    return found, left_out
