"""Fields that a family's config class does not declare: ignored where transformers ignores them, else refused."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import ALL, FAMILIES, build_family, build_family_config
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from errors import UserError
from models.architecture.lookup import ARCHITECTURES, _list_attention, _load_architecture, build_layers
from models.generic import undeclared
from models.generic.proof import compare, run_layers
from models.generic.shrink import build_small
from models.weights.config_file import parse_config

FILE = Path("config.json")
LEFT = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 0.5}
BOUND = 1e-5


def describe(family: str) -> dict[str, Any]:
    return json.loads(build_family_config(family).to_json_string(use_diff=False))


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_field_that_the_class_ignores_changes_nothing(family: str) -> None:
    """The loss is that of transformers, which has a window neither in a Llama nor in an OLMo 2."""
    config = parse_config(describe(family) | LEFT | {"a_note": "kept in the file"}, FILE)
    assert not any(hasattr(config, name) for name in LEFT)
    config._attn_implementation = "sdpa"
    model = build_family(family, **LEFT).double()
    assert model.config.sliding_window == 4
    input_ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    loss, _ = run_layers(build_layers(config), model.state_dict(), input_ids, config)
    logits = model(input_ids).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=BOUND)


def test_a_field_that_transformers_obeys_is_refused() -> None:
    with pytest.raises(UserError, match="a 'llama' of transformers does something else with is_causal=False, which"):
        parse_config(describe("llama") | {"is_causal": False, "a_note": 1}, FILE)


def test_fields_of_the_class_and_of_this_project_stay() -> None:
    own = {"unpadded_vocab_size": 300, "num_nextn_predict_layers": 1}
    config = parse_config(describe("qwen3") | own, FILE)
    assert config.sliding_window == 8 and config.layer_types == describe("qwen3")["layer_types"]
    assert config.unpadded_vocab_size == 300 and config.num_nextn_predict_layers == 1


def list_known() -> dict[str, Any]:
    """Every field of any family's config, with a value that is neither empty nor false."""
    known: dict[str, Any] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not kind.__module__.startswith("transformers."):
            continue
        for field in fields(kind):
            value = True if isinstance(field.default, bool) else field.default
            if isinstance(value, (bool, int, float, str)) and value:
                known.setdefault(field.name, value)
    for family in ALL.values():  # windows, layer types and the like, at the sizes of the tests
        known |= {name: value for name, value in family.items() if not isinstance(value, dict)}
    return {name: known[name] for name in sorted(known.keys() - {field.name for field in fields(PretrainedConfig)})}


def list_obeyed(config: PretrainedConfig, names: list[str], build: Any, kernel: str) -> list[str]:
    """The fields with which transformers computes something else."""
    alone = copy.deepcopy(config)
    for name in undeclared.find_undeclared(config, vars(config), ()).keys() - set(names):
        delattr(alone, name)
    if undeclared._agrees(alone, names, build, kernel):
        return []
    if len(names) == 1:
        return names
    half = len(names) // 2
    return [*list_obeyed(config, names[:half], build, kernel), *list_obeyed(config, names[half:], build, kernel)]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_any_family_is_ignored_as_in_transformers_or_refused(family: str) -> None:
    assert family in ARCHITECTURES
    config = build_family_config(family)
    for name, value in list_known().items():
        if not hasattr(config, name):
            setattr(config, name, value)
    given = undeclared.find_undeclared(config, vars(config), ())
    assert len(given) > 200
    architecture, kernel = _load_architecture(config), _list_attention(config)[0]
    obeyed = list_obeyed(config, list(given), architecture.build_layers, kernel)
    assert len(obeyed) < 12, obeyed
    for name in obeyed:
        own = describe(family) | {name: given[name]}
        try:
            parsed = parse_config(own, FILE)
        except UserError:
            continue  # refused
        parsed._attn_implementation = kernel  # transformers reads the field into another one
        plain = AutoConfig.for_model(**own)
        plain._attn_implementation, plain._experts_implementation = kernel, "eager"
        assert compare(build_layers(parsed), *build_small(plain), parsed)[0] < BOUND, name
