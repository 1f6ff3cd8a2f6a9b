"""GLM-5's layers that attend to the keys that an earlier layer has selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chain import Chain, count_segments
from support.families import build_family, build_family_config
from transformers import AutoConfig

from errors import UserError
from models.architecture.lookup import build_layers
from models.layers.indexed_attention import IndexedAttention
from training.pipeline.recomputation import recompute

GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # of its config.json


def test_a_stage_begins_with_no_layer_that_borrows_a_selection() -> None:
    """In the published pattern: three layers with indexers, then one of four."""
    config = AutoConfig.for_model("glm_moe_dsa", **GLM_5_2)
    layers = build_layers(config)
    joined = [index - 1 for index, layer in enumerate(layers) if layer.is_joined]
    assert joined == [index for index, kind in enumerate(config.indexer_types) if kind == "shared"]
    assert len(joined) == 57 and config.num_hidden_layers == 78 and joined[:4] == [3, 4, 5, 7]
    names = [set(layers[1 + index].shapes()) for index in (2, 3)]
    assert {name for name in names[0] ^ names[1] if "mlp" not in name} == {
        name for name in names[0] if ".indexer." in name
    }


def test_a_first_layer_that_borrows_is_refused() -> None:
    config = build_family_config("glm_moe_dsa", indexer_types=["shared", "full", "full", "full"])
    with pytest.raises(UserError, match="indexer_types of this 'glm_moe_dsa' begins with 'shared'"):
        build_layers(config)


@pytest.mark.parametrize("group_size", [1, 2])
def test_recomputed_layers_keep_the_selection_that_they_had(group_size: int) -> None:
    """There are two micro-batches in flight, as in a stage; layers with an indexer select again."""
    chain = Chain(build_family("glm_moe_dsa"))
    embedding, *layers = chain.stages[:5]
    calls = count_selections(layers)
    micro_batches = torch.randint(3, 200, (2, 2, 20), generator=torch.Generator().manual_seed(3))

    def differentiate(recomputes: bool) -> list[torch.Tensor]:
        chain.zero_grad()
        outputs = []
        for input_ids, first in zip(micro_batches, (20, 13), strict=True):
            position_ids = torch.cat([torch.arange(first), torch.arange(20 - first)]).repeat(2, 1)
            values: Any = embedding((input_ids, position_ids, count_segments(position_ids)))
            for start in range(0, len(layers), group_size):
                group = layers[start : start + group_size]
                values = (recompute if recomputes else run)(lambda *given, group=group: run_all(group, given), *values)
            outputs.append(values[0].square().sum())
        sum(outputs).backward()
        return [parameter.grad.clone() for parameter in chain.parameters() if parameter.grad is not None]

    expected = differentiate(False)
    assert len(calls) == 4  # two layers with an indexer, two micro-batches
    torch.testing.assert_close(differentiate(True), expected, rtol=0, atol=0)
    assert len(calls) == 4 + 2 * 4


def run(function: Any, *values: Any) -> Any:
    return function(*values)


def run_all(layers: Any, values: Any) -> Any:
    for layer in layers:
        values = layer(values)
    return values


def count_selections(layers: Any) -> list[Any]:
    """Return a list that gets an entry for each selection that the layers make from now on."""
    calls: list[Any] = []
    for attention in (part for layer in layers for part in layer.modules() if isinstance(part, IndexedAttention)):

        def select(*args: Any, made: Any = attention.select) -> torch.Tensor:
            calls.append(None)
            return made(*args)

        attention.select = select
    return calls


def test_a_layer_that_is_run_alone_gets_a_selection_of_the_right_shape() -> None:
    chain = Chain(build_family("glm_moe_dsa"))
    embedding, first, second = chain.stages[:3]
    position_ids = torch.arange(20).repeat(2, 1)
    values = embedding((torch.ones_like(position_ids), position_ids, count_segments(position_ids)))
    assert len(first.complete_inputs(values)) == 3
    passed = first(values)
    assert second.complete_inputs(passed) is passed
    made = second.complete_inputs(values)
    assert made[3].shape == passed[3].shape == (2, 12, 8) and made[3].dtype is passed[3].dtype is torch.int32
    assert len(second(made)) == len(second(passed)) == 3
    assert (first.count_lent(2, 20), second.count_lent(2, 20)) == (passed[3].nbytes, 0)
