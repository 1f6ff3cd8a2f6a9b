"""Attention to the keys that an indexer selects: the keys that transformers' indexer selects, in pieces, and frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adapters import build_lora
from support.chain import BOUND, B, Chain, T, count_segments, difference, positions, tokens
from support.families import build_family, build_family_config
from support.packed_kernels import play_varlen
from torch import nn
from transformers import AutoConfig

from errors import UserError
from models.adapters.quantized import list_held
from models.architecture.lookup import build_layers, get_tensor_parallel_plan
from models.layers import indexed_attention
from models.layers.decoder import PipelineDecoderLayer
from models.layers.documents import DocumentBounds
from models.layers.frozen import FORMS
from models.layers.indexed_attention import IndexedAttention, IndexedRows
from models.layers.selection_cost import Selecting
from models.sharding.context_parallel import check_sequences
from training.costs.trace import trace_passes
from training.pipeline.activation_checkpoint import is_kept

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = (11, 1, 12)  # of the documents of a packed row
PACKED = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(B, 1)


def list_attention(chain: Chain) -> list[Any]:
    return [part for module in chain.stages for part in module.modules() if isinstance(part, IndexedAttention)]


def set_sizes(monkeypatch: pytest.MonkeyPatch, num_scores: int, num_queries: int) -> None:
    monkeypatch.setattr(indexed_attention, "_NUM_SCORES", num_scores)
    monkeypatch.setattr(indexed_attention, "_NUM_QUERIES", num_queries)


def run(chain: Chain, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return logits and gradients."""
    chain.zero_grad()
    logits = chain(input_ids, position_ids)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: gradient.clone() for name, gradient in chain.gradients().items()}


@EVERY_FAMILY
@pytest.mark.parametrize("num_scores", [2**26, 1])
def test_visible_keys_are_those_of_transformers(
    family: str, num_scores: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Rows have several documents, in one piece and query by query."""
    set_sizes(monkeypatch, num_scores, 1024)
    model = build_family(family)
    config, indexer = model.config, model.model.layers[0].self_attn.indexer
    attention = list_attention(Chain(model))[0]
    states, compressed = torch.randn(B, T, config.hidden_size), torch.randn(B, T, config.q_lora_rank)
    angles = model.model.rotary_emb(states, PACKED)
    numbers = (PACKED == 0).cumsum(1)
    visible = IndexedRows(numbers).find_visible(0, T, states.device)
    selected = attention.select(states, compressed, angles, IndexedRows(numbers))
    chosen = torch.zeros(B, T - config.index_topk, T, dtype=torch.bool).scatter(-1, selected.long(), True)
    expected = indexer(states, compressed, angles, visible, PACKED).long()
    expected = torch.zeros(B, T, T, dtype=torch.bool).scatter(-1, expected, True)
    late = slice(config.index_topk, None)
    assert torch.equal(chosen & visible[:, late], (expected & visible)[:, late])
    assert torch.equal((expected & visible)[:, : config.index_topk], visible[:, : config.index_topk])
    assert config.index_n_heads >= 32 and not torch.equal(expected & visible, visible)
    record_property("margin", margin := find_margin(indexer, states, compressed, angles, visible))
    assert margin > 1e-6


def find_margin(indexer: Any, states: torch.Tensor, compressed: torch.Tensor, angles: Any, visible: Any) -> float:
    """Return the smallest difference between the last score that is selected and the first one that is not, relative to
    the largest score."""
    scores: list[torch.Tensor] = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.topk:
                scores.append(args[0])
            return function(*args, **(kwargs or {}))

    with Seen():
        indexer(states, compressed, angles, visible, PACKED)
    (ranked,) = scores
    ranked = ranked.sort(dim=-1, descending=True).values
    edge = ranked[..., indexer.index_topk - 1] - ranked[..., indexer.index_topk]
    return (edge[edge.isfinite()].min() / ranked[ranked.isfinite()].abs().max()).item()


@EVERY_FAMILY
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "varlen"])
def test_pieces_change_nothing(family: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family(family)
    model.config._attn_implementation = kernel
    chain = Chain(model)
    for position_ids in (positions(), PACKED):
        set_sizes(monkeypatch, 2**26, 1024)
        whole = run(chain, tokens(), position_ids)
        set_sizes(monkeypatch, 3 * B * model.config.index_n_heads * T, 5)
        logits, gradients = run(chain, tokens(), position_ids)
        assert difference(logits, whole[0]) < BOUND
        for name, gradient in whole[1].items():
            assert difference(gradients[name], gradient) < BOUND, name


@EVERY_FAMILY
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "varlen"])
def test_no_scores_are_made_where_all_visible_keys_are_selected(
    family: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short row, and in a long one whose documents are known to be short: attention is dense."""
    model = build_family(family, index_topk=12)
    model.config._attn_implementation = kernel
    chain = Chain(model)
    selected = run(chain, tokens(), PACKED)
    called = play_varlen(monkeypatch)
    monkeypatch.setattr(IndexedAttention, "select", None)
    for module in chain.stages:
        if isinstance(module, PipelineDecoderLayer):
            module.context.bounds = DocumentBounds(most=3 * B, longest=12)
    dense = run(chain, tokens(), PACKED.clone())  # another micro-batch
    assert len(called) == (len(list_attention(chain)) if kernel == "varlen" else 0)
    assert difference(dense[0], selected[0]) < BOUND
    for name, gradient in selected[1].items():
        assert difference(dense[1][name], gradient) < BOUND, name
    with torch.no_grad():
        chain(tokens(12), positions(12))


@EVERY_FAMILY
def test_an_indexer_is_frozen_has_no_adapter_and_is_not_quantized(family: str) -> None:
    layers = build_layers(build_family_config(family))
    index = 1
    module = layers[index].module_class(*layers[index].args)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in module.named_parameters() if ".indexer." in name} != set()
    held = [name for form in FORMS for name in list_held(module, form)]
    assert held and not any("indexer" in name for name in held)
    build_lora(layers, r=2).attach(module, index, layers[index])
    adapted = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert adapted and not any("indexer" in name for name in adapted)
    with pytest.raises(UserError, match="no projection of the model is named 'wq_b'"):
        build_lora(layers, r=2, target_modules=["wq_b"])


