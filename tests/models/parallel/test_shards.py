"""Shards gathered again, where their elements are, and which families cannot be sharded; without processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.families import FAMILIES, build_family_config, has_sharding_plan
from torch import nn
from transformers import AutoConfig

from errors import UserError
from models.architecture.lookup import build_layers
from models.experts.grouped import is_stack
from models.generic.shrink import shrink
from models.layers.layer import Fused, Layer, Style
from models.parallel.layers import PerRankRNG
from models.parallel.shard import ShardSpec, TensorParallel, split_evenly
from models.sharding.tensor_parallel import shard_layers, shard_module

SPECS = st.builds(ShardSpec, st.integers(0, 1), st.lists(st.integers(4, 9), min_size=1, max_size=3).map(tuple))


@given(SPECS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 12))
def test_the_parts_are_the_whole(spec: ShardSpec, size: int, across: int, fragment: int) -> None:
    """across: the length of the other dimension. fragment: elements of a part that are placed together, as those of
    ZeRO's partitions are."""
    shape = (spec.length, across) if spec.dim == 0 else (across, spec.length)
    unsharded = torch.arange(spec.length * across).reshape(shape)
    parts = [spec.take(unsharded, TensorParallel(rank, size)) for rank in range(size)]
    assert [part.shape[spec.dim] for part in parts] == [spec.width(rank, size) for rank in range(size)]
    found = torch.full((unsharded.numel(),), -1)
    for rank, part in enumerate(parts):
        place = spec.locate(part.shape, TensorParallel(rank, size))
        flat = part.flatten()
        for start in range(0, len(flat), fragment):
            for low, whole, length in place.list_runs(start, min(start + fragment, len(flat))):
                found[whole : whole + length] = flat[low : low + length]
    assert torch.equal(found.reshape(shape), unsharded)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_an_even_split_lacks_nothing_and_begins_with_the_longest(length: int, size: int) -> None:
    runs = split_evenly(length, size)
    assert [run[0] for run in runs] == [0, *(stop for _, stop in runs[:-1])] and runs[-1][1] == length
    widths = [stop - start for start, stop in runs]
    assert len(runs) == size and widths == sorted(widths, reverse=True) and widths[0] - widths[-1] <= 1


def test_parts_of_several_matrices_hold_a_share_of_each() -> None:
    assert ShardSpec(0, (8, 4)).take(torch.arange(12), TensorParallel(1, 2)).tolist() == [4, 5, 6, 7, 10, 11]


def test_random_numbers_are_a_ranks_own_in_a_block_and_the_same_after_it() -> None:
    inside, after = [], []
    for rank in (0, 1, 0):
        torch.manual_seed(5)
        randomness = PerRankRNG(rank)
        randomness.begin(torch.device("cpu"))
        inside.append(torch.rand(8))
        randomness.end()
        after.append(torch.rand(8))
    assert (
        torch.equal(after[0], after[1]) and torch.equal(inside[0], inside[2]) and not torch.equal(inside[0], inside[1])
    )


def test_a_router_with_jitter_trains_in_a_sharded_block() -> None:
    """It multiplies the inputs of its block in place."""
    config = build_family_config("mixtral")
    config.router_jitter_noise = 0.5
    layer = shard_layers(config, build_layers(config), 2)[1]
    module = layer.build_on_meta()
    shard_module(module, layer.styles, TensorParallel(0, 2))
    block = module.get_submodule("mlp").to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    given = torch.randn(1, 8, config.hidden_size, requires_grad=True)
    block.train()(given * 1).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_a_family_has_a_plan_for_all_of_its_blocks_or_is_refused() -> None:
    for family in FAMILIES:
        config = build_family_config(family)
        if has_sharding_plan(family):
            layers = shard_layers(config, build_layers(config), 2)
            assert sum(bool(layer.styles) for layer in layers) == config.num_hidden_layers + 2, (
                family
            )  # and embedding and head
        else:
            reason = "(its file in models/ has no plan for it|its indexer selects)"
            with pytest.raises(UserError, match=f"a '{family}' cannot be sharded: {reason}"):
                shard_layers(config, build_layers(config), 2)
    assert sum(map(has_sharding_plan, FAMILIES)) >= 10


def test_a_published_plan_that_is_not_supported_is_refused_by_name() -> None:
    config = shrink(AutoConfig.for_model("glm4_moe_lite"))
    with pytest.raises(
        UserError,
        match="a 'glm4_moe_lite' cannot be sharded: the plan .* has self_attn.kv_a_proj_with_mqa: mla_kv_a_proj, which",
    ):
        shard_layers(config, build_layers(config), 2)


def list_styles(family: str) -> dict[str, Any]:
    """Return the styles of the last decoder layer, and those of the first under "0."."""
    config = build_family_config(family)
    layers = [layer for layer in shard_layers(config, build_layers(config), 2) if "layers." in layer.hf_prefix]
    return dict(layers[-1].styles) | {f"0.{name}": style for name, style in layers[0].styles.items()}


def test_what_a_published_plan_gathers_is_cut_by_itself_or_left_whole() -> None:
    olmo3, glm4, qwen = map(list_styles, ("olmo3", "glm4", "qwen3_5_text"))
    assert olmo3["self_attn.q_proj"] is Style.COLUMN and olmo3["self_attn.q_norm"] is Style.NORM
    assert glm4["mlp.gate_up_proj"] == Fused((80, 80)) and glm4["mlp.down_proj"] is Style.ROW
    assert qwen["self_attn.q_norm"] is Style.SUMMED and "0.mlp.up_proj" in qwen
    assert not any("attn" in name for name in qwen if name.startswith("0."))


def test_norms_of_each_head_with_weights_of_their_own_are_cut_by_heads() -> None:
    assert list_styles("cohere")["self_attn.q_norm.weight"] is Style.HEADS


@pytest.mark.parametrize(
    ("feature", "value", "reason"),
    [
        ("has_gate", False, "are experts without a gate"),
        ("has_post_expert_norm", True, "have a norm after each expert"),
    ],
)
def test_experts_that_are_more_than_gate_up_and_down_are_refused(
    monkeypatch: pytest.MonkeyPatch, feature: str, value: bool, reason: str
) -> None:
    """nemotron_h and muse_spark have such experts."""
    config = build_family_config("deepseek_v3")
    layers, build = build_layers(config), Layer.build_on_meta

    def build_with_feature(layer: Layer) -> nn.Module:
        module = build(layer)
        for part in filter(is_stack, module.modules()):
            setattr(part, feature, value)
        return module

    shard_layers(config, layers, 2)
    monkeypatch.setattr(Layer, "build_on_meta", build_with_feature)
    message = f"a 'deepseek_v3' cannot be sharded: 'model.layers.1.mlp.experts' {reason}; give tensor_parallel_size=1"
    with pytest.raises(UserError, match=message):
        shard_layers(config, layers, 2)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "llama",
            {},
            "tensor_parallel_size=4 does not divide the model's 4 attention heads and 2 key value heads; sizes that "
            "do: 1, 2",
        ),
        ("mpt", {}, "tensor_parallel_size=4 does not divide the model's 6 attention heads; sizes that do: 1, 2, 3, 6"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(family: str, fields: dict[str, float], message: str) -> None:
    config = build_family_config(family, **fields)
    with pytest.raises(UserError, match=re.escape(message)):
        shard_layers(config, build_layers(config), 4)
