"""LoRA on stacked experts: against peft's own module on the same stack, and peft folders of whole mixtures."""

from __future__ import annotations

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
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from convert2ckpt import main as convert2ckpt
from models.adapters.adapter import Adapter, adapter_names, adapter_off, merge_adapter
from models.adapters.folder import ADAPTER_WEIGHTS, name_for_peft, to_peft_name
from models.adapters.targets import build_lora_config, list_adaptable
from models.architecture.lookup import build_layers
from models.experts.grouped import GROUPED
from models.experts.lora import GroupedLora, use_grouped_products
from models.layers.layer import Layer
from models.weights.sources import open_weights
from training.config.schema import CheckpointMode
from training.pipeline.activation_checkpoint import ActivationCheckpointing

BOUND = 1e-5
NUM_EXPERTS, D = 8, 48


def _gpt_oss() -> nn.Module:
    """Return a stack that is transposed, with biases, gate and up interleaved."""
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
    """The part of a layer that peft sees."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def build_pair(family: str, **options: Any) -> tuple[Holder, Holder]:
    """Return the same experts with the same adapter twice: by peft alone, on transformers' own loop; and by grouped
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
    """Return hidden states, and two experts a token; the last expert gets none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator)
    weights, chosen = scores.topk(2, dim=-1)
    return torch.randn(num_tokens, D, generator=generator), chosen, weights


def compute(holder: Holder, run: Callable[..., torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return outputs, and the gradients of a random direction of them. run: computes the experts where they are not
    called directly."""
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
def test_gpu_kernels_give_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all groups are multiplied at once; here by the same operators, computed on the CPU."""
    _, ours = build_pair(family, r=3)
    expected = compute(ours)
    monkeypatch.setattr("models.experts.adapted_products._takes_groups_in_turn", lambda rows: False)
    assert all(relative_difference(tensor, expected[name]) < BOUND for name, tensor in compute(ours).items())


@pytest.mark.parametrize("mode", [CheckpointMode.grouped, CheckpointMode.selective], ids=lambda mode: mode.value)
@pytest.mark.parametrize("family", STACKS)
def test_recomputed_the_same(family: str, mode: CheckpointMode) -> None:
    _, ours = build_pair(family, r=4)
    run = partial(ActivationCheckpointing(1, mode).build_function(), ours.experts)
    again = compute(ours, run)
    assert all(torch.equal(tensor, again[name]) for name, tensor in compute(ours).items())


@pytest.mark.full
@pytest.mark.parametrize("family", STACKS)
def test_compiled_the_same(family: str) -> None:
    _, ours = build_pair(family, r=4)
    compiled = compute(ours, torch.compile(ours.experts, fullgraph=True))
    assert all(relative_difference(compiled[name], tensor) < BOUND for name, tensor in compute(ours).items())


def test_a_trained_stack_with_an_adapter_has_its_gradient() -> None:
    """It is the gradient of a stack without the adapter whose weights are W + B A."""
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


def test_no_stack_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = build_pair("deepseek_v3", r=4)
    before = compute(ours)
    monkeypatch.delattr("peft.tuners.lora.layer.ParamWrapper._activate_lora")
    assert all(torch.equal(tensor, before[name]) for name, tensor in compute(ours).items())


@pytest.mark.parametrize("family", STACKS)
def test_experts_one_by_one_have_their_adapters_too(family: str) -> None:
    """They are computed one by one where the rows of a shard are not multiples of 16 bytes."""
    theirs, ours = build_pair(family, r=4)
    get_experts(ours).config._experts_implementation = "eager"
    expected, found = compute(theirs), compute(ours)
    assert all(relative_difference(found[name], tensor) < BOUND for name, tensor in expected.items())


@pytest.mark.parametrize("family", STACKS)
def test_an_adapter_switched_off_leaves_the_experts_and_switched_on_comes_back(family: str) -> None:
    _, ours = build_pair(family, r=4)
    plain = Holder(get_experts(ours))
    with torch.no_grad():
        adapted = ours.experts(*route())
        with adapter_off(ours):
            off = ours.experts(*route())
        assert torch.equal(ours.experts(*route()), adapted)
        for part in ours.modules():
            if isinstance(part, GroupedLora):
                part.register_factors(False)
        assert torch.equal(plain.experts(*route()), off)
    assert relative_difference(off, adapted) > 0.01


@pytest.mark.parametrize("family", STACKS)
def test_merged_by_expert_equals_peft(family: str) -> None:
    theirs, ours = build_pair(family, r=4, use_rslora=True)
    theirs.experts.merge()
    theirs.experts.base_layer.merge()
    merged = merge_adapter(ours)
    assert merged.keys() == {name for name, _ in get_experts(theirs).named_parameters(prefix="experts")}
    for name, parameter in get_experts(theirs).named_parameters(prefix="experts"):
        assert relative_difference(merged[name], parameter) < 1e-6, name


def write_folder(folder: Path, model_folder: Path, **options: Any) -> list[Layer]:
    """Write a peft folder as a run here does, with random matrices on all layers."""
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
    """The converter merges the folder as peft does, and both compute the outputs of the adapted model."""
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
    """Dense layers, shared experts and routed ones: peft has a place for each tensor, and the merged model computes the
    same."""
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
def test_what_peft_itself_takes_for_all_linear_loads_and_merges(tmp_path: Path, family: str) -> None:
    """For many families these are the modules of transformers 4: the router too, and gate and up of twice the rank."""
    if family == "phimoe":
        pytest.skip("peft 0.21.2 takes its router for a projection, and cannot run it")
    from peft import get_peft_model

    model_folder = save_family(tmp_path / "model", family)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    model.save_pretrained(tmp_path / "adapter")
    check_merged(model, tmp_path / "adapter", tmp_path / "merged")