@EVERY_FAMILY
def test_ranks_cannot_share_a_layer_or_a_sequence(family: str) -> None:
    config = build_family_config(family)
    with pytest.raises(UserError, match=f"a '{family}' cannot be sharded: its indexer selects the keys that a query"):
        get_tensor_parallel_plan(config)
    with pytest.raises(UserError, match=f"a '{family}' cannot share sequences: its indexer selects the keys that a qu"):
        check_sequences(config, "auto", 2, 1, 64)


@EVERY_FAMILY
def test_selective_keeps_nothing_of_a_selection(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the indexer alone, in rows whose queries are scored in several chunks."""
    chain = Chain(build_family(family))
    embedding, layer = chain.stages[:2]
    length, calls = 20, list[bool]()
    position_ids = torch.arange(length).unsqueeze(0)
    monkeypatch.setattr(indexed_attention, "_NUM_SCORES", 3 * chain.config.index_n_heads * length)
    kept = list[torch.Size]()

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if is_kept(function):
                kept.append(made[0].shape if isinstance(made, tuple) else made.shape)
            calls.append(Selecting.is_selecting)
            return made

    with Noting():
        layer(embedding((tokens(length)[:1], position_ids, count_segments(position_ids))))
    assert any(calls) and not Selecting.is_selecting and kept
    config = chain.config
    indexers = {config.index_n_heads, config.index_head_dim, config.index_n_heads * config.index_head_dim}
    assert not [shape for shape in kept if shape[-1] in indexers]


def build_published_layer(family: str, length: int) -> tuple[nn.Module, Any]:
    """Return the first decoder layer in published sizes on the meta device, and inputs of a row of `length` tokens."""
    config = AutoConfig.for_model(family)
    config._attn_implementation = "sdpa"
    module = build_layers(config)[1].build_on_meta().bfloat16()
    states = torch.empty(1, length, config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    places = torch.zeros(1, length, dtype=torch.long, device="meta")
    return module, lambda: module((states, places, places.int()))


@EVERY_FAMILY
def test_scores_exist_for_a_chunk_of_queries_alone(family: str) -> None:
    """In published sizes. Of all heads, queries and keys they would be 27 GB of a DeepSeek-V3.2's layer, 13 GB of a
    GLM-5's. A chunk has 256 MiB, whatever the length is, and no mask is that of a whole row."""
    length = 10240
    module, run_layer = build_published_layer(family, length)
    trace = trace_passes(run_layer, module)
    made = [operand for operator in (*trace.forward, *(trace.backward or ())) for operand in operator.made]
    assert trace.backward
    products = [operator.made[0] for operator in trace.forward if operator.name == "bmm"]
    largest = max(operand.nbytes for operand in products)
    assert 0.9 * 4 * 2**26 < largest <= 4 * 2**26
    assert (1024, length) in {operand.shape[-2:] for operand in made}
    assert not [operand.shape for operand in made if operand.shape[-2:] == (length, length)]
