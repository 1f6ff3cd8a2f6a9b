"""The cost of a layer with experts, against what torch computes and keeps: all experts for memory, the chosen ones for
work.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import MIXTURES, build_family_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig

from models.architecture.lookup import build_layers
from models.experts.grouped import GROUPED
from models.layers.layer import Layer
from models.parallel.shard import ExpertParallel, LayerRanks
from training.costs.cost import LayerCost, MicroBatchShape, count_layers

B, T = 2, 24
SHORT = ("mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "gpt_oss", "deepseek_v3")
FAMILIES = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.full)
    for name in sorted({*MIXTURES, "gpt_oss", "deepseek_v3"})
]


def build_config(model_type: str) -> PretrainedConfig:
    """With windows as long as the samples, for full scores."""
    windows = {"sliding_window": T} if getattr(build_family_config(model_type), "sliding_window", None) else {}
    config = build_family_config(model_type, **windows)
    config._attn_implementation = "eager"  # torch's counter does not know the CPU's fused kernel
    return config


def find_sparse(config: PretrainedConfig, layers: list[Layer]) -> int:
    """The first decoder layer with experts."""
    return next(index for index, layer in enumerate(layers) if any("experts." in name for name in layer.shapes()))


def count(config: PretrainedConfig, dtype: torch.dtype) -> LayerCost:
    layers = build_layers(config)
    costs = count_layers(layers, config, MicroBatchShape(B, T, dtype))
    return costs[find_sparse(config, layers)]


def run(config: PretrainedConfig, implementation: str, dtype: torch.dtype) -> tuple[int, int]:
    """(FLOPs of a forward pass, bytes of the storages that autograd keeps of it) of the layer with random weights."""
    config._experts_implementation = implementation
    layers = build_layers(config)
    layer, saved = layers[find_sparse(config, layers)], {}
    module = layer.module_class(*layer.args).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    integers = torch.arange(T).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)
    hidden_states = torch.randn(B, T, config.hidden_size, dtype=dtype, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, hooks:
        module((hidden_states, *integers))
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept = sum(storage.nbytes() for address, storage in saved.items() if address not in own)
    return counter.get_total_flops(), kept


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_work_is_that_of_a_loop_over_the_experts(model_type: str) -> None:
    config = build_config(model_type)
    cost = count(config, torch.float32)
    flops, _ = run(config, "eager", torch.float32)
    assert B * T * cost.work.forward_flops == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_activations_are_those_that_autograd_saves(model_type: str, dtype: torch.dtype) -> None:
    config = build_config(model_type)
    cost = count(config, dtype)
    assert not cost.is_estimated and config._experts_implementation == GROUPED
    assert cost.bytes.saved == pytest.approx(run(config, GROUPED, dtype)[1], rel=0.01)


def test_memory_holds_all_experts() -> None:
    config = build_config("mixtral")
    cost, expert_params = count(config, torch.float32), 3 * config.hidden_size * config.intermediate_size
    assert cost.parameters.held - cost.parameters.active == (8 - 2) * expert_params


def test_selective_keeps_the_products_of_the_experts() -> None:
    config = build_config("mixtral")
    kept = count(config, torch.float32).bytes.kept
    config.num_experts_per_tok += 1
    more = count(config, torch.float32).bytes.kept - kept
    assert more == B * T * (2 * config.intermediate_size + config.hidden_size) * 4


def test_divided_experts_take_a_part_of_the_memory_and_as_much_work() -> None:
    """The rows of all ranks go through a rank's experts. Under `selective` what has arrived is kept, there and back."""
    config = build_config("mixtral")
    layers, batch = build_layers(config), MicroBatchShape(B, T, torch.float32)
    index = find_sparse(config, layers)
    whole = count_layers(layers, config, batch)[index]
    cost = count_layers(layers, config, batch, ranks=LayerRanks(expert_parallel=ExpertParallel(size=4)))[index]
    expert_params = 3 * config.hidden_size * config.intermediate_size
    assert not cost.is_estimated and cost.parameters.divided == 2 * expert_params
    assert whole.parameters.held - cost.parameters.held == 6 * expert_params
    assert cost.work.forward_flops == whole.work.forward_flops
    assert cost.work.backward_flops == whole.work.backward_flops
    for name in ("active", "whole", "whole_trained"):
        assert getattr(cost.parameters, name) == getattr(whole.parameters, name), name
    assert (cost.work.sent_rows, whole.work.sent_rows) == (2, 0)
    rows_and_results = 2 * 2 * B * T * config.hidden_size * 4
    assert cost.bytes.kept - whole.bytes.kept == pytest.approx(rows_and_results, rel=0.05)  # and their weights


def test_the_rank_with_most_rows_keeps_more_of_them() -> None:
    """`moe.imbalance`: of the rows that arrive, not of those that are sent."""
    config = build_config("mixtral")
    config._attn_implementation = "sdpa"  # eager scores are wider than experts
    layers, batch = build_layers(config), MicroBatchShape(B, T, torch.float32)
    index = find_sparse(config, layers)
    even, uneven, one_sided = (
        count_layers(layers, config, batch, ranks=LayerRanks(expert_parallel=ExpertParallel(size=4, imbalance=load)))[
            index
        ]
        for load in (1, 1.5, 2)
    )
    arrived = 2 * B * T * (config.hidden_size + 2 * config.intermediate_size + config.hidden_size) * 4
    assert uneven.bytes.kept - even.bytes.kept == pytest.approx(0.5 * arrived, rel=0.05)
    assert uneven.bytes.saved - even.bytes.saved > 0.5 * arrived * 0.8
    for name in ("kept", "saved"):
        first, second, third = (getattr(cost.bytes, name) for cost in (even, uneven, one_sided))
        assert third - second == pytest.approx(second - first)
    assert even.bytes.widest < uneven.bytes.widest == 1.5 * even.bytes.widest
    assert even.work.forward_flops == uneven.work.forward_flops  # the others wait: `training/cost_terms/layer_ranks.py`


def test_logits_in_fp32_are_a_product_that_selective_makes_again() -> None:
    config = build_family_config("qwen3_moe")
    layers, shape = build_layers(config), MicroBatchShape(B, T, torch.bfloat16)
    index = find_sparse(config, layers)
    plain, in_fp32 = (count_layers(layers, config, shape, fp32_routers=each)[index] for each in (False, True))
    assert not in_fp32.is_estimated and in_fp32.work.forward_traffic != plain.work.forward_traffic
    assert in_fp32.work.forward_traffic.products == plain.work.forward_traffic.products
    assert plain.bytes.kept - in_fp32.bytes.kept == 2 * B * T * config.num_experts
    one, other = (
        count_layers(layers, config, replace(shape, dtype=torch.float32), fp32_routers=each)[index]
        for each in (False, True)
    )
    assert one == other
