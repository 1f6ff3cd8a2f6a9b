"""Activation offload: the inputs that recomputation keeps are moved to the host's memory until their backward pass.

A group of layers that is recomputed keeps one tensor, its input (training/pipeline/activation_checkpoint.py). Here it
goes to pinned memory on a stream of its own during the forward pass, and comes back on another: when a group is
recomputed, the input of the one before it, which is next, is already on its way. Only the last group of a chunk waits
for its copy. On the GPU remain the input of a chunk, which holds the gradient that goes back to the stage
before, and its output.

On a CPU the copies are plain ones, in the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

Checkpointed = Callable[..., Any]
Weak = Callable[[], "HostCopy | None"]  # a weak reference


def _no_copy() -> None:
    return None


class HostCopy:
    """A tensor [..] that was moved off the device, and the one that was kept before it in the same pass, which is the
    next to come back."""

    def __init__(self, tensor: torch.Tensor, previous: Weak, streams: CopyStreams | None) -> None:
        self._device, self._previous, self._streams = tensor.device, previous, streams
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=streams is not None)
        self._back: torch.Tensor | None = None
        if streams is None:
            self._host.copy_(tensor)
        else:
            self._left = streams.copy_out(self._host, tensor)

    def take_back(self) -> torch.Tensor:
        """Return the tensor on its device, once; the copy back of the one before it starts."""
        self._start()
        tensor, self._back = self._back, None
        assert tensor is not None
        if self._streams is not None:
            self._streams.wait_for(tensor, self._arrived)
        if (previous := self._previous()) is not None:
            previous._start()
        return tensor

    def _start(self) -> None:
        if self._back is not None:
            return
        if self._streams is None:
            self._back = self._host.clone()
        else:
            self._back, self._arrived = self._streams.copy_back(self._host, self._device, self._left)


class CopyStreams:
    """A stream each way, so that copies overlap with the passes and with each other."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_out(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.cuda.Event:
        """Copy to the host. Returns the event of its end, which also frees the device's memory for others."""
        self._out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)
        return self._out.record_event()

    def copy_back(
        self, host: torch.Tensor, device: torch.device, left: torch.cuda.Event
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        self._back.wait_event(left)
        with torch.cuda.stream(self._back):
            tensor = host.to(device, non_blocking=True)
        return tensor, self._back.record_event()

    def wait_for(self, tensor: torch.Tensor, arrived: torch.cuda.Event) -> None:
        """Make the current stream wait for `arrived` before it uses the tensor."""
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(arrived)
        tensor.record_stream(stream)


class ActivationOffload:
    """Moves the tensors that a checkpointed function keeps. One for all groups of a stage, which run in the order of
    the model."""

    def __init__(self) -> None:
        self._last: Weak = _no_copy  # whoever needs a copy holds it: autograd
        self._streams: CopyStreams | None = None
        self._staying: set[int] = set()

    def wrap(self, checkpoint: Checkpointed) -> Checkpointed:
        """Return `checkpoint` with its saved inputs offloaded: `torch.utils.checkpoint.checkpoint` with its options,
        not reentrant: it saves the inputs as autograd saves any tensor, before it hides those of the layers (torch
        2.13)."""

        def run(function: Checkpointed, *inputs: Any) -> Any:
            tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
            if all(tensor.is_leaf for tensor in tensors):
                self._last = _no_copy  # the first group of a pass
            self._staying = {tensor.data_ptr() for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(function, *inputs)

        return run

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | HostCopy:
        """Positions, which are integers, stay too: all groups share them."""
        if not tensor.is_floating_point() or not tensor.numel() or tensor.data_ptr() in self._staying:
            return tensor
        if tensor.is_cuda and self._streams is None:
            self._streams = CopyStreams(tensor.device)
        copy = HostCopy(tensor, self._last, self._streams if tensor.is_cuda else None)
        self._last = weakref.ref(copy)
        return copy

    def _unpack(self, packed: torch.Tensor | HostCopy) -> torch.Tensor:
        return packed.take_back() if isinstance(packed, HostCopy) else packed
