"""The forms in which engines take adapters of experts, and the check of a folder for one. What the engines' own code
makes of them: benchmarks/engines.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adapters import build_lora
from support.families import build_family_config

from errors import UserError
from models.adapters.adapter import adapter_names, inject_adapter
from models.adapters.engine_check import (
    Dimensions,
    Finding,
    check_adapter,
    count_problems,
    describe_findings,
    find_limit,
    read_dimensions,
)
from models.adapters.engines import (
    ENGINES,
    MODEL_CLASSES,
    PATTERNS,
    EngineAdapter,
    find_engine,
    find_model_class,
    find_pattern,
    write_for_engine,
)
from models.adapters.folder import name_for_peft, to_peft_name
from models.adapters.stacks import exchange, list_stack_adapters, split_experts
from models.architecture.lookup import build_layers

Tensors = dict[str, torch.Tensor]
QWEN, GPT = "Qwen3MoeForCausalLM", "GptOssForCausalLM"


def make(class_name: str, **options: Any) -> tuple[Tensors, dict[str, Any], list[Any]]:
    """A peft folder's tensors and fields, and its adapters of stacks."""
    config = build_family_config(MODEL_CLASSES[class_name].model_type)
    layers, patterns = build_layers(config), {key: options.pop(key, {}) for key in PATTERNS}
    lora = build_lora(layers, **{"r": 4, "lora_alpha": 6, **options}).config
    lora.rank_pattern, lora.alpha_pattern = patterns["rank_pattern"], patterns["alpha_pattern"]
    torch.manual_seed(0)
    tensors = {}
    for layer in layers:
        module = layer.build_on_meta()
        if any(part.endswith("proj") for part, _ in module.named_modules()):
            inject_adapter(lora, module, layer)
        for name in adapter_names(module):
            tensors[to_peft_name(name, layer)] = torch.randn(module.get_parameter(name).shape)
    fields = {
        key: list(value) if isinstance(value, set) else value
        for key, value in name_for_peft(lora, config).to_dict().items()
    }
    return tensors, fields, list_stack_adapters(layers, lora)


def serve(class_name: str, engine: str, **options: Any) -> EngineAdapter:
    return write_for_engine(*make(class_name, **options), ENGINES[engine], class_name)


def check(served: EngineAdapter, class_name: str, engine: str, **fields: Any) -> list[Finding]:
    dimensions = read_dimensions(build_family_config(MODEL_CLASSES[class_name].model_type).to_dict())
    assert dimensions is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in served.tensors.items()}
    return check_adapter(shapes, {**served.fields, **fields}, engine, class_name, dimensions)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("class_name", sorted(MODEL_CLASSES))
def test_an_export_is_taken_by_its_engine(class_name: str, engine: str) -> None:
    findings = check(serve(class_name, engine), class_name, engine)
    assert not count_problems(findings) and all(found.orientation for found in findings)


@pytest.mark.parametrize("class_name", [QWEN, "MixtralForCausalLM", GPT])
def test_pairs_are_the_numbers_of_the_stack(class_name: str) -> None:
    tensors, fields, stacks = make(class_name)
    served = write_for_engine(tensors, fields, stacks, ENGINES["sglang"], class_name)
    model_class = MODEL_CLASSES[class_name]
    for adapter in stacks:
        first, second = split_experts(tensors[adapter.first], tensors[adapter.second], adapter.num_experts)
        base = f"base_model.model.{adapter.layer}{model_class.hub_block}.experts"
        parts: dict[str, torch.Tensor] = {model_class.names[2]: second}
        if adapter.stack == "gate_up_proj":
            rows = (second[:, ::2], second[:, 1::2]) if class_name == GPT else second.chunk(2, dim=1)
            parts = dict(zip(model_class.names, rows, strict=False))
        for name, expected in parts.items():
            for expert in range(adapter.num_experts):
                module = f"{base}.{expert}.{name}"
                assert torch.equal(served.tensors[f"{module}.lora_A.weight"], first[expert])
                assert torch.equal(served.tensors[f"{module}.lora_B.weight"], expected[expert])


