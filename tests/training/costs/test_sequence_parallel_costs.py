"""The bytes that `sequence_parallel` saves and sends, counted on the layers that a run builds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import build_family_config
from transformers import LlamaConfig

from errors import UserError
from models.architecture.lookup import build_layers
from models.parallel.shard import ContextParallel, LayerRanks, TensorParallel
from models.sharding.sequence_obstacles import check_sequence_parts
from models.sharding.tensor_parallel import shard_layers
from training.costs.cost import LayerCost, MicroBatchShape, count_layers

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=16,
    vocab_size=96, attn_implementation="sdpa",
)  # fmt: skip


def count_decoder_layer(size: int, splits: bool) -> LayerCost:
    costs = count_layers(
        shard_layers(CONFIG, build_layers(CONFIG), size), CONFIG, MicroBatchShape(2, 64, torch.float32),
        ranks=LayerRanks(TensorParallel(size=size, splits_sequence=splits)),
    )  # fmt: skip
    return costs[1]


def test_what_a_layer_keeps_for_the_backward_pass_falls_as_ranks_grow() -> None:
    """Rotary angles alone are whole on each rank, here 4 of 64 channels twice."""
    whole = count_decoder_layer(1, False)
    angles = 2 * 2 * 64 * 4 * 4
    for size in (2, 4):
        cut, split = count_decoder_layer(size, False), count_decoder_layer(size, True)
        assert split.bytes.saved - angles == pytest.approx((whole.bytes.saved - angles) / size, rel=1e-3)
        assert split.bytes.output * size == cut.bytes.output == whole.bytes.output
        assert split.bytes.saved < cut.bytes.saved
        sums = split.work.forward_sums, split.work.backward_sums
        assert sums == (cut.work.forward_sums, cut.work.backward_sums) == (2, 2) and (
            split.work.regathers,
            cut.work.regathers,
        ) == (2, 0)


def test_what_cannot_be_split_is_refused() -> None:
    layers = shard_layers(CONFIG, build_layers(CONFIG), 2)
    check_sequence_parts(CONFIG, layers, 2, 64)
    with pytest.raises(UserError, match=r"max_seq_length=65 is not a multiple of 2; the nearest is 64 or 66"):
        check_sequence_parts(CONFIG, layers, 2, 65)
    whole_attention = replace(layers[1], styles={n: s for n, s in layers[1].styles.items() if "mlp" in n})
    with pytest.raises(UserError, match=r"'model\.layers\.0\.self_attn' needs all tokens"):
        check_sequence_parts(CONFIG, [whole_attention], 2, 64)
    mixtral = build_family_config("mixtral")
    check_sequence_parts(mixtral, shard_layers(mixtral, build_layers(mixtral), 2), 2, 64)
    mixtral.router_jitter_noise = 0.3
    with pytest.raises(UserError, match=r"routers of this 'mixtral' draw random numbers \(router_jitter_noise=0\.3 in"):
        check_sequence_parts(mixtral, shard_layers(mixtral, build_layers(mixtral), 2), 2, 64)


@pytest.mark.parametrize("family", ["mpt", "llama"])  # one has no field for the heads of keys and values
def test_heads_are_divided_once(family: str) -> None:
    config = build_family_config(family)
    config.num_attention_heads = 8
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 8
    config._attn_implementation = "eager"
    ranks = LayerRanks(TensorParallel(size=2), ContextParallel(rank=0, size=2, is_ring=False))
    layers = shard_layers(config, build_layers(config), 2)
    shared = count_layers(layers, config, MicroBatchShape(2, 8, torch.float32), ranks=ranks)[1].shared_attention
    assert shared is not None and (shared.heads, shared.kv_heads) == (4, 4)
