"""Edits of weights: their order, what they leave as it is, and what a conversion plans from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import VOCAB_SIZE
from support.further import save_with_further
from support.tiny import save_llama

from models.architecture.lookup import build_layers
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.weights.edits import Edit, edit_weights
from models.weights.further import FurtherLayers
from models.weights.new_head import NewHead, UntiedHead
from models.weights.random_weights import RandomWeights
from models.weights.resized_vocab import ResizedVocabulary, grow_rows, with_rows
from models.weights.source import WeightSource
from models.weights.sources import open_weights

ROWS = VOCAB_SIZE + 8


def read_all(source: WeightSource) -> dict[str, torch.Tensor]:
    layers = build_layers(source.config, source.wrapper)
    return {
        f"{index} {name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in source.read_layer(index, layer).items()
    }


def list_edits(kind: str, source: WeightSource) -> list[Edit]:
    if kind == "head":
        return [NewHead(SEQUENCE_CLASSIFICATION, Labels(num_labels=3), seed=1)]
    return {"vocabulary": [ResizedVocabulary(with_rows(source.config, ROWS))], "further": [FurtherLayers()]}.get(
        kind, [UntiedHead()]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edits")
    save_with_further(folder, "deepseek_v3", depths=1, tied=True)
    return folder


def test_without_edits_a_source_is_itself(folder: Path) -> None:
    source = open_weights(str(folder))
    assert edit_weights(source, []) is source


def test_their_order_is_not_that_in_which_they_are_given(folder: Path) -> None:
    """The head begins as a copy of all rows of the embedding, those that were added too."""
    source = open_weights(str(folder))
    edits = [edit for kind in ("untied", "further", "vocabulary") for edit in list_edits(kind, source)]
    first, second = (edit_weights(source, each) for each in (edits, edits[::-1]))
    tensors, others = read_all(first), read_all(second)
    assert tensors.keys() == others.keys() and all(torch.equal(others[name], each) for name, each in tensors.items())
    embedding = read_all(source)["0 weight"]
    assert torch.equal(tensors["0 weight"], grow_rows(embedding, ROWS))
    assert torch.equal(tensors[f"{len(build_layers(first.config)) - 1} weight"], tensors["0 weight"])
    assert (source.config.vocab_size, first.config.vocab_size) == (VOCAB_SIZE, ROWS)


@pytest.mark.parametrize("kind", ["vocabulary", "head", "further", "untied"])
def test_what_is_described_is_what_is_read(kind: str, folder: Path) -> None:
    source = open_weights(str(folder))
    edited = edit_weights(source, list_edits(kind, source))
    edited.check_complete(layers := build_layers(edited.config))
    assert edited.files() == source.files() and edited.path == edited.config_dir == folder
    for index, layer in enumerate(layers):
        read, described = edited.read_layer(index, layer), edited.describe_layer(index, layer)
        assert all(tensor.is_meta for tensor in described.values())
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in described.items()
        }
        assert not read or {name: tensor.shape for name, tensor in read.items()} == layer.shapes()


def test_random_weights_are_described_without_being_drawn(tmp_path: Path) -> None:
    save_llama(tmp_path)
    source = RandomWeights(open_weights(str(tmp_path)).config, seed=0)
    for index, layer in enumerate(build_layers(source.config)):
        described = source.describe_layer(index, layer)
        assert all(tensor.is_meta for tensor in described.values())
        assert {name: tensor.shape for name, tensor in described.items()} == (
            {name: tensor.shape for name, tensor in source.read_layer(index, layer).items()}
        )
