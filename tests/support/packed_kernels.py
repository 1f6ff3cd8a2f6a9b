"""GPU kernels for packed rows, played on the CPU: the signatures of flash-attention's functions, of torch's
`varlen_attn` and of the operators that a ring's blocks call, and below them plain attention, one document after the
other.

They refuse what the real ones cannot take, so what reaches them here would reach those.

L tokens of all rows, N documents, H query heads, G heads of keys and values, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import library as operators
from torch.nn.attention import varlen
from transformers import modeling_flash_attention_utils

from models.layers import packed_attention
from models.parallel import block_kernels, blocks

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_documents(query: torch.Tensor, offsets: torch.Tensor, longest: int) -> None:
    """Asserts that the offsets cover the rows: a real kernel that reads beyond them, or leaves rows unwritten, would
    not fail."""
    assert offsets.dtype == torch.int32 and offsets.is_contiguous() and type(longest) is int
    lengths = offsets.diff()
    assert offsets[0] == 0 and offsets[-1] == query.shape[0] and lengths.min() >= 0 and lengths.max() <= longest


def split(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor
) -> Iterator[tuple[slice, Scores]]:
    """Each document's tokens, and its query, key and value [H, length, E]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    for start, stop in pairwise(offsets.tolist()):
        if start < stop:
            tokens = slice(start, stop)
            yield tokens, tuple(tensor[tokens].transpose(0, 1) for tensor in (query, key, value))


def compute_weights(query: torch.Tensor, key: torch.Tensor, scale: float | None, before: int) -> torch.Tensor:
    """Causal attention's, [H, length, length]. before: tokens that are seen before each; negative: all."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seen = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).tril()
    if before >= 0:
        seen &= ~seen.tril(-before - 1)
    return (query @ key.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(dim=-1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    *,
    longest: int,
    scale: float | None,
    before: int,
) -> torch.Tensor:
    """[L, H, E]"""
    check_documents(query, offsets, longest)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "the kernels know one size of heads"
    parts = [
        (compute_weights(q, k, scale, before) @ v).transpose(0, 1) for _, (q, k, v) in split(query, key, value, offsets)
    ]
    return torch.cat(parts)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """flash-attn 2.8's, of [B, T, H, E]."""
    batch_size, length = q.shape[:2]
    offsets = torch.arange(0, batch_size * length + 1, length, dtype=torch.int32)
    tokens = (tensor.flatten(0, 1) for tensor in (q, k, v))
    output = flash_attn_varlen_func(
        *tokens, offsets, offsets, length, length, dropout_p, softmax_scale, causal, window_size, softcap
    )
    return output.unflatten(0, (batch_size, length))


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None,
) -> torch.Tensor:  # fmt: skip
    """flash-attn 2.8's."""
    assert causal and dropout_p == 0 and softcap == 0 and max_seqlen_q == max_seqlen_k
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    return attend(q, k, v, cu_seqlens_q, longest=max_seqlen_q, scale=softmax_scale, before=window_size[0])


def play_flash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on `transformers` finds these where it looks for flash-attn. Returns the names of those it calls."""
    called: list[str] = []

    def noted(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            called.append(function.__name__)
            return function(*args, **kwargs)

        run.__wrapped__ = function  # `inspect.signature` follows it
        return run

    functions = (noted(flash_attn_func), noted(flash_attn_varlen_func), None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: functions)
    return called


def play_varlen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on `varlen_attn` runs on the CPU, and attention calls it there as it does on a GPU. Returns a name for
    each call."""
    called: list[str] = []

    def run(*args: Any) -> torch.Tensor:
        called.append("varlen_attn")
        return packed_attention._attend_at_once(*args)

    varlen._varlen_attn.register_kernel("cpu", _varlen_forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _varlen_backward)
    monkeypatch.setattr(packed_attention, "_attend_each", run)
    return called


def _varlen_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, is_causal: bool = False, scale: float | None = None,
    window_size: list[int] | None = None, *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    assert window_size is not None and window_size[1] == 0 and max_q == max_k and cu_seq_q is cu_seq_k
    output = attend(query, key, value, cu_seq_q, longest=max_q, scale=scale, before=window_size[0])
    return output, query.new_empty(query.shape[1], len(query)), torch.empty(2, dtype=torch.uint64)


