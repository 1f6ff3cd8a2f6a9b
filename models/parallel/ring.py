"""Ring attention (2310.01889): keys and values are passed around the ranks that split a sequence, and each rank attends
from its own queries to the block that it has while the next one is being received.

Of 2 C equal chunks of a sequence rank i has i and 2 C - 1 - i, so that causal attention is the same work for all: in
each turn half of a rank's queries x keys. Outputs are merged by the log-sum-exp of their scores. The backward pass is a
second round, in which the gradients of keys and values follow their block, one turn later, and end on its rank. A rank
keeps its own queries, keys, values and outputs, and has two blocks at a time. The documents and windows of tokens
follow from integers that every rank has whole.

B micro-batch, H query heads, G heads of keys and values, E head size, C ranks of the group, L = T / C tokens of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from models.parallel.blocks import Block, BlockAttention, SequenceMask
from models.parallel.exchanges import wait_for
from models.parallel.shard import ContextParallel

_BLOCKS, _GRADIENTS = 0, 1  # tags, for backends that need them: two may be in flight between two ranks


class RingAttention:
    """Replaces the attention function of one layer."""

    def __init__(self, parallel: ContextParallel, uses_kernels: bool = True) -> None:
        """uses_kernels: use torch's fused kernels for the blocks that they fit."""
        self._parallel, self._uses_kernels = parallel, uses_kernels

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        sequence_mask: SequenceMask,
        scaling: float,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute query [B, H, T / C, E], key and value [B, G, T / C, E] to [B, T / C, H, E].

        sequence_mask: from the context of the micro-batch. options: further keywords of transformers; the window comes
        with the mask.
        """
        if dropout:
            raise ValueError("ring attention has no dropout")
        output = attend_in_ring(query, key, value, sequence_mask, scaling, self._parallel, self._uses_kernels)
        return output.transpose(1, 2).contiguous(), None


def attend_in_ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    scale: float,
    parallel: ContextParallel,
    uses_kernels: bool = True,
) -> torch.Tensor:
    """Return the outputs [B, H, L, E] for query [B, H, L, E], key and value [B, G, L, E] of this rank's chunks. All
    ranks call it."""
    return _Ring.apply(query, key, value, parallel, (scale, mask, uses_kernels))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        parallel: ContextParallel,
        options: tuple[float, SequenceMask, bool],
    ) -> torch.Tensor:
        with _disable_current_modes():  # selective checkpointing would keep what the kernels return, block for block
            output, log_sums = _attend_all(query, key, value, parallel, options)
        context.save_for_backward(query, key, value, output, log_sums)
        context.parallel, context.options = parallel, options
        return output

    @staticmethod
    def backward(context: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value, output, log_sums = context.saved_tensors
        parallel: ContextParallel = context.parallel
        attention = BlockAttention(query, key.shape[1], *context.options)
        through = attention.start_backward((output, log_sums), output_gradient)
        block, travelling = torch.stack([key, value]), None
        for turn in range(parallel.size):
            next_block = Transfer(block, parallel, _BLOCKS) if turn < parallel.size - 1 else None
            blocks = list_blocks(parallel, turn, query.shape[2])
            gradients = attention.differentiate(block[0], block[1], blocks, through)
            if travelling is not None:
                gradients += travelling.receive()  # the sum of the previous ranks for this block
            travelling = Transfer(gradients, parallel, _GRADIENTS)
            if next_block is not None:
                block = next_block.receive()
        assert travelling is not None
        key_gradient, value_gradient = travelling.receive().to(key.dtype)  # the last turn sent them to their rank
        return through.query_gradient.to(query.dtype), key_gradient, value_gradient, None, None


def list_blocks(parallel: ContextParallel, turn: int, length: int) -> list[Block]:
    """Return the blocks that a rank attends to in this turn, when it has the keys of the rank that many places before
    it: pairs of its chunks and of that rank's, where the query chunk is not the earlier one. length: L."""
    source = ContextParallel((parallel.rank - turn) % parallel.size, parallel.size, is_ring=True)
    width = length // len(parallel.chunks)
    return [
        Block(_run(i, width), _run(j, width), query * width, key * width)
        for i, query in enumerate(parallel.chunks)
        for j, key in enumerate(source.chunks)
        if key <= query
    ]


def _run(number: int, width: int) -> slice:
    return slice(number * width, (number + 1) * width)


def _attend_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parallel: ContextParallel, options: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, H, L, E], in the training dtype, and log-sum-exp [B, H, L]."""
    attention = BlockAttention(query, key.shape[1], *options)
    output, log_sums = attention.start_forward()
    block = torch.stack([key, value])
    for turn in range(parallel.size):
        next_block = Transfer(block, parallel, _BLOCKS) if turn < parallel.size - 1 else None
        attention.attend(block[0], block[1], list_blocks(parallel, turn, query.shape[2]), output, log_sums)
        if next_block is not None:
            block = next_block.receive()
    return output.to(query.dtype), log_sums


class Transfer:
    """Sends a tensor to the next rank of the ring, and receives the previous rank's. All ranks send tensors of one
    shape, in one order."""

    def __init__(self, sent: torch.Tensor, parallel: ContextParallel, tag: int) -> None:
        self._sent, self._received = sent, torch.empty_like(sent)  # keeps the sent tensor alive until it is received
        rank, size, group = parallel.rank, parallel.size, parallel.group
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, tag=tag, group_peer=(rank - 1) % size),
            ]
        )
        self._exchanges = parallel.exchanges

    def receive(self) -> torch.Tensor:
        with self._exchanges.observed():
            wait_for(self._works)
        return self._received
