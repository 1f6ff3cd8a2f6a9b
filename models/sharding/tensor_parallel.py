"""Tensor parallelism (1909.08053): the layers of a stage sharded over several ranks, which compute each micro-batch
together.

The modules of `transformers` stay and are sharded in place. A projection that is sharded by its outputs (COLUMN) is
followed, after operations on single heads or neurons, by one that is sharded by its inputs (ROW), and two functions
around such a block make it whole again:

    before the block         forward: nothing              backward: the sum of the gradients over the ranks
    after its last product   forward: the sum of outputs   backward: nothing

Embedding and head are sharded by the vocabulary; the loss sums its softmax over the ranks
(`models/losses/cross_entropy.py`), so nothing ever holds all logits. Sizes that do not divide are sharded unevenly:
the first ranks have one more, and nothing is padded. Heads must divide: the views of `transformers` need whole
heads, with the same number of key and value heads on each rank. A module's shards are described once, by a `ShardSpec`
(`models/parallel/shard.py`), which the readers of weights, checkpoints and the optimizer's state follow.

Why not the layers of DeepSpeed (`module_inject/layers.py`, 0.19.8) or torch's DTensor: the former reduce the gradient
once per projection instead of once per block and are not `nn.Linear`, so peft does not see them; the latter's
parameters cannot be in ZeRO's flat buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from errors import UserError
from models.architecture.alike import map_alike
from models.architecture.lookup import get_tensor_parallel_plan
from models.experts.grouped import is_stack, is_transposed_to_peft
from models.layers.decoder import Embedding, LMHead, PipelineDecoderLayer
from models.layers.layer import Fused, Layer, Style, Styles, list_layer_configs, refuse_sharding
from models.layers.random_keys import find_jitter
from models.layers.sharding_styles import fit_plan, list_blocks
from models.parallel.layers import (
    InputGradAllReduce,
    OutputSum,
    PerRankRNG,
    RowParallelConv1D,
    RowParallelLinear,
    ShardedNorm,
    VocabParallelEmbedding,
    sum_outputs,
)
from models.parallel.sequence import ColumnParallelConv1D, ColumnParallelLinear
from models.parallel.shard import ContextParallel, ShardSpec, TensorParallel, sum_forward


def shard_layers(config: PretrainedConfig, layers: Sequence[Layer], size: int) -> list[Layer]:
    """Return the layers, each with the styles by which `tensor_parallel_size=size` shards it.

    Raises UserError for a family that cannot be sharded, or heads that do not divide.
    """
    if size == 1:
        return list(layers)
    plan = get_tensor_parallel_plan(config)
    _check_heads(config, size)
    styles = map_alike(lambda layer: _choose_styles(config, layer, plan), layers)
    return [replace(layer, styles=chosen) for layer, chosen in zip(layers, styles, strict=True)]


def _choose_styles(config: PretrainedConfig, layer: Layer, plan: Styles) -> Styles:
    """Return the plan's styles for this layer's parts; they may differ from layer to layer."""
    if issubclass(layer.module_class, (Embedding, LMHead)):
        return {"": Style.VOCABULARY}
    if not issubclass(layer.module_class, PipelineDecoderLayer):
        return {}
    module = layer.build_on_meta()
    prefix = getattr(layer.module_class, "decoder_prefix", "")
    decoder = module.get_submodule(prefix.rstrip("."))
    styles = {prefix + name: style for name, style in fit_plan(plan, decoder).items()}
    # In a block each rank sees a share of what follows, so any other gradient would be a share too.
    for name, _ in module.named_parameters():
        if any(name.startswith(f"{block}.") for block in list_blocks(styles)) and not any(
            name == part or name.startswith(f"{part}.") for part in styles
        ):
            raise refuse_sharding(config, f"its plan has no style for '{layer.hf_prefix}{name}'")
    for name, style in styles.items():
        if style is Style.EXPERTS and (reason := _find_obstacle(module.get_submodule(name))):
            raise refuse_sharding(config, f"'{layer.hf_prefix}{name}' {reason}")
    return styles


def _find_obstacle(experts: Any) -> str | None:
    """Return why `_shard_experts` cannot shard these experts, or why the sum of the shards' results would be wrong."""
    if not experts.has_gate:
        return "are experts without a gate"
    if experts.has_post_expert_norm:
        return "have a norm after each expert"
    return None


def _check_heads(config: PretrainedConfig, size: int) -> None:
    keys = ("num_attention_heads", "num_key_value_heads")
    for own in list_layer_configs(config):
        counts = {key: getattr(own, key) for key in keys if getattr(own, key, None)}
        if (common := math.gcd(*counts.values())) % size:
            named = " and ".join(f"{number} {key[4:].replace('_', ' ')}" for key, number in counts.items())
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise UserError(
                f"tensor_parallel_size={size} does not divide the model's {named}; sizes that do: {fitting}"
            )


