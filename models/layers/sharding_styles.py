"""How tensor parallelism shards a layer: the plans that `transformers` publishes, and what follows from the styles."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from models.layers.layer import Fused, Layer, Style, Styles, refuse_sharding

_PREFIX = "layers.*."
_CUT = {style.value for style in (Style.COLUMN, Style.ROW, Style.SUMMED)}
# transformers cuts these to save memory, and gathers their outputs: between two of them tensors are whole
_GATHERED, _SPLIT = "colwise_gather_output", "rowwise_split_input"
_EXPERTS = "moe_tp_experts"
_ROUTERS = ("gate", "router")
_SHARED_EXPERTS = ("shared_experts", "shared_expert", "shared_mlp")
# Norms of queries and keys: over each head, or over all of them
_NORMS = ("self_attn.q_norm", "self_attn.k_norm", "self_attn.q_layernorm", "self_attn.k_layernorm")
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def read_published_plan(config: PretrainedConfig) -> dict[str, Style | Fused]:
    """Return `base_model_tp_plan` for the parts of a decoder layer. Raises UserError where there is none, or where it
    has values other than `Style` and those that gather."""
    published: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name.removeprefix(_PREFIX): style for name, style in published.items() if name.startswith(_PREFIX)}
    mixtures = {name.rpartition(".")[0] for name, style in plan.items() if style == _EXPERTS}
    stacks = tuple(f"{block}.experts." for block in mixtures)
    plan = {name: style for name, style in plan.items() if not f"{name}.".startswith(stacks)}
    if not plan:
        raise refuse_sharding(config, "transformers publishes no plan for it")
    cut = _cut_gathered(config, plan)
    if strange := {name: style for name, style in plan.items() if style not in (*_CUT, _GATHERED, _SPLIT)}:
        name = min(strange)
        raise refuse_sharding(
            config, f"the plan that transformers publishes for it has {name}: {strange[name]}, which is not supported"
        )
    # Not all plans name the norms of queries and keys, which come after projections that are cut by their heads
    norms = dict.fromkeys(_NORMS, Style.SUMMED)
    named = {part: style for block in mixtures for part, style in _plan_mixture(block).items()}
    return norms | named | {name: Style(style) for name, style in plan.items() if style in _CUT} | cut


def _cut_gathered(config: PretrainedConfig, plan: dict[str, str]) -> dict[str, Style | Fused]:
    """Remove the blocks that a plan gathers from it. Return the styles of those that can be sharded: attention, whose
    norms are then sharded too, and an MLP with gate and up in one. Other blocks stay whole on each rank."""
    cut: dict[str, Style | Fused] = {}
    blocks = {name.rpartition(".")[0] for name, style in plan.items() if style in (_GATHERED, _SPLIT)}
    for block in blocks:
        parts = {name for name in plan if name.startswith(f"{block}.")}
        own = {name.removeprefix(f"{block}.") for name in parts if plan[name] != Style.SUMMED.value}
        if own == _ATTENTION:
            cut |= {f"{block}.{name}": Style.ROW if name == "o_proj" else Style.COLUMN for name in own}
        elif own == {"gate_up_proj", "down_proj"}:
            width = config.intermediate_size
            cut |= {f"{block}.gate_up_proj": Fused((width, width)), f"{block}.down_proj": Style.ROW}
        for name in parts:
            del plan[name]
    return cut


def _plan_mixture(block: str) -> dict[str, Style]:
    """Return the plan of a mixture in place of an MLP: experts sharded along their inner neurons, shared experts like
    an MLP, and a router that each rank has whole, with the gradient of its shard of the experts."""
    mlp = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
    shared = {f"{block}.{expert}.{name}": style for expert in _SHARED_EXPERTS for name, style in mlp.items()}
    return {f"{block}.experts": Style.EXPERTS, **{f"{block}.{name}": Style.SUMMED for name in _ROUTERS}, **shared}


def fit_plan(plan: Styles, module: nn.Module) -> Styles:
    """Return the plan's styles for the parts that a layer's module has.

    A part that sums its gradients does so in a block that is sharded. A norm of queries or keys is sharded like their
    projection where it has a number for each of its outputs, or a vector for each of its heads.
    """
    parts = {name for name, _ in (*module.named_modules(), *module.named_parameters())}
    styles = {name: style for name, style in plan.items() if name in parts}
    blocks = list_blocks(styles)
    styles = {
        name: style
        for name, style in styles.items()
        if style is not Style.SUMMED or any(name.startswith(f"{block}.") for block in blocks)
    }
    for name in (name for name in _NORMS if styles.get(name) is Style.SUMMED):
        norm: Any = module.get_submodule(name)
        if not list(norm.parameters()):  # nothing to sum (nanochat)
            del styles[name]
            continue
        projection = f"{name.rpartition('_')[0]}_proj"
        if projection in parts and norm.weight.numel() == len(module.get_submodule(projection).weight):  # type: ignore[arg-type]
            del styles[name]
            if norm.weight.ndim == 2:
                styles[f"{name}.weight"] = Style.HEADS
            elif type(norm).__name__.endswith("RMSNorm"):  # all that `ShardedNorm` computes
                styles[name] = Style.NORM
    return styles


def count_sums(layer: Layer) -> tuple[int, int]:
    """Return the number of sums of hidden states over the ranks in a forward and in a backward pass, as done by
    `shard_module` and the loss."""
    styles = list(layer.styles.values())
    if Style.VOCABULARY in styles:
        is_lookup = issubclass(layer.module_class, nn.Embedding) and not layer.is_tied_head
        return (1, 0) if is_lookup else (0, 1)
    return styles.count(Style.ROW) + styles.count(Style.EXPERTS), len(list_blocks(layer.styles))


def list_blocks(styles: Styles) -> set[str]:
    """Return the modules around projections that are sharded by their outputs: attention, the MLP; the outermost where
    nested."""
    first = {
        name for name, style in styles.items() if style in (Style.COLUMN, Style.EXPERTS) or isinstance(style, Fused)
    }
    blocks = {name.rpartition(".")[0] for name in first}
    return {block for block in blocks if not any(block.startswith(f"{other}.") for other in blocks)}
