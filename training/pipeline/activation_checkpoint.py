"""Activation checkpointing: which layers of a stage run again in the backward pass, and which results are kept.

`grouped` recomputes groups of `interval` layers from their input (1604.06174). `every` recomputes each `interval`-th
layer of a stage and keeps all activations of the others. `selective` keeps, in each group, the results of matrix
products and fused attention, which cost time, and recomputes the rest (norms, activation functions, rotary angles),
which costs memory (2205.05198).

A compiled layer that is a group of its own is recomputed inside its compiled code. The partitioner of forward and
backward follows the policy of `selective` there, since a compiled layer has single operations only while it is
compiled, and omits what the backward pass does not need, such as the product with `down_proj`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.generic.parts import runs_backbone
from models.layers.random_keys import find_random_key
from models.layers.selection_cost import Selecting
from training.config.schema import CheckpointMode, RunConfig
from training.pipeline.activation_offload import ActivationOffload
from training.pipeline.recomputation import recompute

# Projections, experts, and attention by each of torch's fused kernels; not the T x T products of eager attention.
KEPT_OPERATORS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
}
# The operators of those packages, of varlen_attn, of models/experts/, and of models/layers/frozen.py
KEPT_NAMESPACES = ("flash_attn", "flash_attn_3", "torch_attn", "experts", "layers")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Group:
    """Layers start .. stop - 1 of a stage, counted from its first."""

    start: int
    stop: int
    is_recomputed: bool


@dataclass(frozen=True)
class ActivationCheckpointing:
    """interval: `activation_checkpoint_interval`; 0 keeps all activations. offloads: `activation_offload`. in_layers:
    each decoder layer that is recomputed checkpoints itself, inside its compiled code; the engine does it for other
    layers."""

    interval: int
    mode: CheckpointMode = CheckpointMode.grouped
    offloads: bool = False
    in_layers: bool = False

    @property
    def is_selective(self) -> bool:
        return self.interval > 0 and self.mode is CheckpointMode.selective

    @property
    def runs_again(self) -> bool:
        """Whether `recompute` runs groups again, unless a layer may draw random numbers."""
        return not (self.is_selective or self.offloads or self.in_layers)

    @property
    def group_size(self) -> int:
        """Layers that the engine runs as one: its `activation_checkpoint_interval`."""
        return min(self.interval, 1) if self.mode is CheckpointMode.every else self.interval

    @cache  # a search of layouts asks thousands of times
    def list_groups(self, num_layers: int) -> list[Group]:
        """Return the groups into which `PipelineModule.forward` cuts a stage."""
        size = self.group_size or num_layers
        return [
            Group(start, min(start + size, num_layers), self._recomputes(start)) for start in range(0, num_layers, size)
        ]

    def _recomputes(self, start: int) -> bool:
        return self.interval > 0 and (self.mode is not CheckpointMode.every or (start + 1) % self.interval == 0)

    def build_function(self, draws: bool = True) -> Callable[..., Any]:
        """Return the function that runs a group: torch's own, non-reentrant, where a layer may draw random numbers
        (draws), which it does a second time as the first, where single operations are kept, inputs are offloaded, or a
        layer is compiled with its recomputation."""
        if self.runs_again and not draws:
            return recompute
        function = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)
        if self.is_selective:
            function = partial(function, context_fn=partial(create_selective_checkpoint_contexts, choose_kept))
        return ActivationOffload().wrap(function) if self.offloads else function


def build_activation_checkpointing(config: RunConfig) -> ActivationCheckpointing:
    """Return the checkpointing that the stage does and the plan counts."""
    recompute = ActivationCheckpointing(
        config.activation_checkpoint_interval, config.activation_checkpoint_mode, config.activation_offload
    )
    if not config.compile:
        return recompute
    if recompute.is_selective:  # the compiler has to see what is kept of a layer
        recompute = replace(recompute, interval=1)
    return replace(recompute, in_layers=recompute.group_size == 1)


KEEP_ALL = ActivationCheckpointing(0)


def may_draw(modules: Iterable[nn.Module]) -> bool:
    """Return whether the forward pass of one of the modules may draw random numbers in training: whether it, one within
    it or its config has a dropout, a jitter or a noise other than 0. The noise of NEFTune is a hash, and draws
    nothing. A layer whose code is that of transformers may always: PhiMoE's router draws whatever its config says, and
    a backbone has the dropout of its embeddings."""
    parts = [part for module in modules for part in module.modules()]
    if any(runs_backbone(part) or (isinstance(part, _DROPOUTS) and part.p > 0) for part in parts):
        return True
    owners = [*parts, *{id(config): config for part in parts if (config := getattr(part, "config", None))}.values()]
    return any(find_random_key(owner) is not None for owner in owners)


def choose_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy for `create_selective_checkpoint_contexts`."""
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operator: Any) -> bool:
    """Returns whether `selective` keeps the results of this operator of torch, which is running."""
    if Selecting.is_selecting:
        return False
    return operator in KEPT_OPERATORS or getattr(operator, "namespace", "") in KEPT_NAMESPACES
