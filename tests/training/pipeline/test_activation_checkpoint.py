"""Which layers are recomputed, and that the backward pass of a decoder layer is the same whatever is kept of it."""

from __future__ import annotations

import shutil
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.configs import build_config
from support.families import FAMILIES, build_family_config
from support.operators import CountedOperators
from support.packed_kernels import play_varlen
from transformers import LlamaConfig, PretrainedConfig

from models.architecture.lookup import build_layers, choose_attention
from models.layers.decoder import PipelineDecoderLayer
from models.layers.frozen import frozen_product
from training.config.schema import CheckpointMode
from training.pipeline.activation_checkpoint import (
    ActivationCheckpointing,
    Group,
    build_activation_checkpointing,
    is_kept,
    may_draw,
)
from training.pipeline.compilation import compile_layers
from training.pipeline.module import StageModule

B, T = 2, 32


def test_groups_are_cut_as_the_engine_cuts_them() -> None:
    assert ActivationCheckpointing(2).list_groups(5) == [Group(0, 2, True), Group(2, 4, True), Group(4, 5, True)]
    assert ActivationCheckpointing(0).list_groups(5) == [Group(0, 5, False)]
    assert ActivationCheckpointing(7).list_groups(2) == [Group(0, 2, True)]


def test_every_kth_layer_is_a_group_of_its_own() -> None:
    recompute = ActivationCheckpointing(3, CheckpointMode.every)
    assert [group.stop for group in recompute.list_groups(7)] == list(range(1, 8))
    assert [group.start for group in recompute.list_groups(7) if group.is_recomputed] == [2, 5]
    assert recompute.group_size == 1 and ActivationCheckpointing(0, CheckpointMode.every).group_size == 0


@pytest.mark.parametrize(
    ("keys", "interval", "in_layers"),
    [
        ((), 1, True),
        (("activation_checkpoint_interval=2",), 2, False),
        (("activation_checkpoint_interval=0",), 0, False),
        (("activation_checkpoint_interval=4", "activation_checkpoint_mode=every"), 4, True),
        (("activation_checkpoint_interval=4", "activation_checkpoint_mode=selective"), 1, True),
    ],
)
def test_compiled_layers_that_are_groups_of_their_own_checkpoint_themselves(
    keys: tuple[str, ...], interval: int, in_layers: bool
) -> None:
    plain, compiled = (
        build_activation_checkpointing(build_config(*keys, f"compile={compiles}")) for compiles in ("false", "true")
    )
    assert not plain.in_layers
    assert (compiled.mode, compiled.interval, compiled.in_layers) == (plain.mode, interval, in_layers)


def test_every_layer_of_a_stage_is_recomputed_once() -> None:
    """By itself or by the engine, which has the embedding and the final norm left then."""
    for checkpointing in (
        ActivationCheckpointing(1),
        ActivationCheckpointing(1, in_layers=True),
        ActivationCheckpointing(2, CheckpointMode.every, in_layers=True),
        ActivationCheckpointing(0),
    ):
        layers = build_modules(build_family_config("llama"))
        stage: Any = StageModule.__new__(StageModule)
        torch.nn.Module.__init__(stage)
        stage.options, stage.forward_funcs = SimpleNamespace(checkpointing=checkpointing), layers
        stage.activation_checkpoint_func = checkpointing.build_function(draws=False)
        stage._recompute_in_layers(layers)
        stage._precompute_checkpointable_values()
        by_itself = [getattr(layer, "recompute", None) is not None for layer in layers]
        by_engine = [
            is_recomputed
            for is_recomputed, group in zip(
                stage.is_checkpointable_results, checkpointing.list_groups(len(layers)), strict=True
            )
            for _ in range(group.start, group.stop)
        ]
        size, every = len(layers), checkpointing.interval
        expected = [bool(every) and (index + 1) % every == 0 for index in range(size)]
        assert [a + b for a, b in zip(by_itself, by_engine, strict=True)] == expected
        assert any(by_itself) == checkpointing.in_layers and not by_itself[0]


def build_modules(config: PretrainedConfig) -> list[torch.nn.Module]:
    config._attn_implementation = choose_attention(config, "auto")
    return [layer.module_class(*layer.args) for layer in build_layers(config)]


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_may_not_draw_leave_the_random_state_alone(name: str) -> None:
    """All of a family's, in training."""
    modules = build_modules(build_family_config(name))
    assert not may_draw(modules) and not draws(modules)


def test_layers_of_transformers_may_draw() -> None:
    """PhiMoE's do, and nothing in its config says so."""
    for name in ("phimoe", "cohere"):
        modules = build_modules(build_family_config(name))
        assert may_draw(modules) and draws(modules) == (name == "phimoe")


@pytest.mark.parametrize("name", ["gpt_neo", "gptj"])
def test_what_comes_before_the_first_decoder_layer_may_draw(name: str) -> None:
    """The dropout of a backbone's embeddings, on a stage without a decoder layer."""
    config = build_family_config(name)
    config.embed_dropout = config.embd_pdrop = 0.5
    modules = build_modules(config)
    before = modules[: next(index for index, each in enumerate(modules) if isinstance(each, PipelineDecoderLayer))]
    assert may_draw(before) and draws(before)


