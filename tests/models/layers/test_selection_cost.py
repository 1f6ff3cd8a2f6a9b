"""A plan states what a selection of keys takes: FLOPs, bytes at once, bytes that are moved and kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chain import Chain
from support.families import build_family
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from benchmarks.allocation import AllocationPeak
from models.architecture.lookup import build_layers
from models.layers import indexed_attention
from models.layers.indexed_attention import IndexedAttention, IndexedRows
from training.costs.trace import trace_operators
from training.costs.traffic import count_traffic

B, T = 2, 300
PUBLISHED = {"index_n_heads": 64, "index_head_dim": 128, "qk_rope_head_dim": 64}  # heads of an indexer
FAMILIES = ("deepseek_v32", "glm_moe_dsa")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [64, 50])  # queries: the last chunk is a whole one, or one of 42
def test_a_selection_takes_what_the_plan_says(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_attention, "_NUM_SCORES", chunk * B * PUBLISHED["index_n_heads"] * T)
    model = build_family(family, **PUBLISHED)
    layers = [part for part in Chain(model).modules() if isinstance(part, IndexedAttention)]
    attention, rows = layers[0], IndexedRows(None)
    config = model.config
    states, compressed = torch.randn(B, T, config.hidden_size), torch.randn(B, T, config.q_lora_rank)
    angles = model.model.rotary_emb(states, torch.arange(T).expand(B, T))

    def select() -> Any:
        return attention.select(states, compressed, angles, rows)

    cost = attention.count_selection(B, T, 4)
    assert cost is not None
    with FlopCounterMode(display=False) as flops:
        selected = select()
    assert cost.score_flops + cost.projection_flops == flops.get_total_flops()
    assert cost.selected_bytes == selected.nbytes
    parameters = list(attention.parameters())
    with AllocationPeak(states, compressed, *angles, *parameters) as counter:
        select()
    assert cost.score_bytes == pytest.approx(counter.peak, rel=0.05)
    operators = trace_operators(select)
    (traffic,) = count_traffic([operators], fuses=False)
    assert cost.num_chunks == sum(operator.name == "topk" for operator in operators) > 3
    share = 1 - 1 / cost.num_chunks  # about: one is in the record of the layer
    assert cost.moved_bytes == pytest.approx(share * traffic.moved, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_selection_where_attention_is_dense(family: str) -> None:
    layers = [part for part in Chain(build_family(family)).modules() if isinstance(part, IndexedAttention)]
    topk = layers[0].config.index_topk
    assert layers[0].count_selection(B, topk, 4) is None
    one_more, shared = layers[0].count_selection(B, topk + 1, 4), layers[1].count_selection(B, topk + 1, 4)
    assert (
        one_more is not None and one_more.selected_bytes == 4 * B * topk and one_more.mask_bytes == 4 * B * (topk + 1)
    )
    if layers[1].indexer is None:
        assert shared is not None and shared.mask_bytes == one_more.mask_bytes and shared.score_flops == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_of_published_sizes_takes_less_than_4_gb(family: str) -> None:
    """For a row of 16,384 tokens in bf16, in a layer of the published sizes."""
    config = AutoConfig.for_model(family)
    layer = next(each for each in build_layers(config) if "layers.0." in each.hf_prefix)
    with torch.device("meta"):
        module = layer.module_class(*layer.args)
    (attention,) = (part for part in module.modules() if isinstance(part, IndexedAttention))
    cost = attention.count_selection(1, 16_384, 2)
    assert cost is not None and cost.num_chunks > 1
    assert 0 < cost.score_bytes + cost.selected_bytes + cost.mask_bytes < 4e9
