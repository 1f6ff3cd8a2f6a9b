"""What tensor parallelism shards of a layer: plans that `transformers` publishes, and what follows from the styles."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from models.layer import Fused, Layer, Style, Styles, refuse_sharding

_EXPERTS = "mlp.experts"
_ROUTERS = ("mlp.gate", "mlp.router")
_SHARED_EXPERTS = ("mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp")


def read_published_plan(config: PretrainedConfig) -> dict[str, Style]:
    """`base_model_tp_plan` of a decoder layer. Raises UserError where there is none, or it has other values than
    `Style`.
    """
    published: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix, known = "layers.*.", {style.value for style in (Style.COLUMN, Style.ROW, Style.SUMMED)}
    plan = {name.removeprefix(prefix): style for name, style in published.items() if name.startswith(prefix)}
    experts = [name for name in plan if name == _EXPERTS or name.startswith(f"{_EXPERTS}.")]
    for name in experts:
        del plan[name]
    if not plan:
        raise refuse_sharding(config, "transformers publishes no plan for it")
    if strange := {name: style for name, style in plan.items() if style not in known}:
        name = min(strange)
        raise refuse_sharding(
            config, f"the plan that transformers publishes for it has {name}: {strange[name]}, which is not supported"
        )
    # Not all plans name the norms of each head, which come after projections that are cut by their heads
    norms = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), Style.SUMMED)
    return norms | (_plan_mixture() if experts else {}) | {name: Style(style) for name, style in plan.items()}


def _plan_mixture() -> dict[str, Style]:
    """Of a mixture in the place of an MLP: experts cut along their inner neurons, those that are always chosen like an
    MLP, and a router that each rank has whole, and of whose gradient it sees what its shard of the experts gives.
    """
    mlp = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
    shared = {f"{block}.{name}": style for block in _SHARED_EXPERTS for name, style in mlp.items()}
    return {_EXPERTS: Style.EXPERTS, **dict.fromkeys(_ROUTERS, Style.SUMMED), **shared}


def count_sums(layer: Layer) -> tuple[int, int]:
    """Sums of hidden states over the ranks in a forward and in a backward pass, as `shard_module` and the loss do
    them.
    """
    styles = list(layer.styles.values())
    if Style.VOCABULARY in styles:
        is_lookup = issubclass(layer.module_class, nn.Embedding) and layer.owns_weights
        return (1, 0) if is_lookup else (0, 1)
    return styles.count(Style.ROW) + styles.count(Style.EXPERTS), len(list_blocks(layer.styles))


def list_blocks(styles: Styles) -> set[str]:
    """The modules around projections that are sharded by their outputs: attention, the MLP; the outermost where
    nested.
    """
    first = {
        name for name, style in styles.items() if style in (Style.COLUMN, Style.EXPERTS) or isinstance(style, Fused)
    }
    blocks = {name.rpartition(".")[0] for name in first}
    return {block for block in blocks if not any(block.startswith(f"{other}.") for other in blocks)}
