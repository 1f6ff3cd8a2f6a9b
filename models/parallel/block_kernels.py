"""torch's fused attention for one block of queries and keys: with the log-sum-exp that blocks are merged by, and with a
backward pass that takes the log-sum-exp and the output of all blocks.

`scaled_dot_product_attention` runs these operators and returns neither. In a block queries see all keys, or each those
up to its own. Blocks of rows that hold several documents take one call too: the kernels get the offsets of the
documents, which stay on the device. On a CPU any of its dtypes; on a GPU flash attention, so bf16 and fp16.

B micro-batch, H query heads, G heads of keys and values, E head size, l and m queries and keys of a block, N documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

_ATEN = torch.ops.aten
_LARGEST_HEAD = 256  # of flash attention; sizes must be multiples of 8

Attended = tuple[torch.Tensor, torch.Tensor]  # output [B, H, l, E], log-sum-exp [B, H, l]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockDocuments(NamedTuple):
    """The documents of a block, whose rows lie end to end. A query sees keys of its own document alone.

    query_offsets, key_offsets: int32 [N + 1], on the device. Document i has the queries query_offsets[i] to
    query_offsets[i + 1] - 1, and so its keys; it may have only one kind, or none. longest: an upper bound of both.
    window: the number of nearest keys that a query sees; None for all. keyless: bool [B, 1, l, 1], queries
    without a key; unseen: bool [B, 1, m, 1], keys without a query; None where there are none.
    """

    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    longest: int
    window: int | None = None
    keyless: torch.Tensor | None = None
    unseen: torch.Tensor | None = None


class Attend(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool,
        scale: float,
        documents: BlockDocuments | None = None,
    ) -> Attended: ...


class Differentiate(Protocol):
    def __call__(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attended: Attended,
        is_causal: bool,
        scale: float,
        documents: BlockDocuments | None = None,
    ) -> Gradients: ...


class BlockKernel(NamedTuple):
    """A fused attention kernel. attend: takes query [B, H, l, E], key and value [B, G, m, E], whether a query sees only
    the keys up to its own, the scale, and the documents, None for one per row. Queries without keys get zeros and a
    log-sum-exp of -inf. differentiate: takes the gradient of the output, then query, key, value, output and
    log-sum-exp (attended), and the same options; returns the gradients of query, key and value."""

    attend: Attend
    differentiate: Differentiate


def find_kernel(query: torch.Tensor) -> BlockKernel | None:
    """Return the kernel for queries of this dtype and size; None where there is none."""
    if query.device.type == "cpu":
        return BlockKernel(_attend_cpu, _differentiate_cpu)
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in range(8, _LARGEST_HEAD + 1, 8)
    if query.is_cuda and fits and torch.cuda.get_device_capability(query.device)[0] >= 8:
        return BlockKernel(_attend_flash, _differentiate_flash)
    return None


def _attend_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
    documents: BlockDocuments | None = None,
) -> Attended:
    attend = _ATEN._scaled_dot_product_flash_attention_for_cpu
    if documents is None:
        return attend(query, key, value, 0.0, is_causal, scale=scale)
    output = torch.zeros_like(query)
    log_sums = torch.full(query.shape[:3], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    for row, queries, keys in _list_documents(documents, query.shape[2], key.shape[2]):
        part = query[row, :, queries], key[row, :, keys], value[row, :, keys]
        mask = _build_window(part[0], documents.window)
        output[row, :, queries], log_sums[row, :, queries] = attend(
            *part, 0.0, is_causal and mask is None, attn_mask=mask, scale=scale
        )
    return output, log_sums


def _differentiate_cpu(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: Attended,
    is_causal: bool,
    scale: float,
    documents: BlockDocuments | None = None,
) -> Gradients:
    differentiate = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    if documents is None:
        return differentiate(gradient, query, key, value, *attended, 0.0, is_causal, scale=scale)
    gradients = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for row, queries, keys in _list_documents(documents, query.shape[2], key.shape[2]):
        places = queries, queries, keys, keys, queries, queries
        inputs = gradient, query, key, value, *attended
        part = [each[row, :, tokens] for each, tokens in zip(inputs, places, strict=True)]
        mask = _build_window(part[1], documents.window)
        found = differentiate(
            *part[:5], part[5].contiguous(), 0.0, is_causal and mask is None, attn_mask=mask, scale=scale
        )
        for total, tokens, each in zip(gradients, (queries, keys, keys), found, strict=True):
            total[row, :, tokens] = each
    return gradients


def _list_documents(documents: BlockDocuments, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield row, queries and keys of each document that has both: on a CPU, where reading the offsets does not wait."""
    offsets = (pairwise(each.tolist()) for each in (documents.query_offsets, documents.key_offsets))
    for (query, query_stop), (key, key_stop) in zip(*offsets, strict=True):
        if query < query_stop and key < key_stop:
            row = query // num_queries
            first_query, first_key = row * num_queries, row * num_keys
            yield (
                slice(row, row + 1),
                slice(query - first_query, query_stop - first_query),
                slice(key - first_key, key_stop - first_key),
            )


