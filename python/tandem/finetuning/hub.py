"""The hub of Hugging Face: its names, its local cache, and its failures as refusals. Needs the package huggingface_hub."""
from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .refusal import Refusal

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
#: Packages whose exceptions are those of a connection, whichever the hub's package uses.
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp")
_SECONDS_BETWEEN_LINES = 2.0


def is_hub_name(name: str) -> bool:
    """Whether it can be a name of the hub: "org/name"."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def package(name: str) -> Any:
    """The package huggingface_hub, for what is called `name`. Raises Refusal where it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        raise Refusal(f"{name}: the package huggingface_hub is not installed; pip install 'tandem-trainer[hf]'", 2) from None
    return huggingface_hub


def is_offline(offline: bool) -> bool:
    """Whether nothing may be downloaded: by the command, or by HF_HUB_OFFLINE."""
    from huggingface_hub import constants
    return offline or bool(constants.HF_HUB_OFFLINE)


def cached_names(kind: str) -> list[str]:
    """Names of the models ("models") or data sets ("datasets") in the hub's local cache."""
    try:
        from huggingface_hub import constants
        found = sorted(Path(constants.HF_HUB_CACHE).glob(f"{kind}--*--*"))
    except (ImportError, OSError):
        return []
    return [folder.name.removeprefix(f"{kind}--").replace("--", "/", 1) for folder in found]


def cached_snapshot(name: str) -> Path | None:
    """Folder of a model in the local cache, at its branch main, as the program finds it; None where it is not there."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    place = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    folder = Path(place).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if is_hub_name(name) and (snapshot / "config.json").is_file() else None


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Names that may be meant, the likeliest first, three at most; compared whole and without what is before the last slash."""
    plain: dict[str, list[str]] = {}
    for each in known:
        for form in {each.lower(), each.lower().rpartition("/")[2]}:
            plain.setdefault(form, []).append(each)
    typed = name.lower()
    close = [*difflib.get_close_matches(typed, plain, 3, 0.75), *difflib.get_close_matches(typed.rpartition("/")[2], plain, 3, 0.75)]
    return list(dict.fromkeys(each for form in close for each in plain[form]))[:3]


def did_you_mean(names: list[str]) -> str:
    """Words for names that may be meant; empty where there are none."""
    return f"did you mean {' or '.join(names)}? " if names else ""


def failure(error: Exception, what: str, near: list[str]) -> Refusal:
    """The refusal for an exception of the hub's packages. `what`: "MODEL org/name" or the like; `near`: names that may be meant."""
    from huggingface_hub import constants, errors
    kind, _, name = what.partition(" ")
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'DATA' else ''}{name.partition(':')[0]}"
    if isinstance(error, errors.GatedRepoError):
        return Refusal(f"{what}: it is gated, and the hub gives no access ({_status(error)}); ask for access at {page}, "
                       "then hf auth login", 2)
    if isinstance(error, errors.RepositoryNotFoundError):
        return Refusal(f"{what}: the hub has none of this name, or it is private ({_status(error)}); {did_you_mean(near)}"
                       "look at the spelling, or hf auth login for a private one", 2)
    if isinstance(error, errors.HfHubHTTPError) and _status(error) in (401, 403):
        return Refusal(f"{what}: the hub gives no access ({_status(error)}); hf auth login with a token that may read it", 2)
    written = _of_writing(error, what)
    if written is not None:
        return written
    if is_of_network(error):
        return Refusal(f"{what}: the hub at {constants.ENDPOINT} does not answer as it should ({_one_line(error)}); give the command again "
                       "when it is reached: files that are whole stay", 5)
    return Refusal(f"{what}: cannot be read from the hub ({_one_line(error)}); give the command again, or name a folder", 5)


def is_of_network(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, is of a connection or of the hub's server."""
    while error is not None:
        if isinstance(error, ConnectionError) or type(error).__module__.split(".")[0] in _CLIENTS:
            return True
        if type(error).__name__ in ("HfHubHTTPError", "OfflineModeIsEnabled", "XetDownloadError"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _of_writing(error: BaseException, what: str) -> Refusal | None:
    """The refusal for an exception that is, or was raised from, a failure to write; None of any other."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL | _NOT_WRITABLE:
            place = f" {seen.filename}" if seen.filename else ""
            if seen.errno in _FULL:
                return Refusal(f"{what}: cannot write{place}: the disk is full; make room, or set HF_HOME to a folder on another disk, "
                               "and give the command again", 7)
            return Refusal(f"{what}: cannot write{place}: {seen.strerror}; set HF_HOME to a folder that may be written", 7)
        seen = seen.__cause__ or seen.__context__
    return None


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class _Nowhere(io.StringIO):
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


def bars_as_lines(progress: Callable[[str], None], what: str, total: int) -> Any:
    """A class of progress bars, as tqdm's, that writes none and tells by lines how many bytes have come of `total`."""
    tqdm: Any = importlib.import_module("tqdm").tqdm

    class Lines(tqdm):  # type: ignore[misc]
        lock, most, told = threading.Lock(), 0, time.monotonic()

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            super().__init__(*arguments, **{**keywords, "file": _Nowhere()})

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B":
                self._tell()
            return True

        def _tell(self) -> None:
            with Lines.lock:
                Lines.most = max(Lines.most, int(self.n))
                if Lines.most > 0 and time.monotonic() - Lines.told >= _SECONDS_BETWEEN_LINES:
                    Lines.told = time.monotonic()
                    progress(f"{what}: {gigabytes(Lines.most)} of {gigabytes(total)}")

    return Lines


def gigabytes(count: int) -> str:
    """Bytes for people, in the hub's units of 10^9."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
