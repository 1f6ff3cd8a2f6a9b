"""Attention over sequences that several ranks share: the bytes that each sends and holds, by heads and around a ring.

B micro-batch, H query heads, L tokens of a rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from models.architecture.lookup import has_ring_attention
from models.parallel.blocks import MOST_SCORES
from models.parallel.shard import ContextParallel
from training.costs.micro_batch import MicroBatchShape


@dataclass(frozen=True, kw_only=True)
class SharedAttention:
    """The shared attention of one layer, for a micro-batch on one rank.

    is_ring: whether the run sends blocks around a ring, or exchanges heads. exchanged_bytes: of queries, keys, values
    and outputs that ranks exchange by heads; 0 where there are too few heads. block_bytes: of keys and values, and
    block_gradient_bytes of their gradients, that travel around a ring; 0 where the family's do not. scores: queries x
    keys, of all heads. has_window: whether its tokens see the nearest alone. workspace_bytes: of the ring's backward
    pass while it is under way; chunk_bytes: in addition, where scores are written to memory. saved_extra: what autograd
    keeps in addition to one rank's attention over as many tokens.
    """

    is_ring: bool
    exchanged_bytes: int
    block_bytes: int
    block_gradient_bytes: int
    scores: float
    has_window: bool
    workspace_bytes: int
    chunk_bytes: int
    saved_extra: int
    kept_extra: int
    remade_extra: int


def count_shared_attention(
    config: PretrainedConfig,
    parts: ContextParallel,
    batch: MicroBatchShape,
    *,
    tensor_parallel_size: int,
    head_sizes: tuple[int, int],
    flops: float,
    window: int | None,
) -> SharedAttention:
    """Return what one layer's attention sends and holds on a rank.

    batch: this rank's part, of L tokens a row. head_sizes: of queries and keys, and of values. flops: of a token.
    window: in tokens.
    """
    heads = config.num_attention_heads // tensor_parallel_size
    groups = max(1, (getattr(config, "num_key_value_heads", None) or heads) // tensor_parallel_size)
    tokens, both_sizes, dtype = batch.tokens, sum(head_sizes), batch.dtype
    outputs = tokens * heads * head_sizes[1] * dtype.itemsize
    exchanged = block = gradient = workspace = chunk_bytes = 0
    if heads % parts.size == 0:  # fewer heads of keys and values than ranks are repeated
        repeated = groups * (parts.size // math.gcd(groups, parts.size))
        exchanged = tokens * (heads + repeated) * both_sizes * dtype.itemsize
    if has_ring_attention(config):
        block = tokens * groups * both_sizes * dtype.itemsize
        gradient = tokens * groups * both_sizes * max(4, dtype.itemsize)
    if parts.is_ring:
        query_gradient = tokens * heads * head_sizes[0] * 4
        chunk_bytes = _count_chunk_bytes(batch.rows * heads, batch.seq_length // 2, dtype)
        workspace = 2 * block + 3 * gradient + query_gradient
    kept = outputs + tokens * heads * 4  # what `selective` keeps of a fused kernel
    return SharedAttention(
        is_ring=parts.is_ring,
        exchanged_bytes=exchanged,
        block_bytes=block,
        block_gradient_bytes=gradient,
        scores=tokens * flops / (2 * both_sizes),
        has_window=window is not None and window < batch.seq_length * parts.size,
        workspace_bytes=workspace,
        chunk_bytes=chunk_bytes,
        # outputs by heads are kept once more, as the exchange has put them together
        saved_extra=0 if parts.is_ring else outputs,
        kept_extra=-kept if parts.is_ring else outputs,
        remade_extra=kept if parts.is_ring else 0,
    )


def _count_chunk_bytes(rows: int, chunk: int, dtype: torch.dtype) -> int:
    """Probabilities of a piece and the gradient of its scores, in fp32, and a copy in a smaller training dtype. rows:
    B x H."""
    scores = min(rows * chunk * chunk, max(MOST_SCORES, rows * chunk))
    return scores * (8 + (dtype.itemsize if dtype.itemsize < 4 else 0))
