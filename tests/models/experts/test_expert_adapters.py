"""LoRA on stacked experts: against peft's own module on the same stack, and peft folders of whole mixtures."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from support.cases import relative_difference
from support.families import MIXTURES, build_family_config, save_family
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from convert2ckpt import main as convert2ckpt
from models.adapters import quantized as quantization
from models.adapters.adapter import Adapter, adapter_names, adapter_off, merge_adapter
from models.adapters.folder import ADAPTER_WEIGHTS, name_for_peft, to_peft_name
from models.adapters.targets import build_lora_config, list_adaptable
from models.architecture.lookup import build_layers
from models.experts import frozen
from models.experts.grouped import GROUPED
from models.experts.lora import GroupedLora, use_grouped_products
from models.layers.frozen import FrozenStack
from models.layers.layer import Layer
from models.weights.sources import open_weights
from training.config.schema import CheckpointMode
from training.pipeline.activation_checkpoint import ActivationCheckpointing

BOUND = 1e-5
NUM_EXPERTS, D = 8, 48


def _gpt_oss() -> nn.Module:
    """Returns experts with transposed weights, biases, and gate and up interleaved."""
    return GptOssExperts(GptOssConfig(num_local_experts=NUM_EXPERTS, hidden_size=D, intermediate_size=24))


def _deepseek() -> nn.Module:
    layers = build_layers(build_family_config("deepseek_v3"))
    return layers[3].module_class(*layers[3].args).get_submodule("mlp.experts")


STACKS: dict[str, Callable[[], nn.Module]] = {"deepseek_v3": _deepseek, "gpt_oss": _gpt_oss}
COMMON = ("deepseek_v3", "gpt_oss", "mixtral")
FAMILIES_WITH_EXPERTS = [
    pytest.param(family, marks=() if family in COMMON else pytest.mark.full) for family in ("deepseek_v3", *MIXTURES)
]


class Holder(nn.Module):
    """A parent module for the experts, as peft needs one."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def build_pair(family: str, **options: Any) -> tuple[Holder, Holder]:
    """Returns the same experts with the same adapter twice: peft's own module on transformers' loop, and grouped
    products."""
    torch.manual_seed(1)
    holder = Holder(STACKS[family]())
    for parameter in holder.parameters():
        nn.init.normal_(parameter, std=0.2)
    holder.experts.config = deepcopy(holder.experts.config)
    holder.experts.config._experts_implementation = "eager"
    names = options.pop("target_parameters", ["experts.gate_up_proj", "experts.down_proj"])
    config = LoraConfig(target_modules=[], target_parameters=names, init_lora_weights=False, **options)
    inject_adapter_in_model(config, holder)
    ours = deepcopy(holder)
    use_grouped_products(ours)
    get_experts(ours).config._experts_implementation = GROUPED
    return holder, ours


def get_experts(holder: Holder) -> Any:
    return holder.experts.get_base_layer()


def route(num_tokens: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states, and two experts per token with their weights; the last expert gets no token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator)
    weights, chosen = scores.topk(2, dim=-1)
    return torch.randn(num_tokens, D, generator=generator), chosen, weights


