"""The cost of a layer, against what PyTorch really computes and keeps on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.families import build_family_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, PretrainedConfig

from benchmarks.allocation import AllocationPeak
from models.adapters.adapter import Adapter
from models.adapters.targets import build_lora_config
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from training.costs.cost import LayerCost, MicroBatchShape, count_layers, mean_keys

B, T, D, I, V, HEADS, KV_HEADS, HEAD = 2, 48, 64, 96, 200, 4, 2, 16
DECODER_MATRICES = D * HEAD * (HEADS + 2 * KV_HEADS) + HEADS * HEAD * D + 3 * D * I


def build_config(tied: bool = False, attention: str = "sdpa") -> PretrainedConfig:
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=I, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = attention
    return config


def count(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> list[LayerCost]:
    return count_layers(build_layers(config), config, MicroBatchShape(B, T, dtype))


def build_real(layer: Layer, dtype: torch.dtype) -> torch.nn.Module:
    return layer.module_class(*layer.args).to(dtype)


def real_inputs(dtype: torch.dtype, document: int = T) -> tuple[torch.Tensor, ...]:
    """document: tokens of each of a row's documents."""
    integers = (torch.arange(T) % document).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)
    return torch.randn(B, T, D, requires_grad=True).to(dtype), *integers


def bytes_really_saved(layer: Layer, dtype: torch.dtype, document: int = T) -> int:
    """Storages that autograd keeps of a real forward pass, without the layer's parameters."""
    module, saved = build_real(layer, dtype), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    inputs = real_inputs(dtype, document)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(inputs)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("index", [1, 4], ids=["decoder", "norm"])
