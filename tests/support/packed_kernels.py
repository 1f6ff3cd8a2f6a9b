"""GPU kernels for packed rows, played on the CPU: the signatures of flash-attention's functions and of torch's
`varlen_attn`, and below them plain attention, one document after the other.

They refuse what the real ones cannot take, so what reaches them here would reach those.

L tokens of all rows, N documents, H query heads, G heads of keys and values, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers import modeling_flash_attention_utils

from models.layers import packed_attention

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
