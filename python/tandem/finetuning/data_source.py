"""Finding the data that a user names: files and folders as they are, data sets by the package datasets."""
from __future__ import annotations

import datetime
import glob
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import hub
from .refusal import Refusal

#: Ends of names of files that are not read, though they hold records.
_ENDS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather", ".txt", ".md", ".gz", ".zst")
#: Kinds of columns that are no text.
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh")


def find_data(names: Sequence[str], *, split: str, folder: Path, offline: bool, progress: Callable[[str], None]) -> list[Path]:
    """Files and folders of the data that are named. A name that is a file or folder stands for itself; `org/name` and
    `org/name:config` are data sets of the hub, or of the local cache of the package datasets, and their part `split` is written into
    `folder` as JSON lines, whole or not at all. A file that is there from an earlier call is taken as it is.

    Blocks while data comes, and tells of it by `progress`. Without network, or with `offline`, data sets are taken from the local
    cache. Raises Refusal where there is none of the name, of its configuration or of the split, and where it holds no text."""
    return [_found(name, split, folder, offline, progress) for name in names]


def _found(name: str, split: str, folder: Path, offline: bool, progress: Callable[[str], None]) -> Path:
    path = Path(name).expanduser()
    if path.is_file() or path.is_dir():
        return path
    if path.exists():
        raise Refusal(f"DATA {name}: it is no regular file; write what it gives to a file, and name that", 2)
    what, title, config = f"DATA {name}", *_parts(name)
    near = hub.nearest(name, [*hub.cached_names("datasets"), *_beside(path)])
    if not hub.is_hub_name(title) or name.lower().endswith(_ENDS):
        raise Refusal(f"{what}: there is no such file or folder, and it is no name of a data set; {hub.did_you_mean(near)}name a file, "
                      "or org/name", 2)
    file = folder / f"{_file_name(title, config, split)}.jsonl"
    if file.is_file():
        progress(f"{what}: taken from {file}")
        return file
    hub.package(what)
    return _DataSet(title, config, split, what, near, progress).write(file, hub.is_offline(offline))


def _parts(name: str) -> tuple[str, str | None]:
    """Name and configuration."""
    title, colon, config = name.partition(":")
    return title, config if colon else None


def _file_name(title: str, config: str | None, split: str) -> str:
    return re.sub(r"[^\w.-]+", "--", "--".join(part for part in (title, config, split) if part)).strip("-")


def _beside(path: Path) -> list[str]:
    try:
        return [str(each) for each in sorted(path.parent.iterdir()) if each.name[0] != "."]
    except OSError:
        return []


