"""Families without a file in models/ that are not mixtures: as Hugging Face computes them, and as their checkpoints are
named. Every option that their config has is switched on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.chain import BOUND, B, Chain, difference, positions, tokens
from support.families import OTHERS, build_family
from support.model_folders import assert_same_bits, convert, export, load_transformers

from batch import Targets
from data.collator import shift_labels
from errors import UserError
from models.architecture.lookup import ARCHITECTURES, build_layers
from models.losses.cross_entropy import build_loss

SHORT = ("gemma3_text", "falcon-alibi")  # an angle for each type of layer; ALiBi, from masks that know no documents
EVERY_OTHER = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in sorted(OTHERS)]
)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
BIASED_HEADS = ("gptj", "phi")


@EVERY_OTHER
@TIED
def test_loss_and_every_gradient_are_hugging_faces(family: str, tied: bool) -> None:
    model = build_family(family, tied).train()
    assert model.config.model_type not in ARCHITECTURES
    if tied and family in BIASED_HEADS:
        with pytest.raises(UserError, match="its head is the embedding and has a bias"):
            build_layers(model.config)
        return
    chain = Chain(model)
    input_ids = tokens()
    labels = input_ids.clone()
    labels[:, -3:] = labels[:, :4] = -100
    targets = shift_labels(labels)
    expected = model(input_ids, labels=labels, use_cache=False).loss
    loss = build_loss(model.config)(
        chain.run(input_ids, positions()), Targets.find(targets, (targets != -100).sum().float())
    )
    assert difference(loss, expected) < BOUND
    expected.backward()
    loss.backward()
    gradients, named = chain.gradients(), dict(model.named_parameters())
    assert gradients.keys() == named.keys()
    for name, gradient in gradients.items():
        assert difference(gradient, named[name].grad) < BOUND, name


@EVERY_OTHER
def test_documents_packed_into_a_row_do_not_see_each_other(family: str) -> None:
    model = build_family(family).eval()
    chain = Chain(model).eval()
    lengths = (11, 1, 7, 5)
    packed = torch.cat([torch.arange(length) for length in lengths]).repeat(B, 1)
    input_ids = tokens()
    with torch.no_grad():
        alone = torch.cat([model(ids, use_cache=False).logits for ids in input_ids.split(lengths, dim=1)], dim=1)
        assert difference(chain(input_ids, packed), alone) < BOUND
        assert difference(chain(input_ids, positions())[:, 12:], alone[:, 12:]) > 1e-4  # the test can tell


@EVERY_OTHER
@TIED
def test_round_trip_is_bit_exact(family: str, tied: bool, tmp_path: Path) -> None:
    if tied and family in BIASED_HEADS:
        pytest.skip("refused")
    build_family(family, tied).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    back = export(convert(tmp_path / "hf", tmp_path / "pipeline"), tmp_path / "back")
    assert_same_bits(load_file(back / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors"))
    assert_same_bits(load_transformers(back), load_transformers(tmp_path / "hf"))
