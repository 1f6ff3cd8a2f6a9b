"""The group of a parameter, and the entries that are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.optimizers import create_loraplus_optimizer
from support.configs import build_config
from support.families import build_family_config
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer

from errors import UserError
from models.adapters.options import AdapterName
from models.adapters.targets import build_lora_config
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from training.config.schema import ParameterGroup, RunConfig
from training.optim.optimizer import describe_updates, recall_updates
from training.optim.parameter_groups import (
    LORA_PLUS,
    LR_RATIO,
    check_group_keys,
    check_parameter_groups,
    group_parameters,
    list_entries,
    list_layer_norms,
    separate_copies,
    separate_fp32,
)


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return build_layers(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16)
    )


@pytest.fixture(scope="module")
def composed() -> RunConfig:
    return build_config("learning_rate=1e-3", "weight_decay=0.1")


@pytest.fixture
def config(composed: RunConfig) -> RunConfig:
    config = deepcopy(composed)
    config.parameter_groups = [ParameterGroup("mlp", 1e-4), ParameterGroup("norm|mlp", weight_decay=0.3)]
    return config


def test_the_first_pattern_counts_and_every_rank_has_every_group(config: RunConfig, layers: list[Layer]) -> None:
    check_parameter_groups(config, layers)
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    named = [("a.mlp.weight", matrix), ("a.norm.weight", vector), ("a.bias", vector), ("b.weight", matrix)]
    groups = group_parameters(named, config)
    assert [len(group["params"]) for group in groups] == [1, 1, 1, 0, 0, 1]
    assert [group["weight_decay"] for group in groups] == [0.1, 0, 0.1, 0, 0.3, 0.3]
    assert [group["lr"] for group in groups] == [1e-3, 1e-3, 1e-4, 1e-4, 1e-3, 1e-3]
    assert [group[LR_RATIO] for group in groups] == pytest.approx([1, 1, 0.1, 0.1, 1, 1])
    assert [len(group["params"]) for group in group_parameters([], config)] == [0] * 6
    assert describe_updates(config) == {"parameter_groups": '[["mlp", 0.0001, null], ["norm|mlp", null, 0.3]]'}
    config.parameter_groups = []
    assert len(group_parameters(named, config)) == 2 and describe_updates(config) == {}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "cohere", "gpt2", "mpt", "deepseek_v3", "mamba2"])
def test_what_decays_is_what_decays_in_the_trainer_of_transformers(composed: RunConfig, family: str) -> None:
    """Biases of stacked experts and norms of each head are no vectors; a state space's vectors are no norms."""
    config = build_family_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = set(Trainer.get_decay_parameter_names(None, model))
    decaying, others = set(), set()
    for layer in build_layers(config):
        module = layer.build_on_meta()
        named = {f"{layer.hf_prefix}{name}": parameter for name, parameter in module.named_parameters()}
        names = {id(parameter): name for name, parameter in named.items()}
        groups = group_parameters(named.items(), composed, list_layer_norms(module))
        decaying |= {names[id(parameter)] for parameter in groups[0]["params"]}
        others |= {names[id(parameter)] for parameter in groups[1]["params"]}
    known = {name for name, _ in model.named_parameters()}
    assert decaying == expected & known and others == known - expected


def test_lora_plus_trains_the_matrices_b_faster(composed: RunConfig) -> None:
    """After the entries that a user gives."""
    config = deepcopy(composed)
    config.adapter.name, config.adapter.loraplus_lr_ratio = AdapterName.lora, 16.0
    matrix = torch.zeros(2, 2)
    names = ["a.q_proj.lora_A.default.weight", "a.q_proj.lora_B.default.weight", "a.norm_lora_BC.weight"]
    groups = group_parameters([(name, matrix) for name in names], config)
    assert [len(group["params"]) for group in groups] == [2, 0, 1, 0]
    assert groups[2]["lr"] == pytest.approx(16e-3) and groups[2][LR_RATIO] == pytest.approx(16)
    described = describe_updates(config)
    assert described == {"adapter.loraplus_lr_ratio": "16"}
    config.learning_rate *= 2
    assert describe_updates(config) == described, "a resumed run may have another learning rate, and keeps the ratio"
    config.parameter_groups = [ParameterGroup("q_proj", 1e-4)]
    check_group_keys(config)
    assert [len(group["params"]) for group in group_parameters([(names[1], matrix)], config)] == [0, 0, 1, 0, 0, 0]


def test_the_ratio_of_lora_plus_is_neither_used_nor_saved_without_an_adapter(composed: RunConfig) -> None:
    config = deepcopy(composed)
    config.adapter.loraplus_lr_ratio = 16.0
    assert list_entries(config) == [] and describe_updates(config) == {}