def draws(modules: list[torch.nn.Module]) -> bool:
    inputs: Any = torch.arange(B * T).view(B, T) % 30, torch.arange(T).expand(B, T), torch.ones(B, T, dtype=torch.int32)
    before = torch.get_rng_state()
    for module in modules:
        inputs = module.train()(inputs)
    return not torch.equal(torch.get_rng_state(), before)


def test_what_draws_is_found() -> None:
    dropping = build_family_config("llama")
    dropping.attention_dropout = 0.1
    jittering = build_family_config("mixtral")
    jittering.router_jitter_noise = 0.01
    modules = build_modules(build_family_config("llama"))
    adapted = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    adapted_layer = get_peft_model(modules[1], adapted)  # type: ignore[arg-type]
    for drawing in (build_modules(dropping), build_modules(jittering), [adapted_layer], [torch.nn.Dropout(0.5)]):
        assert may_draw(drawing)
    assert not may_draw([torch.nn.Dropout(0.0), *build_modules(build_family_config("llama"))])


@pytest.mark.parametrize("mode", CheckpointMode)
@pytest.mark.parametrize("draws", [False, True])
def test_the_random_state_is_kept_where_layers_draw(draws: bool, mode: CheckpointMode) -> None:
    """Without it, the backward pass of a dropout would be that of another draw."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    inputs = torch.randn(4, 8, requires_grad=True)
    gradients = []
    for run in (lambda function, *values: function(*values), ActivationCheckpointing(1, mode).build_function(draws)):
        torch.manual_seed(0)
        output = run(module, inputs)
        torch.manual_seed(1)  # other draws in between
        gradients.append(torch.autograd.grad(output.square().sum(), inputs)[0])
    assert torch.equal(*gradients) == draws


@pytest.mark.parametrize("packs", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_selective_repeats_what_is_cheap_and_nothing_else(
    dtype: torch.dtype, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    config._attn_implementation = "varlen" if packs else "sdpa"
    play_varlen(monkeypatch)
    layer = build_layers(config)[1]
    torch.manual_seed(0)
    module = layer.module_class(*layer.args).to(dtype)
    hidden_states = torch.randn(B, T, 64, dtype=dtype, requires_grad=True)
    length = T // 2 if packs else T
    integers = torch.arange(T).remainder(length).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)
    gradients, calls = {}, {}
    for recompute in (
        ActivationCheckpointing(0),
        ActivationCheckpointing(1),
        ActivationCheckpointing(1, CheckpointMode.selective),
    ):
        run = recompute.build_function() if recompute.interval else lambda function, *inputs: function(*inputs)
        name = recompute.mode.value if recompute.interval else "kept"
        output, *_ = run(lambda *inputs: module(inputs), hidden_states, *integers)
        with CountedOperators() as counted:
            gradients[name] = torch.autograd.grad(output.float().square().sum(), [hidden_states, *module.parameters()])
        calls[name] = counted.calls
    for name in ("grouped", "selective"):
        assert all(torch.equal(a, b) for a, b in zip(gradients[name], gradients["kept"], strict=True)), name
    costly = ("mm", "_varlen_attn" if packs else "_scaled_dot_product_flash_attention_for_cpu")
    assert packs == (calls["grouped"]["_varlen_attn"] == 1)
    assert calls["grouped"]["mm"] > calls["kept"]["mm"] and calls["grouped"]["silu"] == calls["selective"]["silu"] == 1
    assert all(calls["selective"][operator] == calls["kept"][operator] for operator in costly)
    assert is_kept(torch.ops.aten.mm.default) and not is_kept(torch.ops.aten.silu.default)
    assert is_kept(frozen_product._opoverload)  # of a frozen quantized projection


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_layer_keeps_what_selective_says() -> None:
    """The compiled backward pass repeats neither matrix product nor attention, and holds less than without."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    config._attn_implementation = "sdpa"
    layer = build_layers(config)[1]
    torch.manual_seed(0)
    module = layer.module_class(*layer.args)
    hidden_states = torch.randn(B, T, 64, requires_grad=True)
    integers = torch.arange(T).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)

    def measure() -> tuple[int, Counter[str], tuple[torch.Tensor, ...]]:
        """Bytes saved, operators of the backward pass, gradients."""
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, *_ = module((hidden_states, *integers))
        loss = output.square().sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gradients = torch.autograd.grad(loss, [hidden_states, *module.parameters()])
        calls = Counter({event.key: event.count for event in profile.key_averages()})
        own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        return sum(size for address, size in saved.items() if address not in own), calls, gradients

    _, _, expected = measure()
    found = {}
    for name, mode in (("kept", None), ("grouped", CheckpointMode.grouped), ("selective", CheckpointMode.selective)):
        torch._dynamo.reset()
        module.recompute = None if mode is None else ActivationCheckpointing(1, mode).build_function()
        compile_layers([module], rank=0)
        measure()  # compiles the backward pass
        *found[name], gradients = measure()
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    sizes, calls = ({name: result[index] for name, result in found.items()} for index in (0, 1))
    assert sizes["grouped"] < sizes["selective"] < sizes["kept"]
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls["selective"]["aten::mm"] == calls["kept"]["aten::mm"] < calls["grouped"]["aten::mm"]
    assert calls["selective"][attention] == calls["kept"][attention] == 0 < calls["grouped"][attention]
