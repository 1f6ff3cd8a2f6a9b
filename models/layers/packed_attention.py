"""`attn_implementation=varlen`: packed rows by torch's `varlen_attn`, which takes the documents end to end with their
offsets, and so needs no mask; rows of one document each by `scaled_dot_product_attention`.

`transformers` looks attention up by name (`AttentionInterface`); importing this registers the name.

B micro-batch, T sequence, H query heads, G heads of keys and values, E head size.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from models.layers import grouped_queries
from models.layers.documents import Documents
from models.layers.layer import list_layer_configs

VARLEN = "varlen"
FLASH = ("flash_attention_2", "flash_attention_3")  # transformers' names; it calls the packages of that name
LARGEST_HEAD = 256  # flash attention's, and sizes are multiples of 8
_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)  # more of them from torch 2.10 to 2.13
_DROPOUTS = ("attention_dropout", "attn_pdrop")  # the names that configs have for it


def find_obstacle(config: PretrainedConfig, dtype: torch.dtype, planned_flash: bool | None = None) -> str | None:
    """Return why a model in `dtype` cannot use torch's kernel on the GPU of this process; None where it can.
    planned_flash: whether one that is planned for runs flash attention, in place of that."""
    if "window_size" not in _PARAMETERS:
        return f"torch {torch.__version__} has no varlen_attn with windows"
    if not (_has_flash() if planned_flash is None else planned_flash):
        return "its kernel needs a CUDA device of compute capability 8.0 or higher"
    if dtype not in (torch.bfloat16, torch.float16):
        return "its kernel takes bf16 and fp16"
    if has_dropout(config):
        return "its kernel has no dropout"
    sizes = {find_head_sizes(own)[0] for own in list_layer_configs(config)}  # smaller values are padded to it
    unfit = [size for size in sizes if size > LARGEST_HEAD or size % 8]
    return f"its kernel does not take heads of size {max(unfit)}" if unfit else None


def _has_flash() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def find_head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Return the head sizes of queries and keys, and of values: multi-head latent attention has its own. config: of a
    layer."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "qk_head_dim", None) or head_size, getattr(config, "v_head_dim", None) or head_size


def has_dropout(config: PretrainedConfig) -> bool:
    """Return whether the config states a dropout of attention."""
    return any(getattr(config, name, 0) for name in _DROPOUTS)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    documents: Documents | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as an attention function of `transformers`: query [B, H, T, E], key and value [B, G, T, E],
    where values may be smaller; returns [B, T, H, E'].

    documents: from the context of the micro-batch, None for whole rows under a causal mask. It has no default on
    purpose: a layer that does not pass it on would let documents see each other. options: further keywords of a
    family's attention; the window comes with `documents`, and options that would change the result otherwise raise
    ValueError.
    """
    if refused := [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]:
        raise ValueError(f"attn_implementation={VARLEN} has no {refused[0]}")
    if documents is None:
        return grouped_queries.attend(module, query, key, value, None, dropout=dropout, scaling=scaling)
    if dropout:
        raise ValueError(f"attn_implementation={VARLEN} has no dropout")
    batch_size, value_size = query.shape[0], value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - value_size))
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [B T, H or G, E]
    run = _attend_each if query.device.type == "cpu" else _attend_at_once
    output = run(queries, keys, values, documents, scaling)  # [B T, H, E]
    return output.unflatten(0, (batch_size, -1))[..., :value_size], None


def _attend_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    """Run torch's kernel on all documents. Its windows count the tokens before a token."""
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if "enable_gqa" in _PARAMETERS:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    before = -1 if documents.window is None else documents.window - 1
    output = varlen_attn(
        query,
        key,
        value,
        documents.offsets,
        documents.offsets,
        documents.longest,
        documents.longest,
        scale=scale,
        window_size=(before, 0),
        **options,
    )
    assert isinstance(output, torch.Tensor)  # nothing else was asked for
    return output


@torch.compiler.disable
def _attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scale: float | None
) -> torch.Tensor:
    """Run SDPA on one document after the other: on a CPU, where reading the offsets does not wait."""
    outputs = []
    for start, stop in pairwise(documents.offsets.tolist()):
        if start == stop:
            continue
        document = (tensor[None, start:stop].transpose(1, 2) for tensor in (query, key, value))
        queries, keys, values = document  # [1, H or G, length, E]
        mask = _build_window(stop - start, documents.window)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _build_window(length: int, window: int | None) -> torch.Tensor | None:
    """Return bool [length, length], true for visible tokens; None where all earlier tokens are."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril() & ~ones.tril(-window)


AttentionInterface.register(VARLEN, attend)