def _varlen_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int, is_causal: bool,
    rng_state: torch.Tensor, scale: float | None = None, window_size: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Written out: autograd does not see what a custom operator does."""
    assert window_size is not None
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    gradients = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for tokens, (q, k, v) in split(query, key, value, cu_seq_q):
        weights, grad = compute_weights(q, k, scale, window_size[0]), grad_out[tokens].transpose(0, 1)
        grad_weights = grad @ v.transpose(1, 2)
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(dim=-1, keepdim=True)) * factor
        found = (grad_scores @ k, grad_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ grad)
        for gradient, part in zip(gradients, found, strict=True):
            gradient[tokens] = part.transpose(0, 1).unflatten(1, (gradient.shape[1], -1)).sum(dim=2)
    return gradients


@contextmanager
def play_block_kernels() -> Iterator[list[str]]:
    """Within it a ring's blocks call torch's operators for documents as they do on a GPU, and these run on the CPU.
    Yields a name for each call."""
    called: list[str] = []
    flash = block_kernels.BlockKernel(block_kernels._attend_flash, block_kernels._differentiate_flash)

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append("forward")
        return _block_forward(*args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> Any:
        called.append("backward")
        return _block_backward(*args, **kwargs)

    with operators._scoped_library("aten", "IMPL") as library, patch.object(blocks, "find_kernel", lambda _: flash):
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield called


def _block_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Leaves NaN where no document writes: a real kernel may leave what was there."""
    assert dropout_p == 0 and is_causal == ((window_size_left, window_size_right) == (-1, 0))
    output, log_sums = torch.full_like(query, torch.nan), query.new_full(query.shape[1::-1], torch.inf)
    offsets, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
    for queries, _, (q, k, v), hidden in _split_block(
        query, key, value, offsets, longest, window_size_left, window_size_right
    ):
        scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
        output[queries] = (scores.softmax(-1) @ v).transpose(0, 1)
        log_sums[:, queries] = scores.logsumexp(-1)
    seed = torch.empty(2, dtype=torch.uint64)
    return output, log_sums, seed, seed[0], query.new_empty(0)


def _block_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, rng_state: torch.Tensor, unused: torch.Tensor, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """With the log-sum-exp over the keys of all blocks, as the real one is."""
    assert dropout_p == 0 and is_causal == ((window_size_left, window_size_right) == (-1, 0))
    assert logsumexp.shape == query.shape[1::-1] and logsumexp.is_contiguous()
    gradients = tuple(torch.full_like(each, torch.nan) for each in (query, key, value))
    offsets, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
    for queries, keys, (q, k, v), hidden in _split_block(
        query, key, value, offsets, longest, window_size_left, window_size_right
    ):
        weights = ((q @ k.mT * scale).masked_fill(hidden, -torch.inf) - logsumexp[:, queries, None]).exp()
        grad, attended = (each[queries].transpose(0, 1) for each in (grad_out, out))
        grad_scores = weights * (grad @ v.mT - (grad * attended).sum(-1, keepdim=True)) * scale
        found = (grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad)
        for gradient, tokens, part in zip(gradients, (queries, keys, keys), found, strict=True):
            gradient[tokens] = part.transpose(0, 1).unflatten(1, (gradient.shape[1], -1)).sum(dim=2)
    return gradients  # type: ignore[return-value]


def _split_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int], before: int, after: int,
) -> Iterator[tuple[slice, slice, Scores, torch.Tensor]]:  # fmt: skip
    """Each document's queries and keys, both and its values [H, length, E], and the scores that are hidden."""
    for tokens, own, most in zip((query, key), offsets, longest, strict=True):
        check_documents(tokens, own, most)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    spans = (pairwise(own.tolist()) for own in offsets)
    for (first, stop), (first_key, key_stop) in zip(*spans, strict=True):
        if first < stop and first_key < key_stop:
            queries, keys = slice(first, stop), slice(first_key, key_stop)
            hidden = torch.zeros(stop - first, key_stop - first_key, dtype=torch.bool)
            if after == 0:
                assert hidden.shape[0] == hidden.shape[1]
                hidden = ~torch.ones_like(hidden).tril() | (
                    torch.ones_like(hidden).tril(-before - 1) if before >= 0 else False
                )
            parts = query[queries], key[keys], value[keys]
            yield queries, keys, tuple(each.transpose(0, 1) for each in parts), hidden  # type: ignore[misc]
