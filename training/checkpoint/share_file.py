"""A file of what one rank saves, and its copy in the host's memory, from which it is written while training goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.distributed.pinned_memory import pinned_bytes


@dataclass(frozen=True)
class ShareFile:
    """A file of this rank's share, and the tensors that go into it."""

    name: str
    tensors: dict[str, torch.Tensor]
    is_copy: bool = False  # they are not the engine's own

    @property
    def is_optimizer_state(self) -> bool:
        return self.name.endswith(".safetensors")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def copy_nbytes(self) -> int:
        """What a copy takes of the host's memory."""
        return sum(pinned_bytes(t.nbytes) if _is_on_gpu(t) else t.nbytes for t in self.tensors.values())

    def copy(self, before: ShareFile | None) -> ShareFile:
        """With tensors of its own, in the host's memory: those of the copy `before` where they fit. New memory costs
        more than the copying. What comes from a card is there when the card has been waited for."""
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
    """From a card into pinned memory, since a copy into any other is slow and waits for each tensor."""
    if not _is_on_gpu(tensor):
        return tensor.to("cpu", copy=True)
    return _allocate_pinned(tensor).copy_(tensor, non_blocking=True)


def _allocate_pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