def test_the_activations_are_those_that_autograd_saves(index: int, attention: str, dtype: torch.dtype) -> None:
    config = build_config(attention=attention)
    cost = count(config, dtype)[index]
    assert not cost.is_estimated
    assert cost.bytes.saved == pytest.approx(bytes_really_saved(build_layers(config)[index], dtype), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_packed_rows_keep_a_mask_in_each_layer_and_keys_of_every_head(dtype: torch.dtype) -> None:
    config = build_config()
    layers = build_layers(config)
    packed = count_layers(layers, config, MicroBatchShape(B, T, dtype, is_packed=True))[1]
    whole = count_layers(layers, config, MicroBatchShape(B, T, dtype))[1]
    assert packed.bytes.saved == pytest.approx(bytes_really_saved(build_layers(config)[1], dtype, T // 2), rel=0.01)
    assert packed.bytes.saved > whole.bytes.saved + B * T * T * dtype.itemsize and not packed.is_estimated


def test_flash_attention_is_counted_where_its_package_is_missing() -> None:
    flash, sdpa = (count(build_config(attention=name), torch.bfloat16)[1] for name in ("flash_attention_2", "sdpa"))
    assert (flash.bytes.saved, flash.is_estimated) == (sdpa.bytes.saved, False)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_are_added_to_lent_sums_are_not_made(tied: bool) -> None:
    """All but those of norms, and of the head, which the loss makes; of compiled layers the embedding's alone."""
    config = build_config(tied)
    embedding, decoder, *_, head = (cost.parameters for cost in count(config))
    assert (embedding.largest_made, decoder.largest_made, head.largest_made) == (0, D, V * D)
    assert (embedding.largest_trained, decoder.largest_trained) == (V * D, D * I)
    compiled = count_layers(build_layers(config), config, MicroBatchShape(B, T, torch.float32), compiles=True)
    assert [cost.parameters.largest_made for cost in compiled[:2]] == [0, D * I]


def test_parameters_are_those_of_the_built_layers() -> None:
    config = build_config()
    modules = [build_real(layer, torch.float32) for layer in build_layers(config)]
    assert [cost.parameters.held for cost in count(config)] == [
        sum(p.numel() for p in module.parameters()) for module in modules
    ]


def test_flops_are_those_that_torch_counts_and_fused_attention_skips_the_causal_half() -> None:
    config = build_config(attention="eager")  # torch's counter does not know the CPU's fused kernel
    layer = build_layers(config)[1]
    with FlopCounterMode(display=False) as counter:
        build_real(layer, torch.float32)(real_inputs(torch.float32))
    full_attention = 2 * T * HEADS * 2 * HEAD
    cost, fused = count(config)[1], count(build_config())[1]
    assert (
        counter.get_total_flops() == B * T * (2 * DECODER_MATRICES + full_attention) == B * T * cost.work.forward_flops
    )
    assert fused.work.attention_flops == full_attention * (T + 1) / (2 * T)
    assert fused.work.forward_flops == 2 * DECODER_MATRICES + fused.work.attention_flops
    assert cost.work.attention_width == fused.work.attention_width == 2 * HEADS * HEAD


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_looked_up_embedding_is_no_work_and_the_head_is(tied: bool) -> None:
    first, *_, head = count(build_config(tied))
    assert first.work.forward_flops == 0 and head.work.forward_flops == 2 * V * D
    assert (first.tied_key == head.tied_key) is True if tied else head.tied_key is None


def test_hidden_states_that_a_family_keeps_in_fp32_are_counted_so() -> None:
    """The layers of Mamba-2 pass them on in fp32 in a run in bf16, so stages send twice the bytes."""
    config = build_family_config("mamba2")
    layers = build_layers(config)[:-1]  # the head makes none
    found = count_layers(layers, config, MicroBatchShape(B, T, torch.bfloat16))
    outputs: tuple[torch.Tensor, ...] = (torch.zeros(B, T, dtype=torch.long), *real_inputs(torch.bfloat16)[1:])
    real = []
    for layer in layers:
        outputs = build_real(layer, torch.bfloat16)(outputs)
        real.append(outputs[0].nbytes)
    assert [cost.bytes.output for cost in found] == real and not any(cost.is_estimated for cost in found)
    elements = B * T * config.hidden_size
    assert real[0] == 2 * elements and set(real[1:]) == {4 * elements}


def test_what_crosses_a_boundary_is_one_hidden_state() -> None:
    assert {cost.bytes.output for cost in count(build_config(), torch.bfloat16)} == {B * T * D * 2}


def test_equal_layers_are_counted_once() -> None:
    costs = count(build_config())
    assert costs[1] is costs[2] is costs[3]


def test_mean_keys_by_hand() -> None:
    assert mean_keys(4, None) == (1 + 2 + 3 + 4) / 4
    assert mean_keys(5, 2) == (1 + 2 + 2 + 2 + 2) / 5
    assert mean_keys(3, 100) == 2


class Experts(torch.nn.Module):
    """8 routed experts of which a token takes 2, and one that all take; the choice depends on data."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.down_proj = torch.nn.Parameter(torch.empty(8, D, D))
        self.shared_experts = torch.nn.Linear(D, D, bias=False)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("no choice without data")


def test_experts_count_by_those_that_a_token_takes() -> None:
    config = build_config()
    config.num_experts_per_tok, config.n_routed_experts = 2, 8
    layer = Layer("x.", Experts, (config,))
    (cost,) = count_layers([layer], config, MicroBatchShape(B, T, torch.float32))
    assert cost.parameters.held == 9 * D * D and cost.parameters.active == 3 * D * D
    assert cost.work.forward_flops == 2 * 3 * D * D
    assert cost.is_estimated and cost.bytes.saved > 0


def test_adapters_of_experts_count_once_and_their_products_by_those_that_a_token_takes() -> None:
    """A of rank r on each of E experts [r x E, in], B [out, r x E]; k of them a token."""
    config = build_family_config("deepseek_v3")
    layers = build_layers(config)
    lora = build_lora_config(layers, [], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], r=4)
    with_adapter, without = (
        count_layers(layers, config, MicroBatchShape(B, T, torch.float32), adapter=adapter)
        for adapter in (Adapter(lora), None)
    )
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    expert_params = 4 * (hidden + 2 * inner) + 4 * (inner + hidden)
    assert [cost.parameters.trained for cost in with_adapter[:3]] == [0, 0, config.n_routed_experts * expert_params]
    assert with_adapter[2].parameters.held - without[2].parameters.held == config.n_routed_experts * expert_params
    assert (
        with_adapter[2].parameters.active - without[2].parameters.active == config.num_experts_per_tok * expert_params
    )


def test_an_adapter_of_one_layer_is_counted_there() -> None:
    config = build_config()
    layers = build_layers(config)
    lora = build_lora_config(layers, ["q_proj"], [], r=4)
    everywhere, once = list(lora.target_modules or ()), ["layers.1.self_attn.q_proj"]
    trained = []
    for targets in (everywhere, once):
        lora.target_modules = set(targets)
        costs = count_layers(layers, config, MicroBatchShape(B, T, torch.float32), adapter=Adapter(lora))
        trained.append([index for index, cost in enumerate(costs) if cost.parameters.trained])
    assert len(trained[0]) == config.num_hidden_layers > 1 and len(trained[1]) == 1


def test_an_adapter_trains_and_the_rest_of_what_a_token_uses_is_frozen() -> None:
    config = build_config()
    layers = build_layers(config)
    adapter = Adapter(build_lora_config(layers, ["q_proj"], [], r=4))
    with_adapter, without = (
        count_layers(layers, config, MicroBatchShape(B, T, torch.float32), adapter=each)[1] for each in (adapter, None)
    )
    assert without.parameters.frozen == 0
    assert with_adapter.parameters.frozen == without.parameters.active
    assert (
        with_adapter.parameters.active - with_adapter.parameters.frozen
        == with_adapter.parameters.trained
        == 4 * (D + HEADS * HEAD)
    )


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_an_adapter_starts_as_is_held_and_multiplied_but_not_trained(init: str) -> None:
    """W x + s (B A - B0 A0) x: as much once more as the adapter, frozen, and in its files."""
    config = build_config()
    layers = build_layers(config)
    started, plain = (
        count_layers(
            layers,
            config,
            MicroBatchShape(B, T, torch.float32),
            adapter=Adapter(build_lora_config(layers, ["q_proj"], [], r=4, init_lora_weights=each)),
        )[1]
        for each in (init, True)
    )
    size = 4 * (D + HEADS * HEAD)
    assert (started.parameters.starts, plain.parameters.starts) == (size, 0)
    assert started.parameters.trained == plain.parameters.trained == size
    assert (
        started.parameters.held - plain.parameters.held == started.parameters.frozen - plain.parameters.frozen == size
    )
    assert started.work.forward_flops - plain.work.forward_flops == 2 * size
    assert started.work.backward_flops - plain.work.backward_flops == 2 * size  # a gradient of its input alone


@pytest.mark.parametrize(("family", "index"), [("llama", 1), ("gpt2", 2), ("gpt_oss", 1), ("llama4_text", 2)])
def test_gradients_inside_eager_attention_are_those_that_torch_allocates(family: str, index: int) -> None:
    """Views of weights, which some backward passes make, are not among them."""
    config = build_family_config(family)
    config._attn_implementation = "eager"
    planned = count_layers(build_layers(config), config, MicroBatchShape(B, T, torch.float32))[index].bytes.widest
    module = build_real(build_layers(config)[index], torch.float32)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    hidden_states = torch.randn(B, T, config.hidden_size, requires_grad=True)
    integers = torch.arange(T).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)
    with AllocationPeak(*module.parameters(), *module.buffers()) as allocated:
        result = module((hidden_states, *integers))[0]
        kept = allocated.peak = allocated.alive
        result.backward(torch.randn_like(result))
    assert planned == allocated.peak - kept - 2 * result.untyped_storage().nbytes()
