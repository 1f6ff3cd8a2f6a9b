"""Adapters built from valid and invalid options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from support.adapters import build_lora, make_adapter
from support.families import build_family, build_family_config
from support.tiny import save_llama

from errors import UserError
from models.adapters.build import check_added_tokens, check_peft_names
from models.adapters.folder import load_adapter_tensors
from models.adapters.options import AdapterName, AdapterOptions
from models.adapters.quantized import hold, list_held, list_quantized, quantize
from models.adapters.targets import build_lora_config, describe_targets
from models.architecture.lookup import build_layers

LLAMA, GPT2 = (build_layers(build_family(name).config) for name in ("llama", "gpt2"))
DEEPSEEK = build_layers(build_family_config("deepseek_v3"))  # one dense layer, three of experts
STACKS = "mlp.experts.down_proj,mlp.experts.gate_up_proj"


def test_all_linear_are_the_projections_of_the_decoder_layers() -> None:
    assert build_lora_config(LLAMA, "all-linear").target_modules == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    config = build_lora_config(GPT2, "all-linear")
    assert config.target_modules == {"c_attn", "c_proj", "c_fc"} and config.fan_in_fan_out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"target_modules": ["q_proj", "wqkv"]},
            "no projection of the model is named 'wqkv'; there are down_proj, gate_proj, k_proj",
        ),
        ({"target_modules": "lm_head"}, "named 'lm_head'"),
        ({"r": 0}, "adapter.r=0: at least 1"),
        ({"lora_dropout": 1.0}, "adapter.lora_dropout=1.0: from 0 to below 1"),
        ({"loraplus_lr_ratio": 0}, "adapter.loraplus_lr_ratio=0: a finite number of more than 0; null turns it off"),
        ({"init_lora_weights": "pissa_niter_0"}, "adapter.init_lora_weights=pissa_niter_0: one of true, gaussian, ort"),
        (
            {"init_lora_weights": "pissa", "use_dora": True},
            "adapter.init_lora_weights=pissa is not tested with adapter.use_dora=true; give adapter.use_dora=false",
        ),
        (
            {"init_lora_weights": "olora", "load_in_4bit": True},
            "adapter.init_lora_weights=olora is not tested with adapter.load_in_4bit=true; give adapter.load_in_4bit=f",
        ),
        ({"init_lora_weights": "loftq"}, "adapter.init_lora_weights=loftq changes the weights of the base model"),
        ({"init_lora_weights": False}, "adapter.init_lora_weights=False: one of true, gaussian, orthogonal"),
        ({"name_or_path": "nowhere"}, "adapter.name_or_path=nowhere is not a peft folder (adapter_config.json"),
    ],
)
def test_invalid_adapter_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        build_lora(LLAMA, **options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "unread", [{"r": 0}, {"lora_alpha": 0}, {"lora_dropout": 1.0}, {"init_lora_weights": "pissa"}], ids=str
)
def test_an_adapter_that_exists_brings_its_own_values(tmp_path: Path, unread: dict[str, Any]) -> None:
    layers = build_layers(save_llama(tmp_path / "hf").config)
    make_adapter(tmp_path / "adapter", tmp_path / "hf")
    own = build_lora(layers, name_or_path=str(tmp_path / "adapter"))
    assert build_lora(layers, name_or_path=str(tmp_path / "adapter"), **unread).config == own.config
    assert own.config.r == 4 and own.config.init_lora_weights is True


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            "rank 16 on 32 projections and 6 stacks of routed experts; "
            f"none on 3 routers (adapter.target_parameters=[{STACKS},mlp.gate.weight] includes them)",
        ),
        (
            {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
            "rank 16 on 12 projections; none on 20 projections, "
            f"6 stacks of routed experts (adapter.target_parameters=[{STACKS}] includes them), 3 routers (",
        ),
        (
            {"target_modules": [], "target_parameters": ["experts.down_proj", "gate.weight"]},
            "rank 16 on 3 stacks of routed experts and 3 routers; none on 32 projections, 3 stacks of routed experts (",
        ),
        ({"target_parameters": []}, "rank 16 on 32 projections; none on 6 stacks of routed experts ("),
    ],
)
def test_adapted_and_unadapted_parts_of_a_mixture_are_counted(options: dict[str, Any], expected: str) -> None:
    adapter = build_lora(DEEPSEEK, **options)
    described = describe_targets(DEEPSEEK, adapter.config)
    assert described.startswith(expected) and "\n" not in described


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"target_parameters": ["mlp.experts.w1"]},
            "no parameter of experts or of a router is named 'mlp.experts.w1'; there are mlp.experts.down_proj, "
            "mlp.experts.gate_up_proj, mlp.gate.weight. Projections are named by adapter.target_modules",
        ),
        (
            {"target_modules": ["gate_up_proj"]},
            "experts are named by adapter.target_parameters: mlp",
        ),
        ({"target_modules": []}, "name nothing"),
        (
            {"lora_dropout": 0.1},
            "adapter.lora_dropout=0.1 cannot be used on stacked parameters such as "
            "'model.layers.1.mlp.experts.gate_up_proj'",
        ),
        ({"use_dora": True}, "adapter.target_parameters=[] to leave the experts without adapters"),
    ],
)
def test_invalid_adapter_options_of_a_mixture(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        build_lora(DEEPSEEK, **options)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_dense_model_has_no_expert_parameters() -> None:
    with pytest.raises(UserError, match="is named 'experts.down_proj'; this model has no experts"):
        build_lora(LLAMA, target_parameters=["experts.down_proj"])


def test_no_dora_on_names_that_peft_takes_for_the_experts() -> None:
    options: dict[str, Any] = {"target_parameters": [], "use_dora": True}
    adapter = build_lora(DEEPSEEK, **options)
    with pytest.raises(UserError, match="in a 'deepseek_v3' model peft takes 'down_proj' for the experts'"):
        check_peft_names(adapter, build_family_config("deepseek_v3"))
    check_peft_names(build_lora(LLAMA, **options), build_family_config("llama"))


def test_modules_to_save_are_around_the_decoder_layers() -> None:
    chosen = ["embed_tokens", "lm_head"]
    assert build_lora(LLAMA, modules_to_save=chosen).config.modules_to_save == chosen
    assert build_lora(LLAMA).config.modules_to_save is None
    with pytest.raises(UserError, match="no module around the decoder layers is named 'q_proj'; there are embed_tok"):
        build_lora(LLAMA, modules_to_save=["q_proj"])
    tied = build_layers(build_family_config("llama", tied=True))
    assert build_lora(tied, modules_to_save=chosen).config.modules_to_save == ["embed_tokens"]
    with pytest.raises(
        UserError, match=r"head of this model is its embedding.*modules_to_save=\[embed_tokens,lm_head\]"
    ):
        build_lora(tied, modules_to_save=["lm_head"])


def test_olora_is_not_for_transposed_weights() -> None:
    assert build_lora(LLAMA, init_lora_weights="olora").config.init_lora_weights == "olora"
    with pytest.raises(UserError, match="adapter.init_lora_weights=olora: peft does not know it for weights that are"):
        build_lora(GPT2, init_lora_weights="olora")


def test_4_bits_need_linear_projections() -> None:
    assert build_lora(LLAMA, load_in_4bit=True).in_4bit
    with pytest.raises(
        UserError,
        match=r"adapter.load_in_4bit=true: 'transformer.h.0.attn.c_attn' is a Conv1D, which cannot be quantized",
    ):
        build_lora(GPT2, load_in_4bit=True)


def test_stacks_in_4_bits_take_the_bytes_of_the_plan() -> None:
    """Whether they have adapters or not; a router stays as it is."""
    pytest.importorskip("bitsandbytes")
    adapter, layer = build_lora(DEEPSEEK, load_in_4bit=True, target_parameters=[]), DEEPSEEK[3]
    planned, module = layer.build_on_meta(), layer.build_on_meta().to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    held = adapter.list_frozen(module, layer)
    assert held[-2:] == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") and "mlp.gate.weight" not in held
    for each in (planned, module):
        adapter.attach(each, 3, layer)
    experts = module.mlp.experts
    assert not list(experts.parameters()) and module.mlp.gate.weight.dtype is torch.float32
    sizes = {weight.numel: weight.nbytes for weight in list_quantized(planned)}
    for stack in (experts.gate_up_proj, experts.down_proj):
        assert sizes[stack.shape.numel()] == stack.nbytes
    assert experts.gate_up_proj.shape == planned.mlp.experts.gate_up_proj.shape


def test_added_tokens_need_trained_rows_or_an_explicit_no() -> None:
    added = ["<|im_start|>", "<|im_end|>"]
    with pytest.raises(UserError, match=r"'<\|im_start\|>', 2 in all.*modules_to_save=\[embed_tokens,lm_head\]"):
        check_added_tokens(AdapterOptions(name=AdapterName.lora), added, LLAMA)
    check_added_tokens(AdapterOptions(name=AdapterName.lora, modules_to_save=[]), added, LLAMA)
    check_added_tokens(AdapterOptions(name=AdapterName.lora), [], LLAMA)
    check_added_tokens(AdapterOptions(), added, LLAMA)


def test_an_adapter_to_start_from_trains_added_tokens_only_if_it_saves_them(tmp_path: Path) -> None:
    added, options = ["<|im_end|>"], AdapterOptions(name=AdapterName.lora, name_or_path=str(tmp_path))
    LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]).save_pretrained(tmp_path)
    check_added_tokens(options, added, LLAMA)
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"never train the rows.*'<\|im_end\|>', 1 in all.: it saves no embedding"):
        check_added_tokens(options, added, LLAMA)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora"])
def test_a_folder_whose_base_peft_changes_first_is_refused(tmp_path: Path, init: str) -> None:
    LoraConfig(target_modules=["q_proj"], init_lora_weights=init).save_pretrained(tmp_path)
    save_file({"base_model.model.x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"init_lora_weights={init}: the adapter belongs to a base model less what"):
        load_adapter_tensors(tmp_path)


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_an_initialization_is_pefts_and_changes_nothing_at_the_start(init: str) -> None:
    """A is drawn otherwise than by default, and the base weights and the output stay as they are."""
    layer = LLAMA[1]
    drawn = {}
    for value in (True, init):
        torch.manual_seed(0)
        module = layer.build_on_meta().to_empty(device="cpu")
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        before = module.self_attn.q_proj.weight.clone()
        build_lora(LLAMA, init_lora_weights=value).attach(module, 1, layer)
        projection = module.self_attn.q_proj
        assert torch.equal(projection.base_layer.weight, before)
        drawn[value] = projection.lora_A["default"].weight.detach()
        assert (projection.lora_B["default"].weight @ drawn[value]).abs().max() < 1e-5
    assert not torch.equal(drawn[True], drawn[init])


def test_a_seed_may_be_a_time() -> None:
    """Times a million, 20261126134412 is beyond what torch takes."""
    layer, drawn = LLAMA[1], []
    for seed in (20261126134412, 20261126134413):
        module = layer.build_on_meta().to_empty(device="cpu")
        replace(build_lora(LLAMA), seed=seed).attach(module, 1, layer)
        drawn.append(module.self_attn.q_proj.lora_A["default"].weight.detach())
    assert not torch.equal(*drawn)


def test_an_evaluation_leaves_the_gradients_of_projections_in_4_bits_alone() -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer, inputs = torch.nn.Sequential(torch.nn.Linear(64, 128)), torch.randn(24, 64)
    hold(layer, quantize(layer, list_held(layer, "nf4")))

    def find_gradient() -> torch.Tensor | None:
        x = inputs.clone().requires_grad_()
        layer.train()(x).square().sum().backward()
        return x.grad

    before = find_gradient()
    with torch.no_grad():
        layer.eval()(inputs)
    torch.testing.assert_close(find_gradient(), before, rtol=0, atol=0)


@pytest.mark.parametrize("width", [40, 48, 96, 128])
def test_projections_in_4_bits_have_rows_of_any_length(width: int) -> None:
    """They are quantized and dequantized as one column, since on a CPU with AVX-512 bitsandbytes (0.50.2) gives blocks
    of rows of 48 and 96 numbers wrong scales."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(width, 6, bias=False))
    weight = layer[0].weight.detach()
    packed = functional.quantize_4bit(weight.view(-1, 1), quant_type="nf4", compress_statistics=True)
    expected = functional.dequantize_4bit(*packed).view(6, width)
    hold(layer, quantize(layer, list_held(layer, "nf4")))
    rows = torch.eye(width, requires_grad=True)
    outputs = layer(rows)
    outputs.sum().backward()
    torch.testing.assert_close(outputs, expected.t())
    torch.testing.assert_close(rows.grad, expected.sum(dim=0).expand(width, width))
    assert torch.equal(layer[0].weight, expected) and not list(layer.parameters())