def compute(holder: Holder, run: Callable[..., torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Returns the outputs, and the gradients of a weighted sum of them. run: computes the experts in place of their own
    forward pass."""
    hidden_states, chosen, weights = route()
    hidden_states.requires_grad_()
    outputs = (holder.experts if run is None else run)(hidden_states, chosen, weights)
    holder.zero_grad()
    (outputs * torch.linspace(-1, 1, outputs.numel()).view_as(outputs)).sum().backward()
    gradients = {name: p.grad for name, p in holder.named_parameters() if p.requires_grad}
    return {"outputs": outputs.detach(), "inputs": hidden_states.grad, **gradients}


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 6},
        {"r": 3, "use_rslora": True},  # a rank that torch's grouped product does not take
        {"r": 8, "target_parameters": ["experts.down_proj"]},
        {"r": 8, "rank_pattern": {".*\\.gate_up_proj": 16}},
    ],
    ids=["both", "odd rank", "one", "two ranks"],
)
@pytest.mark.parametrize("family", STACKS)
def test_the_low_rank_part_by_grouped_products_equals_peft(family: str, options: dict[str, Any]) -> None:
    theirs, ours = build_pair(family, **options)
    expected, found = compute(theirs), compute(ours)
    assert expected.keys() == found.keys() and any("lora_B" in name for name in found)
    for name, tensor in expected.items():
        assert tensor.abs().max() > 0, name
        assert relative_difference(found[name], tensor) < BOUND, name
    assert all(parameter.grad is None for name, parameter in ours.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("family", STACKS)
def test_gpu_operators_give_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one operator multiplies all groups; here the same operators run on the CPU."""
    _, ours = build_pair(family, r=3)
    expected = compute(ours)
    monkeypatch.setattr("models.experts.adapted_products._takes_groups_in_turn", lambda rows: False)
    assert all(relative_difference(tensor, expected[name]) < BOUND for name, tensor in compute(ours).items())


@pytest.mark.parametrize("mode", [CheckpointMode.grouped, CheckpointMode.selective], ids=lambda mode: mode.value)
@pytest.mark.parametrize("family", STACKS)
def test_recomputation_gives_the_same(family: str, mode: CheckpointMode) -> None:
    _, ours = build_pair(family, r=4)
    run = partial(ActivationCheckpointing(1, mode).build_function(), ours.experts)
    again = compute(ours, run)
    assert all(torch.equal(tensor, again[name]) for name, tensor in compute(ours).items())


def quantize(holder: Holder) -> Holder:
    """Returns the same with its stacks in nf4; `holder` gets their values."""
    pytest.importorskip("bitsandbytes")
    quantized = deepcopy(holder)
    for each in quantization.hold(quantized, quantization.quantize(quantized, list_adaptable(quantized).stacks)):
        each.replace()
        getattr(get_experts(holder), each.name).data.copy_(each.stack.dequantize(slice(None)))
    return quantized


@pytest.mark.parametrize("chunk", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("family", STACKS)
def test_quantized_stacks_are_those_of_their_values(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, and without: chunks of some experts, or all of them."""
    monkeypatch.setattr(frozen, "count_chunk", lambda shape: chunk)
    _, ours = build_pair(family, r=3)
    quantized = quantize(ours)
    expected = compute(ours)
    for name, tensor in compute(quantized).items():
        assert relative_difference(tensor, expected[name]) < BOUND, name
    for holder in (ours, quantized):
        for part in holder.modules():
            if isinstance(part, GroupedLora):
                part.set_low_rank(False)
    for name in ("outputs", "inputs"):
        assert relative_difference(compute(quantized)[name], compute(ours)[name]) < BOUND, name


@pytest.mark.parametrize("family", STACKS)
def test_of_a_quantized_stack_one_chunk_is_dequantized_at_a_time(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; experts without a row are not dequantized."""
    _, ours = build_pair(family, r=4)
    quantized = quantize(ours)
    monkeypatch.setattr(frozen, "count_chunk", lambda shape: 2)
    monkeypatch.setattr(frozen, "frozen_mm", frozen.multiply_in_chunks)  # whose operators are seen
    made: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    written = FrozenStack.dequantize

    def dequantize(stack: FrozenStack, experts: slice) -> torch.Tensor:
        assert all(each() is None for _, each in made), "the chunk before is still there"
        assert experts.stop < NUM_EXPERTS, "experts without a row"
        matrices = written(stack, experts)
        made.append((matrices.numel(), weakref.ref(matrices)))
        return matrices

    monkeypatch.setattr(FrozenStack, "dequantize", dequantize)
    hidden_states, chosen, weights = route()
    chosen %= NUM_EXPERTS - 2  # the last two have no row
    with Largest() as largest:
        quantized.experts(hidden_states.requires_grad_(), chosen, weights).sum().backward()
    stacks = [getattr(get_experts(quantized), name) for name in ("gate_up_proj", "down_proj")]
    sizes = [2 * stack.shape[1] * stack.shape[2] for stack in stacks]
    chunks = NUM_EXPERTS // 2 - 1
    assert [numel for numel, _ in made] == [sizes[0]] * chunks + [sizes[1]] * 2 * chunks + [sizes[0]] * chunks
    assert largest.numel == max(sizes)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operator makes, in elements."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("mode", [CheckpointMode.grouped, CheckpointMode.selective], ids=lambda mode: mode.value)
def test_recomputation_of_quantized_stacks_gives_the_same(mode: CheckpointMode) -> None:
    _, ours = build_pair("gpt_oss", r=4)
    quantized = quantize(ours)
    run = partial(ActivationCheckpointing(1, mode).build_function(), quantized.experts)
    again = compute(quantized, run)
    assert all(torch.equal(tensor, again[name]) for name, tensor in compute(quantized).items())


@pytest.mark.full
@pytest.mark.parametrize("family", STACKS)
def test_compilation_of_quantized_stacks_gives_the_same(family: str) -> None:
    _, ours = build_pair(family, r=4)
    quantized = quantize(ours)
    compiled = compute(quantized, torch.compile(quantized.experts, fullgraph=True))
    assert all(relative_difference(compiled[name], tensor) < BOUND for name, tensor in compute(quantized).items())


@pytest.mark.full
@pytest.mark.parametrize("family", STACKS)
def test_compilation_gives_the_same(family: str) -> None:
    _, ours = build_pair(family, r=4)
    compiled = compute(ours, torch.compile(ours.experts, fullgraph=True))
    assert all(relative_difference(compiled[name], tensor) < BOUND for name, tensor in compute(ours).items())


def test_a_trained_stack_with_an_adapter_has_its_gradient() -> None:
    """It is the gradient of a stack without an adapter whose weights are W + B A."""
    _, ours = build_pair("deepseek_v3", r=4)
    experts = get_experts(ours).requires_grad_()
    found = compute(ours)
    plain = Holder(deepcopy(experts))
    plain.experts.low_rank = {}
    for name, weight in merge_adapter(deepcopy(ours)).items():
        plain.get_parameter(name).data.copy_(weight)
    for name, tensor in compute(plain).items():
        ours_name = name.replace("experts.", "experts.base_layer.base_layer.")
        assert relative_difference(found[ours_name], tensor) < BOUND, name


def test_merged_stacks_are_not_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = build_pair("deepseek_v3", r=4)
    before = compute(ours)
    monkeypatch.delattr("peft.tuners.lora.layer.ParamWrapper._activate_lora")
    assert all(torch.equal(tensor, before[name]) for name, tensor in compute(ours).items())


@pytest.mark.parametrize("family", STACKS)
def test_adapters_without_grouped_products(family: str) -> None:
    """Shards whose rows are not multiples of 16 bytes are computed this way."""
    theirs, ours = build_pair(family, r=4)
    get_experts(ours).config._experts_implementation = "eager"
    expected, found = compute(theirs), compute(ours)
    assert all(relative_difference(found[name], tensor) < BOUND for name, tensor in expected.items())


@pytest.mark.parametrize("family", STACKS)
def test_an_adapter_can_be_disabled_and_enabled_again(family: str) -> None:
    _, ours = build_pair(family, r=4)
    plain = Holder(get_experts(ours))
    with torch.no_grad():
        adapted = ours.experts(*route())
        with adapter_off(ours):
            off = ours.experts(*route())
        assert torch.equal(ours.experts(*route()), adapted)
        for part in ours.modules():
            if isinstance(part, GroupedLora):
                part.set_low_rank(False)
        assert torch.equal(plain.experts(*route()), off)
    assert relative_difference(off, adapted) > 0.01


@pytest.mark.parametrize("family", STACKS)
def test_merging_expert_by_expert_equals_peft(family: str) -> None:
    theirs, ours = build_pair(family, r=4, use_rslora=True)
    theirs.experts.merge()
    theirs.experts.base_layer.merge()
    merged = merge_adapter(ours)
    assert merged.keys() == {name for name, _ in get_experts(theirs).named_parameters(prefix="experts")}
    for name, parameter in get_experts(theirs).named_parameters(prefix="experts"):
        assert relative_difference(merged[name], parameter) < 1e-6, name


def write_folder(folder: Path, model_folder: Path, **options: Any) -> list[Layer]:
    """Write a peft folder as a run does, with random matrices on all layers. Returns the layers."""
    model_config = open_weights(str(model_folder)).config
    layers = build_layers(model_config)
    lora = build_lora_config(
        layers, "all-linear", init_lora_weights=False, base_model_name_or_path=str(model_folder), **options
    )
    tensors = {}
    for index, layer in enumerate(layers):
        module = layer.module_class(*layer.args)
        Adapter(lora).attach(module, index, layer)
        tensors |= {to_peft_name(n, layer): module.get_parameter(n).detach() for n in adapter_names(module)}
    name_for_peft(lora, model_config).save_pretrained(str(folder))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS)
    return layers


def convert(source: Path, output_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["--to_hf", "--model_name_or_path", str(source), "--output_dir", str(output_dir)]
        patch.setattr("sys.argv", ["convert2ckpt.py", *arguments])
        assert convert2ckpt() == 0


def check_merged(adapted: PeftModel, folder: Path, output_dir: Path) -> None:
    """Check that the converter and peft merge the folder into the same weights, and that the merged model computes what
    the adapted one does."""
    input_ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = adapted.eval()(input_ids).logits
    convert(folder, output_dir)
    ours = AutoModelForCausalLM.from_pretrained(output_dir)
    with torch.no_grad():
        assert relative_difference(ours.eval()(input_ids).logits, logits) < BOUND
    merged = adapted.merge_and_unload().state_dict()
    for name, tensor in ours.state_dict().items():  # a bias may be all zeros
        assert (tensor - merged[name]).abs().max() <= 1e-6 * merged[name].abs().max(), name


@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("family", FAMILIES_WITH_EXPERTS)
def test_peft_loads_what_a_run_exports_on_a_mixture(tmp_path: Path, family: str) -> None:
    """Dense layers, shared experts and routed ones: peft loads every tensor, and the merged model computes what peft's
    model does."""
    model_folder = save_family(tmp_path / "model", family)
    layers = write_folder(tmp_path / "adapter", model_folder, r=4, lora_alpha=6)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "adapter")
    held = {name.replace(".default", ""): t for name, t in adapted.state_dict().items() if "lora_" in name}
    saved = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert held.keys() == saved.keys() and all(torch.equal(held[name], tensor) for name, tensor in saved.items())
    known = [list_adaptable(layer.build_on_meta()) for layer in layers]
    assert len(saved) == 2 * sum(len(targets.projections) + len(targets.stacks) for targets in known)
    check_merged(adapted, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("family", FAMILIES_WITH_EXPERTS)
def test_peft_adapters_on_its_own_all_linear_load_and_merge(tmp_path: Path, family: str) -> None:
    """For many families that includes the router, and gate and up with twice the rank, as in transformers 4."""
    if family == "phimoe":
        pytest.skip("peft 0.21.2 takes its router for a projection, and cannot run it")
    from peft import get_peft_model

    model_folder = save_family(tmp_path / "model", family)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    model.save_pretrained(tmp_path / "adapter")
    check_merged(model, tmp_path / "adapter", tmp_path / "merged")
