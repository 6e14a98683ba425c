"""Bytes of the tensors that operations make, while they live."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: An allocator of a GPU gives out memory in multiples of this.
_GRANULE = 512


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the memory of tensors which operations within make, on one device: `now`, and `peak`. Memory that
    operations are given, such as weights, does not count, nor views of it, nor scratch memory inside of an operation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._known: dict[int, Any] = {}  # by the storage's id, as long as it lives
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        for tensor in tree_leaves((arguments, keywords)):
            self._note(tensor, 0)
        made = function(*arguments, **keywords)
        for tensor in tree_leaves(made):
            self._note(tensor, _GRANULE)
        return made

    def _note(self, tensor: Any, granule: int) -> None:
        """Counts a tensor's memory, unless it is known; with `granule` 0 it becomes known and does not count."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device.type or type(tensor) not in _PLAIN:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // granule) * granule if granule else 0
        self._known[key] = weakref.ref(storage, self._forget(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> Any:
        mine = weakref.ref(self)

        def forget(_: Any) -> None:
            found = mine()
            if found is not None and found._known.pop(key, None) is not None:
                found.now -= size
        return forget


_PLAIN = (torch.Tensor, torch.nn.Parameter)