class _DataSet:
    """A data set that is written as JSON lines."""

    def __init__(self, title: str, config: str | None, split: str, what: str, near: list[str], progress: Callable[[str], None]) -> None:
        self._title, self._config, self._split, self._what, self._near, self._progress = title, config, split, what, near, progress

    def write(self, file: Path, offline: bool) -> Path:
        """Writes the file, whole or not at all; returns its path."""
        rows = self._load(offline)
        self._refuse_media(rows)
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for left in file.parent.glob(f".{glob.escape(file.name)}.*.part"):  # by a process that was killed
                left.unlink()
            with part.open("w", encoding="utf-8") as out:
                count = self._write_rows(rows, out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
        except OSError as error:
            raise Refusal(f"{self._what}: cannot write {file}: {error.strerror or error}; make room, or name another --out", 7) from None
        finally:
            part.unlink(missing_ok=True)
        self._progress(f"{self._what}: {count:,} records of its part {self._split} in {file}")
        return file

    def _write_rows(self, rows: Any, out: Any) -> int:
        count = 0
        for count, row in enumerate(self._records(rows), 1):
            out.write(json.dumps(row, ensure_ascii=False, default=self._text_of) + "\n")
        if count == 0:
            raise Refusal(f"{self._what}: its part {self._split} is empty; name another by --split", 4)
        return count

    @staticmethod
    def _records(rows: Any) -> Iterator[dict[str, Any]]:
        """Rows without null fields within a field: these are of other rows."""
        for row in rows.with_format(None):
            yield _without_nulls(row)

    def _text_of(self, value: Any) -> str:
        """A value that JSON has no form for, as text."""
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        raise self._not_text(f"a value of the type {type(value).__name__}")

    def _not_text(self, found: str) -> Refusal:
        return Refusal(f"{self._what}: it holds {found}, and training is on text; name a data set of text, or write its columns of text to a .jsonl "
                       "or .parquet", 4)

    def _refuse_media(self, rows: Any) -> None:
        """Refuses columns that are no text, which the package would decode."""
        for column, feature in rows.features.items():
            kind = _media_in(feature)
            if kind:
                raise self._not_text(f"{kind.lower()}s in its column '{column}'")

    def _load(self, offline: bool) -> Any:
        """The rows of the data set's part."""
        try:
            datasets = importlib.import_module("datasets")
        except ImportError:
            raise Refusal(f"{self._what}: there is no such file, and data sets need the package datasets; pip install datasets", 2) from None
        unreachable = None if offline else self._unreachable()
        if offline or unreachable:
            _go_offline(datasets)
        self._progress(f"{self._what}: from {'the local cache' if offline or unreachable else 'the hub, or its local cache'}")
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(self._title, self._config, split=self._split)
        except Exception as error:
            raise self._refusal(error, offline, unreachable) from None

    def _unreachable(self) -> Refusal | None:
        """Why the hub cannot be reached, which the package datasets would try for long; None where it answers. Raises Refusal where it
        does not have the data set."""
        from huggingface_hub import HfApi
        try:
            HfApi().dataset_info(self._title)
        except Exception as error:
            refusal = hub.failure(error, self._what, self._near)
            if refusal.code != 5:
                raise refusal from None
            return refusal
        return None

    def _refusal(self, error: Exception, offline: bool, unreachable: Refusal | None) -> Refusal:
        """The refusal for an exception of the package datasets, which names its kinds by class and text."""
        text = " ".join(str(error).split())
        listed = re.findall(r"'([^']+)'", text.partition("[")[2].partition("]")[0])
        if text.startswith(("Config name is missing", "BuilderConfig")) or "not found. Available" in text:
            which = f"it has none called '{self._config}'" if self._config else "it has several configurations"
            return Refusal(f"{self._what}: {which}; name one of {self._some(listed, f'{self._title}:')}", 2)
        if text.startswith(("Unknown split", "Bad split")):
            return Refusal(f"{self._what}: it has no part '{self._split}'; name one by --split: {self._some(listed, '')}", 2)
        if "scripts are no longer supported" in text:
            return Refusal(f"{self._what}: it is made by a program of its own, which is not run; name one of files (Parquet, JSON lines)", 4)
        if type(error).__name__ == "DatasetNotFoundError" and "gated" in text:
            from huggingface_hub import constants
            return Refusal(f"{self._what}: it is gated, and the hub gives no access; ask for access at {constants.ENDPOINT}/datasets/{self._title}, "
                           "then hf auth login", 2)
        if unreachable:
            why = str(unreachable).partition(": ")[2].partition(";")[0]
            return Refusal(f"{self._what}: it is not in the local cache, and {why}; give the command again when it is reached", 5)
        if offline:
            return Refusal(f"{self._what}: it is not in the local cache, and nothing may be downloaded (offline); {hub.did_you_mean(self._near)}"
                           "load it once where there is a network", 2)
        if type(error).__name__ in ("EmptyDatasetError", "DataFilesNotFoundError"):
            return Refusal(f"{self._what}: the hub has no files of it that can be read; name one of Parquet or JSON lines", 4)
        return hub.failure(error, self._what, self._near)

    @staticmethod
    def _some(names: list[str], before: str) -> str:
        return ", ".join(before + name for name in names[:8]) + (", ..." if len(names) > 8 else "") if names else "those of its page"


def _go_offline(datasets: Any) -> None:
    """Takes data sets from the local cache from here on."""
    from huggingface_hub import constants
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True


def _media_in(feature: Any) -> str | None:
    """Kind of pictures, sound or film in a column; None where there is none."""
    if type(feature).__name__ in _MEDIA:
        return type(feature).__name__
    inner = feature.values() if isinstance(feature, dict) else feature if isinstance(feature, list) else [getattr(feature, "feature", None)]
    return next((kind for each in inner if each is not None and (kind := _media_in(each))), None)


def _without_nulls(value: Any) -> Any:
    """A row whose null fields within a field are left out: in a column of structs a field that one row has all have, as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
