"""Finding the model that a user names: a folder, or a model of the hub, from its local cache or downloaded."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import hub
from .model_folder import (
    ADAPTER_FILES,
    INDEX,
    SMALL_FILES,
    WEIGHTS,
    base_of,
    check_folder,
    read_config,
    refuse_adapter,
    refuse_other_formats,
    refuse_without_tokenizer,
    shards_of,
)
from .refusal import Refusal

_BRANCH = "main"
#: Bytes that are left free on the disk of the cache.
_MARGIN = 1 << 28


def find_model(name: str, *, revision: str | None, offline: bool, progress: Callable[[str], None], frozen: bool = False) -> Path:
    """Folder of a model: the folder of that name, else the model `org/name` of the hub, at its branch, tag or commit `revision`
    ("main"). What of it is missing in the local cache is downloaded, unless `offline`: configuration, tokenizer and safetensors.
    Where the hub cannot be reached, the model is taken as it is in the cache.

    Blocks while files come, and tells of them by `progress`. An interrupted download goes on at the next call with the files that
    are not whole. `frozen`: whether its weights are not trained, and may be quantized. Raises Refusal where there is no such model, or it
    cannot be trained."""
    what = f"MODEL {name}"
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise Refusal(f"{what}: it is a folder, which has no revision {revision}; leave --revision out", 2)
        check_folder(folder, what, frozen)
        return folder
    if folder.exists():
        raise Refusal(f"{what}: it is a file; name the folder that holds config.json, tokenizer and *.safetensors", 2)
    near = hub.nearest(name, [*hub.cached_names("models"), *_folders_near(folder)])
    if not hub.is_hub_name(name):
        raise Refusal(f"{what}: there is no such folder, and it is no name of the hub; {hub.did_you_mean(near)}name a folder, or org/name", 2)
    hub.package(what)
    if hub.is_offline(offline):
        return _from_cache(name, revision or _BRANCH, near, "and nothing may be downloaded (offline)", 2, frozen)
    return _Download(name, revision or _BRANCH, near, progress, frozen).folder()


def _folders_near(folder: Path) -> list[str]:
    """Folders of models beside the one that is missing."""
    try:
        beside = [path for path in folder.parent.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return []
    return [str(path) for path in sorted(beside)]


def _from_cache(name: str, revision: str, near: list[str], why: str, code: int, frozen: bool) -> Path:
    """The model as it is in the hub's local cache. Raises Refusal with `why` and `code` where it is not there, or not whole."""
    from huggingface_hub import constants, snapshot_download
    what = f"MODEL {name}"
    try:
        # The listing of a download that was cut off names files that are not wanted: what counts is checked below.
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"]))
    except (OSError, ValueError):
        at = "" if revision == _BRANCH else f" at revision {revision}"
        raise Refusal(f"{what}: it is not in the local cache {constants.HF_HUB_CACHE}{at}, {why}; {hub.did_you_mean(near)}get it where there is a "
                      f"network: hf download {name}{'' if revision == _BRANCH else f' --revision {revision}'}", code) from None
    try:
        check_folder(folder, what, frozen)
    except Refusal as refusal:
        raise Refusal(f"{str(refusal).partition(';')[0]} in the local cache, {why}; get it where there is a network: hf download {name}",
                      code) from None
    return folder


