"""A file that one rank saves, and its copy in host memory, from which it is written while training continues."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.distributed.pinned_memory import pinned_bytes


@dataclass(frozen=True)
class ShareFile:
    """A file of this rank's share of a checkpoint, and its tensors."""

    name: str
    tensors: dict[str, torch.Tensor]
    is_copy: bool = False  # the tensors are not the engine's own

    @property
    def is_optimizer_state(self) -> bool:
        return self.name.endswith(".safetensors")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def copy_nbytes(self) -> int:
        """Return the bytes of host memory that a copy needs."""
        return sum(pinned_bytes(t.nbytes) if _is_on_gpu(t) else t.nbytes for t in self.tensors.values())

    def copy(self, before: ShareFile | None) -> ShareFile:
        """Return a copy with tensors in host memory. Copies from a GPU are asynchronous: synchronize before reading.

        before: an earlier copy, whose tensors are reused where shape and dtype match: allocating costs more than
        copying.
        """
        if self.is_copy:
            return self
        there = {} if before is None else before.tensors
        copies = {}
        for name, tensor in self.tensors.items():
            same = name in there and (there[name].shape, there[name].dtype) == (tensor.shape, tensor.dtype)
            copies[name] = there[name].copy_(tensor, non_blocking=True) if same else _copy_to_host(tensor)
        return ShareFile(self.name, copies, is_copy=True)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """From a GPU into pinned memory: a copy into pageable memory is slow and waits for each tensor."""
    if not _is_on_gpu(tensor):
        return tensor.to("cpu", copy=True)
    return _allocate_pinned(tensor).copy_(tensor, non_blocking=True)


def _allocate_pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