def test_peft_keeps_its_own_form() -> None:
    tensors, fields, stacks = make(GPT)
    for engine in ("peft", "vllm"):
        served = write_for_engine(tensors, fields, stacks, ENGINES[engine], GPT)
        assert served.tensors.keys() == tensors.keys()
        assert all(torch.equal(served.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("stack", "other"), [("down_proj", "gate_up_proj"), ("gate_up_proj", "down_proj")])
def test_one_matrix_without_the_other_is_next_to_zeros(stack: str, other: str) -> None:
    """gate_up_proj alone has the name in peft that vLLM takes for down_proj."""
    tensors, fields, stacks = make(GPT, target_parameters=[f"mlp.experts.{stack}"])
    served = write_for_engine(tensors, fields, stacks, ENGINES["vllm"], GPT)
    base = "base_model.model.model.layers.0.mlp.experts"
    names = {"gate_up_proj": f"{base}.base_layer", "down_proj": base}
    adapter = stacks[0]
    assert torch.equal(served.tensors[f"{names[stack]}.lora_A.weight"], tensors[adapter.first])
    assert torch.equal(served.tensors[f"{names[stack]}.lora_B.weight"], tensors[adapter.second])
    assert not any(served.tensors[f"{names[other]}.lora_{side}.weight"].any() for side in "AB")
    assert served.fields["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert not count_problems(check(served, GPT, "vllm"))


def test_zeros_have_the_rank_that_is_read_for_their_matrix() -> None:
    """peft doubles the rank of gate_up_proj alone where `target_modules` had gate_proj and up_proj."""
    one = {"target_parameters": ["mlp.experts.gate_up_proj"], "rank_pattern": {r".*\.gate_up_proj": 8}}
    base = "base_model.model.model.layers.0.mlp.experts"
    for engine in ("peft", "vllm"):
        tensors = serve(GPT, engine, **one).tensors
        assert (len(tensors[f"{base}.base_layer.lora_A.weight"]), len(tensors[f"{base}.lora_A.weight"])) == (64, 32)
    tensors = serve(QWEN, "vllm", **one).tensors
    shapes = [len(tensors[f"{base}.0.{name}.lora_A.weight"]) for name in ("gate_proj", "up_proj", "down_proj")]
    assert shapes == [8, 8, 4]


def test_the_other_matrix_is_named_where_the_first_one_is() -> None:
    """An adapter of one layer's experts stays one of that layer."""
    module = "model.layers.2.mlp.experts"
    fields = serve(GPT, "peft", target_parameters=[f"{module}.gate_up_proj"]).fields
    assert fields["target_parameters"] == [f"{module}.down_proj", f"{module}.gate_up_proj"]


def test_one_scale_for_an_engine_that_reads_no_other() -> None:
    fields = serve(QWEN, "sglang", use_rslora=True).fields
    assert (fields["use_rslora"], fields["lora_alpha"]) == (False, 12)  # 12 / 4 is 6 / sqrt(4)
    assert serve(QWEN, "vllm", use_rslora=True).fields["use_rslora"]
    tensors, fields, stacks = make(QWEN)
    with pytest.raises(UserError, match="the adapter has a rank_pattern, and this engine reads one rank"):
        write_for_engine(tensors, {**fields, "rank_pattern": {"q_proj": 2}}, stacks, ENGINES["sglang"], QWEN)


def test_ranks_of_stacks_become_those_of_pairs() -> None:
    import re

    tensors, fields, stacks = make(QWEN)
    changed = [type(adapter)(**{**vars(adapter), "alpha": 3}) for adapter in stacks]
    served = write_for_engine(tensors, fields, changed, ENGINES["vllm"], QWEN)
    patterns = served.fields["alpha_pattern"]
    names = [name.partition(".lora_")[0].removeprefix("base_model.model.") for name in served.tensors]
    matched = {name for name in names if any(re.match(rf"(.*\.)?({key})$", name) for key in patterns)}
    assert matched == {name for name in names if ".experts." in name} and set(patterns.values()) == {3}


@pytest.mark.parametrize("experts", [{}, {"mlp.experts.gate_up_proj": 12}])
def test_a_scale_of_dense_layers_is_not_that_of_experts_with_the_same_name(experts: dict[str, int]) -> None:
    """vLLM takes the first key that matches, and "gate_proj" matches that of an expert too."""
    class_name, patterns = "DeepseekV3ForCausalLM", {"gate_proj": 32, **experts}
    tensors, fields, stacks = make(class_name, alpha_pattern=patterns, rank_pattern={"up_proj": 2})
    read = write_for_engine(tensors, fields, stacks, ENGINES["vllm"], class_name).fields
    for adapter in stacks:
        names = ("gate_proj", "up_proj") if adapter.stack == "gate_up_proj" else ("down_proj",)
        for name in (f"{adapter.layer}{adapter.experts}.7.{name}" for name in names):
            assert find_pattern(read["alpha_pattern"], name, fields["lora_alpha"]) == adapter.alpha
            assert find_pattern(read["rank_pattern"], name, fields["r"]) == adapter.rank == 4
    assert find_pattern(read["alpha_pattern"], "model.layers.0.mlp.gate_proj", fields["lora_alpha"]) == 32


def exchange_stacks(tensors: Tensors) -> Tensors:
    for name in [name for name in tensors if ".experts." in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = exchange(tensors[name], tensors[other], 8)
    return tensors


def transpose(tensors: Tensors) -> Tensors:
    return {name: tensor.T if ".experts." in name else tensor for name, tensor in tensors.items()}


def rename(tensors: Tensors) -> Tensors:
    return {name.replace("self_attn", "attention"): tensor for name, tensor in tensors.items()}


def drop(tensors: Tensors) -> Tensors:
    del tensors["base_model.model.model.layers.2.mlp.experts.3.up_proj.lora_B.weight"]
    return tensors


def shorten_inputs(tensors: Tensors) -> Tensors:
    """A of q_proj is of another hidden size, as another model's."""
    return {name: tensor[:, :-1] if "q_proj.lora_A" in name else tensor for name, tensor in tensors.items()}


def shorten_outputs(tensors: Tensors) -> Tensors:
    return {name: tensor[:-1] if "o_proj.lora_B" in name else tensor for name, tensor in tensors.items()}


def drop_down_proj(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".experts.lora_" not in name}


@pytest.mark.parametrize(
    ("class_name", "engine", "damage", "expected"),
    [
        (GPT, "vllm", exchange_stacks, {"transposed": 16}),
        (QWEN, "vllm", transpose, {"transposed": 144}),
        (QWEN, "sglang", transpose, {"transposed": 144}),
        (QWEN, "vllm", rename, {"misnamed": 32}),
        (QWEN, "sglang", rename, {}),  # which reads the last part of a name
        (QWEN, "vllm", drop, {"missing": 1}),
        (QWEN, "sglang", drop, {"missing": 1}),
        (QWEN, "vllm", shorten_inputs, {"wrong shape": 4}),
        (QWEN, "sglang", shorten_outputs, {"wrong shape": 4}),
        (QWEN, "peft", lambda tensors: {}, {"missing": 1}),
        (QWEN, "vllm", lambda tensors: {}, {"missing": 1}),
        (GPT, "vllm", drop_down_proj, {"missing": 8}),
        (GPT, "peft", drop_down_proj, {"missing": 8}),
    ],
)
def test_mistakes_are_found(
    class_name: str, engine: str, damage: Callable[[Tensors], Tensors], expected: dict[str, int]
) -> None:
    served = serve(class_name, engine)
    broken = EngineAdapter(damage(dict(served.tensors)), served.fields)
    assert count_problems(check(broken, class_name, engine)) == expected


@pytest.mark.parametrize("stack", ["down_proj", "gate_up_proj"])
@pytest.mark.parametrize("class_name", [QWEN, GPT])
def test_peft_takes_an_adapter_of_one_matrix(class_name: str, stack: str) -> None:
    tensors, fields, _ = make(class_name, target_parameters=[f"mlp.experts.{stack}"])
    assert not count_problems(check(EngineAdapter(tensors, fields), class_name, "peft"))


def test_a_form_of_another_engine_is_not_taken() -> None:
    """peft leaves names out that it does not know; the others end with an error."""
    stacked, pairs = serve(QWEN, "peft"), serve(GPT, "sglang")
    assert count_problems(check(stacked, QWEN, "vllm")) == {"refused": 12}
    assert count_problems(check(stacked, QWEN, "sglang")) == {"refused": 12}
    assert set(count_problems(check(pairs, GPT, "vllm"))) == {"refused"}
    assert set(count_problems(check(pairs, GPT, "peft"))) == {"dropped"}


def test_a_square_stack_of_an_older_peft_is_known_by_its_version() -> None:
    served = serve(QWEN, "peft")
    findings = check(served, QWEN, "peft", peft_version="0.18.1")
    assert count_problems(findings) == {"transposed": 6}
    assert "not as peft before 0.19.1 wrote it" in next(found for found in findings if found.problem).reason


@pytest.mark.parametrize(
    ("engine", "fields", "problem"),
    [
        ("vllm", {"use_dora": True}, "refused"),
        ("vllm", {"r": 1024, "rank_pattern": {"x": 4}}, "refused"),
        ("vllm", {"rank_pattern": {"x": 1024}}, "refused"),
        ("vllm", {"modules_to_save": ["lm_head"]}, "refused"),
        ("vllm", {"init_lora_weights": "pissa"}, "refused"),
        ("vllm", {"bias": "all"}, "refused"),
        ("vllm", {"layer_replication": [[0, 1]]}, "refused"),
        ("vllm", {"target_modules": None}, "refused"),
        ("sglang", {"use_dora": True}, "refused"),
        ("sglang", {"use_rslora": True}, "dropped"),
        ("sglang", {"rank_pattern": {"x": 4}}, "dropped"),
        ("sglang", {"modules_to_save": ["lm_head"]}, "dropped"),
    ],
)
def test_fields_that_an_engine_refuses(engine: str, fields: dict[str, Any], problem: str) -> None:
    assert count_problems(check(serve(QWEN, engine), QWEN, engine, **fields)) == {problem: 1}


@pytest.mark.parametrize(("engine", "problems"), [("peft", {}), ("vllm", {"missing": 2}), ("sglang", {"missing": 2})])
def test_only_peft_has_defaults(engine: str, problems: dict[str, int]) -> None:
    served = serve(QWEN, engine, r=8)
    del served.fields["r"], served.fields["lora_alpha"]
    assert count_problems(check(served, QWEN, engine)) == problems


def test_weights_that_are_no_adapter() -> None:
    served = serve(QWEN, "vllm")
    tensors = {**served.tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}
    broken = EngineAdapter(tensors, served.fields)
    assert count_problems(check(broken, QWEN, "vllm")) == {"refused": 1}
    assert count_problems(check(EngineAdapter(tensors, serve(QWEN, "sglang").fields), QWEN, "sglang")) == {"dropped": 1}
    classifier = {**served.tensors, "base_model.model.score.weight": torch.zeros(2, 2)}
    taken = EngineAdapter(classifier, {**served.fields, "modules_to_save": ["score"]})
    assert not count_problems(check(taken, QWEN, "vllm"))


def test_a_router_is_not_for_every_engine() -> None:
    options = {"target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
    assert not count_problems(check(serve("MixtralForCausalLM", "vllm", **options), "MixtralForCausalLM", "vllm"))
    served = serve(QWEN, "sglang", **options)
    assert set(count_problems(check(served, QWEN, "sglang"))) == {"refused"}


def test_alike_keys_are_one_line() -> None:
    lines = describe_findings(check(serve(QWEN, "vllm"), QWEN, "vllm"))
    assert len(lines) < 25
    assert (
        "taken: base_model.model.model.layers.*.mlp.experts.*.gate_proj.lora_A.weight (24 keys) [4, 48] [r, in]"
        in lines
    )


def test_the_limit_that_a_rank_needs() -> None:
    ranks = {16: None, 17: 32, 300: 320, 1024: None}
    assert {rank: find_limit(rank, ENGINES["vllm"]) for rank in ranks} == ranks
    assert find_limit(1024, ENGINES["sglang"]) is None


def test_other_releases_and_classes_are_refused() -> None:
    assert find_engine("vllm", "0.33.0") is find_engine("vllm")
    with pytest.raises(UserError, match="vllm 0.12.0 is not a release that the table of adapters is of; that is 0.33"):
        find_engine("vllm", "0.12.0")
    with pytest.raises(UserError, match="adapters of 'llama' in the forms of engines are not in the tables; those are"):
        find_model_class("llama")
    assert read_dimensions({"hidden_size": 4, "intermediate_size": 4}) is None
    sizes = {"num_hidden_layers": 2, "hidden_size": 4, "intermediate_size": 4, "num_experts": 8}
    assert read_dimensions(sizes) == Dimensions(2, 4, 8, 4)
    for wrong in ({"num_experts": "8"}, {"hidden_size": 4.0}, {"num_hidden_layers": None}, {"intermediate_size": -1}):
        assert read_dimensions({**sizes, **wrong}) is None
