"""A sequence over several ranks, by all-to-all over heads (Ulysses, 2309.14509) or around a ring (`ring.py`).

Each rank of a group has an equal part of every sequence: its hidden states, its logits, its targets. Only attention
looks at other tokens. So the ranks exchange around it: each rank gets all tokens of a part of the heads of queries,
keys and values, runs the same attention implementation that one rank would run for them, and returns the outputs. Every
rank has the integers that say which tokens see each other (positions, documents) whole: they are small. In a ring keys
and values are passed around instead, and the number of heads does not matter.

B micro-batch, T sequence, H query heads, G heads of keys and values, E head size, C ranks of the group.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from errors import UserError
from models.architecture.lookup import find_sequence_obstacle, has_ring_attention
from models.parallel.ring import RingAttention
from models.parallel.shard import NO_CP, ContextParallel

NAME = "context_parallel"  # of the attention function


def choose_parts(config: PretrainedConfig, mode: str, size: int, tensor_parallel_size: int) -> ContextParallel:
    """Return how a group of `size` ranks splits sequences of this model, for no rank in particular.

    mode: `context_parallel_mode`. auto: by heads where there are enough, else around a ring.
    """
    if size == 1:  # the only one for a model without heads
        return NO_CP
    enough_heads = _count_heads(config, tensor_parallel_size) % size == 0
    is_ring = mode == "ring" or (mode == "auto" and not enough_heads and has_ring_attention(config))
    return ContextParallel(size=size, is_ring=is_ring)


def check_sequences(
    config: PretrainedConfig, mode: str, size: int, tensor_parallel_size: int, max_seq_length: int
) -> None:
    """Check that a group of `size` ranks can split sequences of this model. Raises UserError for a family whose layers
    were not tried, for fewer heads than ranks without a ring, for a length that does not divide."""
    if size == 1:
        return
    if obstacle := find_sequence_obstacle(config):
        raise UserError(
            f"context_parallel_size={size}: a '{config.model_type}' cannot share sequences: {obstacle}; "
            "give context_parallel_size=1, or tensor_parallel_size"
        )
    if choose_parts(config, mode, size, tensor_parallel_size).is_ring:
        _check_ring(config, mode, size, max_seq_length)
    else:
        _check_heads(config, size, tensor_parallel_size, max_seq_length)


def _check_heads(config: PretrainedConfig, size: int, tensor_parallel_size: int, max_seq_length: int) -> None:
    if max_seq_length % size:
        raise UserError(
            f"context_parallel_size={size} does not divide max_seq_length={max_seq_length}; "
            f"the nearest is {_find_nearest(max_seq_length, size)}"
        )
    heads = _count_heads(config, tensor_parallel_size)
    if heads % size:
        fitting = [str(each) for each in range(1, heads + 1) if heads % each == 0]
        per_rank = f" of a rank (tensor_parallel_size={tensor_parallel_size})" if tensor_parallel_size > 1 else ""
        ring = "; or give context_parallel_mode=ring" if has_ring_attention(config) else ""
        raise UserError(
            f"context_parallel_size={size} does not divide the {heads} attention heads{per_rank}, of which each rank "
            f"takes a part; sizes that do: {', '.join(fitting)}{ring}"
        )


def _check_ring(config: PretrainedConfig, mode: str, size: int, max_seq_length: int) -> None:
    if not has_ring_attention(config):
        raise UserError(
            f"context_parallel_mode=ring: a '{config.model_type}' cannot: its attention is proven by heads alone; "
            "give context_parallel_mode=ulysses"
        )
    if getattr(config, "attention_dropout", 0):
        raise UserError(
            f"context_parallel_mode={mode}: ring attention has no dropout, and the model's config says "
            f"attention_dropout={config.attention_dropout}; set it to 0 there, or give context_parallel_mode=ulysses "
            "with a context_parallel_size that divides the heads"
        )
    if max_seq_length % (2 * size):
        raise UserError(
            f"context_parallel_mode={mode}: in a ring of context_parallel_size={size} each rank has two of {2 * size} "
            f"chunks of a sequence, which do not divide max_seq_length={max_seq_length}; "
            f"the nearest is {_find_nearest(max_seq_length, 2 * size)}"
        )


def _count_heads(config: PretrainedConfig, tensor_parallel_size: int) -> int:
    return config.num_attention_heads // tensor_parallel_size


def _find_nearest(length: int, divisor: int) -> str:
    below = length // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def share_sequence(module: nn.Module, parallel: ContextParallel) -> None:
    """Make a layer work on a part of the sequence: its attention, and the modules that use positions."""
    for part in module.modules():
        for user in (part, getattr(part, "context", None)):
            if hasattr(user, "sequence_part"):
                user.sequence_part = parallel  # type: ignore[union-attr]
        if "Attention" in type(part).__name__ and hasattr(part, "config"):
            part.exchange = _build_exchange(part, parallel)  # type: ignore[assignment]
            exchanging: Any = copy.copy(part.config)
            exchanging._attn_implementation = NAME
            part.config = exchanging


def _build_exchange(module: nn.Module, parallel: ContextParallel) -> HeadExchange | RingAttention:
    config: Any = module.config
    if parallel.is_ring:
        return RingAttention(parallel, uses_kernels=config._attn_implementation != "eager")
    return HeadExchange(module, parallel)


class HeadExchange:
    """Wraps the attention function of one layer."""

    def __init__(self, module: nn.Module, parallel: ContextParallel) -> None:
        config: Any = module.config
        self._config, name = config, config._attn_implementation
        # Eager attention is not in transformers' table; each family's module has its own
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        self._attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        self._parallel = parallel

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute query [B, H, T / C, E], key and value [B, G, T / C, E], where values may have another size, to [B, T
        / C, H, E']. attention_mask: of all tokens, and of any head."""
        size = self._parallel.size
        repeats = size // math.gcd(key.shape[1], size)  # fewer heads than ranks: several have the same
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        query, key, value = self._gather_tokens(query, key, value)
        options.pop("position_ids", None)  # of this rank's part
        options |= {name: self._take_heads(options[name]) for name in ("s_aux",) if options.get(name) is not None}
        heads = _Heads(module, self._config, query.shape[1] // key.shape[1], self._take_heads)
        output, _ = self._attend(heads, query, key, value, attention_mask, **options)  # [B, T, H / C, E']
        return self._gather_heads(output), None

    def _take_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's heads of a tensor with one number per head, [H]."""
        return self._parallel.take(values, dim=0)

    def _gather_tokens(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Exchange each [B, H, T / C, E] for all tokens of H / C heads, [B, H / C, T, E]."""
        size = self._parallel.size
        by_rank = [tensor.unflatten(1, (size, -1)).transpose(0, 1) for tensor in tensors]  # [C, B, H / C, T / C, E]
        flat = torch.cat([part.flatten(1) for part in by_rank], dim=1)
        received = _Exchange.apply(flat, self._parallel)
        parts = received.split([part[0].numel() for part in by_rank], dim=1)
        return [
            part.view(each.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for part, each in zip(parts, by_rank, strict=True)
        ]

    def _gather_heads(self, output: torch.Tensor) -> torch.Tensor:
        """Exchange [B, T, H / C, E] for all heads of T / C tokens, [B, T / C, H, E]."""
        by_rank = output.unflatten(1, (self._parallel.size, -1)).transpose(0, 1)  # [C, B, T / C, H / C, E]
        received = _Exchange.apply(by_rank, self._parallel)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Heads:
    """An attention module with this rank's heads, as its attention function sees it."""

    def __init__(
        self,
        module: nn.Module,
        config: PretrainedConfig,
        num_key_value_groups: int,
        take: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._module, self._take = module, take
        self.config, self.num_key_value_groups = config, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return self._take(found) if name == "sinks" else found


class _Exchange(torch.autograd.Function):
    """All-to-all of [C, ...]: part i of a rank goes to rank i, and is replaced by rank i's part."""

    @staticmethod
    def forward(context: Any, parts: torch.Tensor, parallel: ContextParallel) -> torch.Tensor:
        context.parallel = parallel
        return _exchange(parts, parallel)

    @staticmethod
    def backward(context: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _exchange(gradients, context.parallel), None


def _exchange(parts: torch.Tensor, parallel: ContextParallel) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    with parallel.exchanges.observed():
        dist.all_to_all_single(received, parts, group=parallel.group)
    return received


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Call the module's exchange as an attention function of `transformers`."""
    return module.exchange(module, query, key, value, attention_mask, **options)  # type: ignore[operator]


AttentionInterface.register(NAME, attend)
