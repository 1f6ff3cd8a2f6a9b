"""Experts by grouped products: outputs and gradients are those of transformers' own loop over the experts, whatever the
routing, and the backward pass keeps little memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.experts import BOUNDS, EXPERTS, D, E, I, K, N, build_experts, compute, difference
from torch.utils.checkpoint import checkpoint

from models.experts.grouped import GROUPED, dispatch
from models.experts.products import multiply_groups
from training.config.schema import CheckpointMode
from training.costs.trace import trace_passes
from training.pipeline.activation_checkpoint import ActivationCheckpointing


def route(routing: str) -> torch.Tensor:
    """Returns [N, K], the experts of each token."""
    torch.manual_seed(1)
    if routing == "one token":
        return torch.tensor([[5, 2]])
    if routing == "one expert":  # as no router does: a token's second choice is the same one
        return torch.full((N, K), 3)
    some = E // 2 if routing == "empty experts" else E
    return torch.rand(N, some).topk(K).indices


@pytest.mark.parametrize("routing", ["all experts", "empty experts", "one token", "one expert"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "fp64"])
@pytest.mark.parametrize("model_type", EXPERTS)
def test_outputs_and_gradients_are_those_of_a_loop(model_type: str, dtype: torch.dtype, routing: str) -> None:
    experts, index = build_experts(model_type, dtype), route(routing)
    assert difference(compute(experts, GROUPED, index), compute(experts, "eager", index)) <= BOUNDS[dtype]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_bf16_is_as_exact_as_in_transformers(model_type: str) -> None:
    """Compared with the loop in fp64 on the same numbers."""
    experts, index = build_experts(model_type, torch.bfloat16), route("all experts")
    ours, theirs = (compute(experts, name, index) for name in (GROUPED, "grouped_mm"))
    exact = [tensor.float() for tensor in compute(experts.double(), "eager", index)]
    assert {tensor.dtype for tensor in ours} == {torch.bfloat16}
    assert difference(ours, exact) <= max(0.02, 1.5 * difference(theirs, exact))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_router_in_fp32_with_experts_in_bf16(model_type: str) -> None:
    """As in DeepSeek-V3: router weights and their gradients stay fp32, the rest is bf16."""
    experts, index = build_experts(model_type, torch.bfloat16), route("all experts")
    ours, theirs = (compute(experts, name, index, weights_dtype=torch.float32) for name in (GROUPED, "eager"))
    assert ours[0].dtype is torch.bfloat16 and difference(ours, theirs) <= 0.02
    exact = compute(experts.double(), "eager", index)
    found, expected = ours[2], exact[2]
    assert found.dtype is torch.float32 and not torch.equal(found, found.bfloat16().float())
    assert difference([found.double()], [expected]) <= 1.5 * difference([theirs[2].double()], [expected])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_router_in_fp32_with_experts_in_fp64(model_type: str) -> None:
    """As in the proof of a family whose router computes in fp32: sums are in fp64, and their results alone rounded."""
    experts, index = build_experts(model_type, torch.float64), route("all experts")
    found = compute(experts, GROUPED, index, weights_dtype=torch.float32)[2]
    assert torch.equal(found, compute(experts, "eager", index)[2].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_rows_that_the_grouped_product_of_torch_refuses(model_type: str, dtype: torch.dtype) -> None:
    """3 columns per expert, as in some shards of tensor parallelism."""
    experts, index = build_experts(model_type, dtype, intermediate_size=3), route("empty experts")
    bound = 1e-5 if dtype is torch.float32 else 0.05
    assert difference(compute(experts, GROUPED, index), compute(experts, "eager", index)) <= bound


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("mode", [CheckpointMode.grouped, CheckpointMode.selective], ids=lambda mode: mode.value)
def test_recomputation_gives_the_same(model_type: str, mode: CheckpointMode) -> None:
    experts, index = build_experts(model_type), route("all experts")
    run = ActivationCheckpointing(1, mode).build_function()
    again = compute(experts, GROUPED, index, partial(run, experts))
    assert difference(again, compute(experts, GROUPED, index)) == 0


def test_selective_checkpointing_repeats_no_product() -> None:
    experts, index = build_experts("qwen3_moe"), route("all experts")
    counts = []
    for run in (None, partial(checkpoint, experts, use_reentrant=False), partial(_checkpoint_selectively, experts)):
        with torch.profiler.profile() as profile:
            compute(experts, GROUPED, index, run)
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::_grouped_mm"))
    assert counts == [6, 8, 6]


def _checkpoint_selectively(*args: Any) -> torch.Tensor:
    outputs: torch.Tensor = ActivationCheckpointing(1, CheckpointMode.selective).build_function()(*args)
    return outputs


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_compilation_gives_the_same(model_type: str) -> None:
    """As one graph, and in fp32, for which torch's grouped product has no meta function."""
    experts, index = build_experts(model_type), route("empty experts")
    compiled = torch.compile(experts, fullgraph=True)
    assert difference(compute(experts, GROUPED, index, compiled), compute(experts, GROUPED, index)) <= 1e-5


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_tokens_are_kept_instead_of_their_rows(trains: bool) -> None:
    """Per row both inner tensors are saved where their matrices are trained, else the first, and indices."""
    experts = build_experts("qwen3_moe").to("meta").requires_grad_(trains)
    experts.config._experts_implementation = GROUPED  # type: ignore[union-attr]
    hidden_states = torch.empty(N, D, device="meta", requires_grad=True)
    index = torch.empty(N, K, dtype=torch.long, device="meta")
    weights = torch.empty(N, K, device="meta", requires_grad=True)
    trace = trace_passes(lambda: (experts(hidden_states, index, weights),), experts)
    saved = trace.sum_sizes(trace.saved)
    rows, tokens = N * K, N * D * 4 * trains
    indices = rows * 8 * 2 + E * 4  # positions and tokens, offsets
    assert saved == rows * (2 + trains) * I * 4 + rows * 4 + tokens + indices


def test_results_have_the_layout_that_a_compiler_is_told() -> None:
    """torch pads rows of 4 in bf16 to 16 bytes; without rows, nothing is launched."""
    left, right = torch.ones(6, 8, dtype=torch.bfloat16), torch.ones(2, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    offsets = torch.tensor([4, 6], dtype=torch.int32)
    assert multiply_groups(left, right, offsets).is_contiguous()
    with patch.object(torch.nn.functional, "grouped_mm") as launched:
        empty = torch.zeros(2, dtype=torch.int32)
        assert multiply_groups(left[:0], right, empty).shape == (0, 4)
        gradient = multiply_groups(left[:0].t(), left[:0], empty)
    assert gradient.shape == (2, 8, 8) and not gradient.any() and not launched.called


def test_results_are_deterministic() -> None:
    experts, index = build_experts("gpt_oss"), route("one expert")
    first, second = (compute(experts, GROUPED, index) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_dispatch_by_hand() -> None:
    where = dispatch(torch.tensor([[2, 0], [0, 3]]), num_experts=4)
    assert where.order.tolist() == [1, 2, 0, 3] and where.tokens.tolist() == [0, 1, 0, 1]
    assert where.experts.tolist() == [0, 0, 2, 3] and where.offsets.tolist() == [2, 2, 3, 4]
    assert where.positions.tolist() == [[2, 0], [1, 3]] and where.offsets.dtype is torch.int32