def test_the_rate_of_lora_plus_in_a_checkpoint_of_version_1_1_is_not_compared() -> None:
    groups, ratio = [["mlp", 0.0001, None]], {"adapter.loraplus_lr_ratio": "16"}
    saved = {"seed": "1", "parameter_groups": json.dumps([*groups, [LORA_PLUS, 0.016, None]])}
    assert recall_updates(saved, ratio) == {"seed": "1", "parameter_groups": json.dumps(groups), **ratio}
    saved = {"parameter_groups": json.dumps([[LORA_PLUS, 0.016, None]])}
    assert recall_updates(saved, ratio) == ratio
    assert recall_updates(saved, {}) == {"adapter.loraplus_lr_ratio": "another number"}, "LoRA+ is off now"
    for given in (ratio, {}, {"parameter_groups": json.dumps(groups)}):
        assert recall_updates(given, ratio) == given


@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_plus_has_the_groups_and_rates_of_peft(composed: RunConfig, layers: list[Layer], use_dora: bool) -> None:
    """By the weight."""
    config = deepcopy(composed)
    config.adapter.name, config.adapter.loraplus_lr_ratio = AdapterName.lora, 16.0
    llama = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16)
    lora = build_lora_config(layers, "all-linear", r=2, modules_to_save=["embed_tokens"], use_dora=use_dora)
    model = get_peft_model(AutoModelForCausalLM.from_config(llama), lora)
    trained = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    assert any("magnitude" in name for name in trained.values()) is use_dora
    assert any("embed_tokens" in name for name in trained.values())

    def list_rates(groups: list[dict[str, Any]]) -> dict[str, float]:
        return {trained[id(each)]: group["lr"] for group in groups for each in group["params"]}

    expected = create_loraplus_optimizer(model, torch.optim.SGD, lr=config.learning_rate, loraplus_lr_ratio=16.0)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    assert list_rates(group_parameters(named, config)) == list_rates(expected.param_groups)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (
            ParameterGroup("router", 1e-4),
            "entry 3: 'router' matches no weight that is trained; they are named like",
        ),
        (
            ParameterGroup("up_proj", 1e-4),
            r"entry 3: 'up_proj' matches no .* but such as 'model.layers.0.mlp.up_proj.w",
        ),
        (ParameterGroup("embed", 1e-4), "entry 3: 'embed' matches no weight that is trained; they"),  # frozen
        (ParameterGroup("lm_head("), r"entry 3: 'lm_head\(' is not a valid regular expression"),
        (ParameterGroup("lm_head"), "entry 3: 'lm_head' changes nothing; give learning_rate, weight_decay or both"),
        (ParameterGroup("lm_head", -1.0), "entry 3: learning_rate=-1.0: 0 or more"),
        (ParameterGroup("lm_head", weight_decay=float("inf")), "entry 3: weight_decay=inf: 0 or more"),
    ],
)
def test_an_entry_that_would_do_nothing_is_refused(
    config: RunConfig, layers: list[Layer], entry: ParameterGroup, error: str
) -> None:
    config.freeze = ["embed_tokens"]
    config.parameter_groups.append(entry)
    with pytest.raises(UserError, match=f"^parameter_groups, {error}"):
        check_group_keys(config)
        check_parameter_groups(config, layers)


def test_a_schedule_of_nothing_scales_nothing(config: RunConfig) -> None:
    config.learning_rate = 0.0
    with pytest.raises(UserError, match="entry 1: learning_rate=0.0001, but the run's learning_rate is 0"):
        check_group_keys(config)


def test_copies_are_apart_from_what_this_rank_alone_has() -> None:
    shard, alike, tied = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
    shard.model_parallel = tied.model_parallel = True  # type: ignore[attr-defined]
    alike.model_parallel = False  # type: ignore[attr-defined]
    ranks = SimpleNamespace(parallel=SimpleNamespace(size=2))
    module: Any = SimpleNamespace(ranks=ranks, get_tied_weights_and_groups=lambda: [(tied, None)])
    groups = separate_copies([{"params": [alike, shard, tied], "lr": 0.5}, {"params": [], "lr": 0.25}], module)
    found = [[id(each) for each in group["params"]] for group in groups]
    assert found == [[id(shard)], [id(tied)], [id(alike)], [], [], [], [], []]
    assert [group["lr"] for group in groups] == [0.5] * 4 + [0.25] * 4
    ranks.parallel.size = 1
    (first, second, *_) = separate_copies([{"params": [alike, shard, tied]}], module)
    assert len(first["params"]) == 2 and second["params"][0] is tied


def test_what_stays_in_fp32_is_apart_and_never_first() -> None:
    gate, other = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    module: Any = SimpleNamespace(in_fp32=[gate])
    groups = separate_fp32([{"params": [gate, other], "lr": 0.5}, {"params": [], "lr": 0.25}], module)
    assert [[id(each) for each in group["params"]] for group in groups] == [[id(other)], [id(gate)], [], []]
    assert [group["lr"] for group in groups] == [0.5, 0.5, 0.25, 0.25]