def shard_module(module: nn.Module, styles: Styles, parallel: TensorParallel) -> None:
    """Shard a layer's module, built on the meta device, in place, and put the communication around its blocks."""
    for name, style in styles.items():
        if style is Style.HEADS:
            _shard_heads(module, name, parallel)
            continue
        part = module.get_submodule(name)
        if style is Style.VOCABULARY:
            _shard_vocabulary(part, parallel)
        elif style is Style.SUMMED:
            part.sums_gradients = True  # type: ignore[assignment]  # a plain attribute
        elif style is Style.EXPERTS:
            _shard_experts(part, parallel)
        elif style is Style.NORM:
            module.set_submodule(name, ShardedNorm(part, parallel))
        else:
            module.set_submodule(name, _shard_projection(part, style, parallel))
    for name in list_blocks(styles):
        block = module.get_submodule(name)
        randomness = PerRankRNG(parallel.rank) if _drops_attention(block) else None
        entry = InputGradAllReduce(parallel, randomness, any(map(find_jitter, block.modules())))
        block.register_forward_pre_hook(entry, with_kwargs=True)
        sums_after = entry.gathers is not None and any(is_stack(part) for part in block.modules())
        for part in block.modules():
            if isinstance(part, (RowParallelLinear, RowParallelConv1D)):
                part.randomness = randomness
                part.gives_share = sums_after
            elif isinstance(part, (ColumnParallelLinear, ColumnParallelConv1D)):
                part.entry = entry.gathers
        if sums_after:
            assert entry.gathers is not None
            block.register_forward_hook(OutputSum(parallel, entry.gathers))
    if parallel.splits_sequence:
        _keep_parts(module, parallel)
    if styles and isinstance(module, PipelineDecoderLayer):
        module.set_tp_heads(parallel.rank, parallel.size)


def _keep_parts(module: nn.Module, parallel: TensorParallel) -> None:
    """Mark a layer so that it knows that its hidden states are of a part of the sequence."""
    module.splits_sequence = True  # type: ignore[assignment]
    for part in module.modules():
        if hasattr(part, "hidden_part"):
            part.hidden_part = ContextParallel(parallel.rank, parallel.size)  # type: ignore[assignment]


def _drops_attention(block: nn.Module) -> bool:
    names = ("attention_dropout", "attn_dropout", "attn_dropout_p")  # in transformers
    values = (getattr(block, name, 0.0) for name in names)
    return any(getattr(value, "p", value) for value in values)


def _shard_projection(part: nn.Module, style: Style | Fused, parallel: TensorParallel) -> nn.Module:
    assert isinstance(part, (nn.Linear, Conv1D))
    is_conv = isinstance(part, Conv1D)
    outputs, inputs = part.weight.shape[::-1] if is_conv else part.weight.shape
    if style is Style.ROW:
        shard_specs = {"weight": ShardSpec(0 if is_conv else 1, (inputs,))}
        inputs = shard_specs["weight"].width(parallel.rank, parallel.size)
    else:
        sizes = style.sizes if isinstance(style, Fused) else (outputs,)
        assert sum(sizes) == outputs
        shard_specs = {"weight": ShardSpec(1 if is_conv else 0, sizes), "bias": ShardSpec(0, sizes)}
        outputs = shard_specs["bias"].width(parallel.rank, parallel.size)
    with torch.device("meta"):
        column_conv, column_linear = (
            (ColumnParallelConv1D, ColumnParallelLinear) if parallel.splits_sequence else (Conv1D, nn.Linear)
        )
        if is_conv:
            sharded: Any = (RowParallelConv1D if style is Style.ROW else column_conv)(outputs, inputs)
        else:
            sharded = (RowParallelLinear if style is Style.ROW else column_linear)(
                inputs, outputs, part.bias is not None
            )
    sharded.to(part.weight.dtype)
    sharded.shard_specs, sharded.parallel = shard_specs, parallel
    return sharded


def _shard_heads(module: nn.Module, name: str, parallel: TensorParallel) -> None:
    owner, _, own_name = name.rpartition(".")
    part, parameter = module.get_submodule(owner), module.get_parameter(name)
    spec = ShardSpec(0, (len(parameter),))
    setattr(part, own_name, nn.Parameter(spec.take(parameter.detach(), parallel)))
    part.shard_specs = {own_name: spec}  # type: ignore[assignment]