def _build_window(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return what is added to the scores of a document with as many keys as queries [1, H, l, E]: [l, l], -inf for keys
    after a query and for those that the window hides; None where it hides none."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(length, length, dtype=query.dtype).masked_fill_(~seen | seen.tril(-window), -torch.inf)


def _attend_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
    documents: BlockDocuments | None = None,
) -> Attended:
    if documents is None:
        return _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[:2]
    tokens = (_join_rows(each) for each in (query, key, value))
    joined, joined_sums = _ATEN._flash_attention_forward(
        *tokens, *_list_arguments(documents, is_causal), False, scale=scale, **_name_windows(documents, is_causal)
    )[:2]
    output, log_sums = _split_rows(joined, len(query)), joined_sums.unflatten(1, (len(query), -1)).transpose(0, 1)
    if documents.keyless is None:
        return output, log_sums
    # What kernels write for queries without keys differs: 0, and inf or -inf
    return output.masked_fill(documents.keyless, 0), log_sums.masked_fill(documents.keyless.squeeze(-1), -torch.inf)


def _differentiate_flash(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: Attended,
    is_causal: bool,
    scale: float,
    documents: BlockDocuments | None = None,
) -> Gradients:
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    if documents is None:
        lengths = None, None, query.shape[2], key.shape[2]
        return _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, *attended, *lengths, 0.0, is_causal, seed, seed[0], scale=scale
        )
    output, log_sums = attended
    tokens = (_join_rows(each) for each in (gradient, query, key, value, output))
    joined = _ATEN._flash_attention_backward(
        *tokens,
        log_sums.transpose(0, 1).flatten(1),
        *_list_arguments(documents, is_causal),
        seed,
        seed[0],
        scale=scale,
        **_name_windows(documents, is_causal),
    )
    grad_query, grad_key, grad_value = (_split_rows(each, len(query)) for each in joined)
    if documents.keyless is None or documents.unseen is None:
        return grad_query, grad_key, grad_value
    grad_key, grad_value = (each.masked_fill(documents.unseen, 0) for each in (grad_key, grad_value))
    return grad_query.masked_fill(documents.keyless, 0), grad_key, grad_value


def _join_rows(heads: torch.Tensor) -> torch.Tensor:
    """Reshape [B, H, l, E] to [B l, H, E], a view of one row."""
    return heads.transpose(1, 2).flatten(0, 1)


def _split_rows(tokens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reshape [B l, H, E] to [B, H, l, E], a view."""
    return tokens.unflatten(0, (num_rows, -1)).transpose(1, 2)


def _list_arguments(
    documents: BlockDocuments, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, int, int, float, bool]:
    """Return offsets, bounds, dropout and whether only the last key is bounded, as the operators take them."""
    offsets, longest = (documents.query_offsets, documents.key_offsets), documents.longest
    return *offsets, longest, longest, 0.0, is_causal and documents.window is None


def _name_windows(documents: BlockDocuments, is_causal: bool) -> dict[str, int]:
    """Return how many keys before and after its own a query sees; -1 for all."""
    before = -1 if documents.window is None else documents.window - 1
    return {"window_size_left": before, "window_size_right": 0 if is_causal else -1}
