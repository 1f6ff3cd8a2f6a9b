"""Mixtures of experts without a file in models/: as Hugging Face computes them, and as their checkpoints are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.chain import BOUND, B, Chain, difference, positions, tokens
from support.families import MIXTURES, build_family, save_family
from support.model_folders import assert_same_bits, convert, export, load_transformers
from transformers import AutoConfig, PreTrainedModel

from batch import Targets
from data.collator import shift_labels
from errors import UserError
from models.architecture.lookup import ARCHITECTURES, build_layers
from models.architecture.unused import list_ignored
from models.experts.grouped import GROUPED
from models.losses.cross_entropy import build_loss
from models.weights.sources import open_weights

SHORT = ("mixtral", "glm4_moe")  # by softmax; by sigmoid and groups
EVERY_MIXTURE = pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in sorted(MIXTURES)]
)


def build_chain(model: PreTrainedModel) -> Chain:
    """Return the layers as a run builds them, from a config without the fields that the model has set in its own."""
    attention = model.config._attn_implementation
    fields = model.config.to_dict()
    own, model.config = model.config, AutoConfig.for_model(**fields)
    model.config._attn_implementation = attention
    chain = Chain(model)
    assert model.config._experts_implementation == GROUPED
    model.config = own
    return chain


@EVERY_MIXTURE
def test_loss_and_every_gradient_are_hugging_faces(model_type: str) -> None:
    assert model_type not in ARCHITECTURES
    draws = {"router_jitter_noise": 0.3} if model_type == "phimoe" else {}  # its router has no gradient without
    model = build_family(model_type, **draws).train()
    model.set_experts_implementation("eager")
    chain = build_chain(model)
    input_ids = tokens()
    labels = input_ids.clone()
    labels[:, -3:] = labels[:, :4] = -100
    targets = shift_labels(labels)
    torch.manual_seed(0)
    expected = model(input_ids, labels=labels, use_cache=False).loss
    torch.manual_seed(0)
    loss = build_loss(model.config)(
        chain.run(input_ids, positions()), Targets.find(targets, (targets != -100).sum().float())
    )
    assert difference(loss, expected) < BOUND
    expected.backward()
    loss.backward()
    gradients = {name: p for name, p in chain.gradients().items() if p is not None}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == named.keys()
    for name, gradient in gradients.items():
        assert difference(gradient, named[name].grad) < BOUND, name


@EVERY_MIXTURE
def test_documents_packed_into_a_row_do_not_see_each_other(model_type: str) -> None:
    model = build_family(model_type).eval()
    chain = build_chain(model).eval()
    lengths = (11, 1, 7, 5)
    packed = torch.cat([torch.arange(length) for length in lengths]).repeat(B, 1)
    input_ids = tokens()
    with torch.no_grad():
        alone = [model(document, use_cache=False).logits for document in input_ids.split(lengths, dim=1)]
        assert difference(chain(input_ids, packed), torch.cat(alone, dim=1)) < BOUND


@EVERY_MIXTURE
def test_both_forms_on_disk_become_the_same_model_and_leave_under_the_names_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    """One tensor per expert, as published; and stacked, as in memory."""
    model = build_family(model_type).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "apart")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    expected = load_file(tmp_path / "apart" / "model.safetensors")
    for form in ("apart", "stacked"):
        back = export(convert(tmp_path / form, tmp_path / f"{form}-pipeline"), tmp_path / f"{form}-back")
        assert_same_bits(load_file(back / "model.safetensors"), expected)
    assert_same_bits(load_transformers(tmp_path / "stacked-back"), load_transformers(tmp_path / "apart"))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    source = open_weights(str(save_family(tmp_path, "mixtral")))
    del source._files["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    with pytest.raises(UserError, match=r"missing tensors: 1, first 'model.layers.1.block_sparse_moe.experts.3.w2"):
        source.check_complete(build_layers(source.config))


def test_experts_that_another_rank_has_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, prefix = open_weights(str(save_family(tmp_path, "mixtral"))), "model.layers.1.block_sparse_moe.experts."
    layer, read = build_layers(source.config)[2], []
    read_whole = source._read  # of the others the dtypes alone are looked at
    monkeypatch.setattr(source, "_read", lambda name: (read.append(name), read_whole(name))[1])
    whole = source.read_layer(2, layer)
    assert {name.removeprefix(prefix)[0] for name in read if name.startswith(prefix)} == set("01234567")
    stacks = [name for name in whole if "experts." in name]
    read.clear()
    own = source.read_layer(2, replace(layer, experts=dict.fromkeys(stacks, range(2, 4))))
    assert {name.removeprefix(prefix)[0] for name in read if name.startswith(prefix)} == set("23")
    assert len(stacks) == 2 and all(torch.equal(own[name][2:4], whole[name][2:4]) for name in stacks)


def test_a_tensor_cut_within_a_row_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that cuts 320 rows of the vocabulary into thirds would do so."""

    def cut(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{name}.{part}": third for name, t in tensors.items() for part, third in enumerate(t.chunk(3))}

    monkeypatch.setattr("models.architecture.disk_names.revert_weight_conversion", cut)
    with pytest.raises(
        UserError,
        match=r"model_type 'mixtral': 'model.embed_tokens.weight.0' is rearranged on disk in a way that is not",
    ):
        build_layers(build_family("mixtral").config)


def test_layers_that_predict_further_tokens_are_ignored() -> None:
    config = AutoConfig.for_model("glm4_moe", num_hidden_layers=3, num_nextn_predict_layers=2)
    ignored = list_ignored(config)
    found = [any(pattern.search(f"model.layers.{i}.mlp.down_proj.weight") for pattern in ignored) for i in range(6)]
    assert found == [False, False, False, True, True, False]