def _shard_experts(part: Any, parallel: TensorParallel) -> None:
    """Shard gate_up_proj [experts, 2 x intermediate, D], down_proj [experts, D, intermediate], or transposed, and
    biases."""
    inputs, outputs = (1, 2) if part.is_transposed else (2, 1)
    length = part.down_proj.shape[inputs]
    halves: tuple[int, ...] = (length, length)
    if not part.is_concatenated:  # a gate's neuron next to its up's: pairs are kept together
        if length % parallel.size:
            raise UserError(
                f"tensor_parallel_size={parallel.size} does not divide the {length} neurons of an expert; "
                "give one that does"
            )
        halves = (2 * length,)
    shard_specs = {"gate_up_proj": ShardSpec(outputs, halves), "down_proj": ShardSpec(inputs, (length,))}
    if part.has_bias:
        shard_specs["gate_up_proj_bias"] = ShardSpec(1, halves)
        # Whole on each rank, whose outputs are summed
        part.bias_shares, part.sums_gradients = {"down_proj": 1 / parallel.size}, True
    for name, spec in shard_specs.items():
        setattr(part, name, nn.Parameter(spec.take(getattr(part, name).detach(), parallel)))
    part.shard_specs, part.intermediate_dim = shard_specs, part.down_proj.shape[inputs]
    if not parallel.splits_sequence:  # else the whole block's outputs are summed
        part.register_forward_hook(lambda part, args, outputs: sum_forward(outputs, parallel))


def _shard_vocabulary(part: nn.Module, parallel: TensorParallel) -> None:
    """Shard an embedding or a head, which may be the same module."""
    weight = part.weight
    assert isinstance(weight, torch.Tensor)
    spec = ShardSpec(0, (weight.shape[0],))
    start, stop = spec.intervals(parallel.rank, parallel.size)[0]
    names = [name for name, _ in part.named_parameters()]  # a head may have a bias
    for name in names:
        setattr(part, name, nn.Parameter(spec.take(part.get_parameter(name).detach(), parallel)))
    part.shard_specs = dict.fromkeys(names, spec)  # type: ignore[assignment]
    part.parallel = parallel  # type: ignore[assignment]
    if not isinstance(part, nn.Embedding):
        return
    part.num_embeddings = stop - start
    if part.padding_idx is not None:
        part.padding_idx = part.padding_idx - start if start <= part.padding_idx < stop else None  # type: ignore[assignment]
    lookup = VocabParallelEmbedding(start, stop, parallel)
    part.register_forward_pre_hook(lookup.localize)
    part.register_forward_hook(lookup.complete)


def shard_adapter(adapted: Any, parallel: TensorParallel) -> None:
    """Put the communication around the adapter that peft has added to a sharded weight: A and B of LoRA (2106.09685).

    Where inputs are sharded, so is A, and its outputs are summed; those of experts after B, with the experts' own
    outputs, so B sees a share of them. Where outputs are sharded, so is B, and A sees the gradients of this rank's
    outputs alone.
    """
    base, name = adapted.get_base_layer(), getattr(adapted, "parameter_name", "weight")
    shard_spec = getattr(base, "shard_specs", {}).get(name)
    for first, second in zip(adapted.lora_A.values(), adapted.lora_B.values(), strict=True):
        if shard_spec is None:
            if hasattr(base, "sums_gradients"):
                first.sums_gradients = second.sums_gradients = True
        elif not _cuts_first(base, shard_spec):
            second.shard_specs = {"weight": ShardSpec(0, shard_spec.sizes)}
            first.sums_gradients = True
        else:
            first.shard_specs = {"weight": ShardSpec(1, shard_spec.sizes)}
            if is_stack(base):
                second.sums_gradients = True
            elif not base.gives_share:
                first.register_forward_hook(lambda part, args, outputs: sum_outputs(outputs, parallel))


def _cuts_first(base: Any, shard_spec: ShardSpec) -> bool:
    """Return whether A is sharded, and not B. base: a projection, or experts, [experts, out, in] or [experts, in, out]
    where transposed."""
    if is_stack(base):
        return shard_spec.dim == (1 if is_transposed_to_peft(base) else 2)
    return isinstance(base, (RowParallelLinear, RowParallelConv1D))


def list_shard_specs(module: nn.Module) -> dict[str, ShardSpec]:
    """Return the shard specs of a layer's sharded tensors, by name."""
    parts = (
        (f"{name}." if name else "", part) for name, part in module.named_modules() if hasattr(part, "shard_specs")
    )
    return {
        prefix + name: spec
        for prefix, part in parts
        for name, spec in part.shard_specs.items()
        if getattr(part, name) is not None
    }  # type: ignore[operator, union-attr]


def list_partial_gradients(module: nn.Module) -> set[str]:
    """Return the parameters of a layer's module that each rank has whole, but whose gradient it computes only a share
    of: that of its heads, or of its part of the sequence."""
    if hasattr(module, "splits_sequence"):
        return {name for name, _ in module.named_parameters()} - list_shard_specs(module).keys()
    parts = (
        (f"{name}." if name else "", part) for name, part in module.named_modules() if hasattr(part, "sums_gradients")
    )
    return {prefix + name for prefix, part in parts for name, _ in part.named_parameters(recurse=False)}