class _Download:
    """Download of a model in two parts: what decides whether it can be trained, then its weights."""

    def __init__(self, name: str, revision: str, near: list[str], progress: Callable[[str], None], frozen: bool) -> None:
        self._name, self._revision, self._near, self._progress, self._frozen = name, revision, near, progress, frozen
        self._what = f"MODEL {name}"

    def folder(self) -> Path:
        """The folder of the cache, with all that is needed."""
        try:
            sizes = self._list()
        except Refusal as refusal:
            if refusal.code != 5:
                raise
            folder = _from_cache(self._name, self._revision, self._near, f"and {_reason(refusal)}", 5, self._frozen)
            self._progress(f"{self._what}: taken from the local cache, as the hub cannot be reached")
            return folder
        if not any(name in sizes for name in ADAPTER_FILES):  # an adapter has no config.json of its own
            self._require_config(sizes)
        folder = self._get([name for name in sizes if self._is_small(name)], sizes)
        refuse_adapter(sizes, self._what, base_of(folder), f"DIR, where hf download {self._name} --local-dir DIR has put it,")
        read_config(folder / "config.json", self._what, self._frozen)
        refuse_other_formats(sizes, self._what, self._name)
        refuse_without_tokenizer(sizes, self._what, self._name)
        weights = shards_of(folder / INDEX, self._what) if INDEX in sizes else [WEIGHTS]
        missing = [name for name in weights if name not in sizes]
        if missing:
            raise Refusal(f"{self._what}: its index names {missing[0]}, which the hub does not have; name another model", 4)
        self._require_room(folder, weights, sizes)
        self._get(weights, sizes)
        check_folder(folder, self._what, self._frozen)
        return folder

    def _list(self) -> dict[str, int]:
        """Bytes of each file that the hub has at the revision. Raises Refusal, code 5 where the hub cannot be reached."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError
        api = HfApi()
        try:
            found = api.model_info(self._name, revision=self._revision, files_metadata=True)
        except RevisionNotFoundError:
            raise self._without_revision(api) from None
        except Exception as error:
            raise hub.failure(error, self._what, self._near) from None
        return {file.rfilename: int(file.size or 0) for file in found.siblings or ()}

    def _without_revision(self, api: Any) -> Refusal:
        try:
            refs = api.list_repo_refs(self._name)
            known = [ref.name for ref in (*refs.branches, *refs.tags)]
        except Exception:
            known = []
        has = f"it has {', '.join(known[:8])}: name one by --revision" if known else "name another by --revision"
        return Refusal(f"{self._what}: the hub has no branch, tag or commit '{self._revision}' of it; {has}", 2)

    def _require_config(self, sizes: dict[str, int]) -> None:
        if "config.json" not in sizes:
            refuse_other_formats(sizes, self._what, self._name)
            raise Refusal(f"{self._what}: the hub has no config.json of it, so it is no model of transformers; name another", 2)

    @staticmethod
    def _is_small(name: str) -> bool:
        return name in (*SMALL_FILES, INDEX, ADAPTER_FILES[0]) or name.startswith("additional_chat_templates/") and name.endswith(".jinja")

    def _require_room(self, folder: Path, weights: list[str], sizes: dict[str, int]) -> None:
        """Refuses before a download for which the disk has no room."""
        needed = sum(sizes[name] for name in weights if not (folder / name).exists())
        free = shutil.disk_usage(folder).free
        if needed and needed + _MARGIN > free:
            raise Refusal(f"{self._what}: {hub.gigabytes(needed)} of weights are to be downloaded, and the disk of {folder} has "
                          f"{hub.gigabytes(free)} free; make room, or set HF_HOME to a folder on another disk", 7)

    def _get(self, names: list[str], sizes: dict[str, int]) -> Path:
        """Downloads files that the cache does not have; returns the folder of the cache."""
        from huggingface_hub import snapshot_download
        total = sum(sizes[name] for name in names)
        if WEIGHTS in names or any(name.endswith(".safetensors") for name in names):
            self._progress(f"{self._what}: {len(names)} files of weights, {hub.gigabytes(total)}, from the hub or its local cache")
        try:
            return Path(snapshot_download(self._name, revision=self._revision, allow_patterns=names,
                                          tqdm_class=hub.bars_as_lines(self._progress, self._what, total)))
        except Exception as error:
            raise hub.failure(error, self._what, self._near) from None


def _reason(refusal: Refusal) -> str:
    """Why the hub could not be read, without what to do."""
    return str(refusal).partition(": ")[2].partition(";")[0]
