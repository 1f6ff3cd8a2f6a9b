"""Models of every family with another head against `transformers`' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FAMILIES, build_family, build_family_config
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, LlamaConfig

from batch import Targets
from errors import UserError
from models.architecture.lookup import build_layers
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.heads.table import describe_head, list_labels
from models.losses.document_scores import score_documents

LENGTHS = (17, 9)  # of the rows, padded to the longest
LENGTHS_SHAPE = (2, LENGTHS[0])
GENERIC = ("gpt_neox", "qwen3_moe")  # without a file


def score(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the scores of the project's layers, with the weights of `model`."""
    weights = model.state_dict()
    position_ids = torch.arange(LENGTHS[0]).repeat(2, 1)
    segment_ids = (position_ids < torch.tensor(LENGTHS)[:, None]).int()
    values: Any = (input_ids, position_ids, segment_ids)
    names = set()
    for layer in build_layers(model.config):
        assert layer.tied_key is None  # a tied embedding is not used again
        module = layer.module_class(*layer.args).eval()
        own = {name: layer.hf_prefix + name for name in module.state_dict()}
        module.load_state_dict({name: weights[hf_name] for name, hf_name in own.items()})
        names |= set(own.values())
        values = module(values)
    assert names == weights.keys()
    targets = torch.full(LENGTHS_SHAPE, -100)
    ends = torch.tensor([LENGTHS[0] - 1, LENGTHS[0] + LENGTHS[1] - 1])
    targets.view(-1)[ends] = torch.arange(2)
    return score_documents(values, Targets(targets, ends, torch.tensor(1.0), {"labels": torch.zeros(2, 0)}))


WITHOUT_CLASS = ("deepseek_v32", "glm_moe_dsa", "llama4_text")  # of transformers


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *GENERIC) if family not in WITHOUT_CLASS])
def test_scores_are_those_of_transformers(family: str, tied: bool) -> None:
    config = describe_head(build_family_config(family, tied), SEQUENCE_CLASSIFICATION, Labels(("a", "b", "c")))
    config.pad_token_id = 0
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config).eval()
    input_ids = torch.randint(3, config.vocab_size, (2, LENGTHS[0]))
    input_ids[1, LENGTHS[1] :] = 0
    found = score(model, input_ids)
    with torch.no_grad():
        expected = model(input_ids, attention_mask=(input_ids != 0).int(), use_cache=False).logits
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * max(1.0, expected.abs().max().item()))


def test_a_family_without_a_classifier_is_refused() -> None:
    with pytest.raises(UserError, match="a 'llama4_text' cannot be a sequence classifier: transformers has no class"):
        describe_head(build_family("llama4_text").config, SEQUENCE_CLASSIFICATION, Labels(num_labels=1))


OWN = {"architectures": ["LlamaForSequenceClassification"], "id2label": {0: "no", 1: "yes"}}


@pytest.mark.parametrize(
    ("fields", "labels", "message"),
    [
        (OWN, Labels(num_labels=1), "LlamaForSequenceClassification with num_labels=2; the run needs 1"),
        (OWN, Labels(("yes", "no")), "with the labels no, yes; data.labels=yes, no: omit data.labels"),
        (
            OWN | {"problem_type": "regression"},
            Labels(("no", "yes"), problem_type="multi_label_classification"),
            "with problem_type=regression; data.problem_type=multi_label_classification: give the same",
        ),
    ],
)
def test_a_model_with_other_labels_is_refused(fields: dict[str, Any], labels: Labels, message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_head(LlamaConfig(num_hidden_layers=1, **fields), SEQUENCE_CLASSIFICATION, labels)


def test_labels_are_named_and_numbered_ones_get_their_names() -> None:
    new = describe_head(LlamaConfig(), SEQUENCE_CLASSIFICATION, Labels(("no", "yes", "maybe")))
    assert new.architectures == ["LlamaForSequenceClassification"] and new.num_labels == 3
    assert new.id2label == {0: "no", 1: "yes", 2: "maybe"} and new.label2id["maybe"] == 2
    numbered = LlamaConfig(architectures=new.architectures, num_labels=2)
    assert list_labels(numbered) == ()
    assert list_labels(describe_head(numbered, SEQUENCE_CLASSIFICATION, Labels(("no", "yes")))) == ("no", "yes")
