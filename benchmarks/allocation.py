"""Counts the bytes that PyTorch allocates, and lets the heap of the C library keep freed memory."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def keep_freed_memory() -> None:
    """Keeps freed memory, as a GPU's allocator does; glibc returns large tensors to the system, and gets them page by
    page again. By mallopt(3): no tensor has a mapping of its own, and the heap does not shrink."""
    allocator, most_mappings, trim_threshold = ctypes.CDLL(None), -4, -1
    if not (allocator.mallopt(most_mappings, 0) and allocator.mallopt(trim_threshold, -1)):
        print("this C library does not keep freed memory on request")


class AllocationPeak(TorchDispatchMode):
    """Bytes of all storages that live at once, at most; those of `inputs`, and of the meta device, are not counted."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address not in self._known:
            self._known.add(address)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.alive -= size
