"""The layers one after the other in one process, on packed rows, against plain modules of `transformers`, each document
alone: losses of each depth, and all gradients, in fp64. What stages add is in
tests/training/parity/test_further_tokens.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.further import PlainFurther, count_targets, save_with_further
from torch import nn

from batch import Targets
from data.collator import defer_targets, shift_labels
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from models.losses.further_tokens import FurtherTokenLoss
from models.losses.token_loss import TokenLoss
from models.weights.edits import edit_weights
from models.weights.further import FurtherLayers
from models.weights.source import WeightSource
from models.weights.sources import open_weights

COEF, BOUND = 0.4, 1e-5  # norms of transformers compute in fp32
LENGTHS = ((9, 4, 7), (12, 6))  # of the documents of two rows, of which the second has padding
WIDTH = 20


def build_modules(source: WeightSource) -> list[tuple[Layer, nn.Module]]:
    shared: dict[str, nn.Module] = {}
    chain = []
    for index, layer in enumerate(build_layers(source.config)):
        module = shared.get(layer.tied_key or "")
        if module is None:
            module = layer.module_class(*layer.args).double()
            module.load_state_dict(source.read_layer(index, layer))
            shared |= {layer.tied_key: module} if layer.tied_key else {}
        chain.append((layer, module))
    return chain


def draw_rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, torch.Tensor] = {
        "ids": torch.randint(3, 320, (2, WIDTH), generator=generator),
        "positions": torch.arange(WIDTH).repeat(2, 1),
        "segments": torch.zeros(2, WIDTH, dtype=torch.int32),
    }
    rows["labels"] = torch.where(torch.rand(2, WIDTH, generator=generator) < 0.3, -100, rows["ids"])
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths, 1):
            rows["segments"][row, start : start + length] = number
            rows["positions"][row, start:] = torch.arange(WIDTH - start)
            rows["labels"][row, start] = -100
            start += length
        rows["labels"][row, start:] = -100
    return rows


def list_documents(rows: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    masks = [(row, rows["segments"][row] == number) for row in (0, 1) for number in range(1, 1 + len(LENGTHS[row]))]
    return [(rows["ids"][row, mask], rows["labels"][row, mask]) for row, mask in masks]


def run(source: WeightSource, rows: dict[str, torch.Tensor], depths: int) -> tuple[Any, dict[str, torch.Tensor]]:
    source.config._attn_implementation = "sdpa"
    chain = build_modules(source)
    values: Any = (rows["ids"], rows["positions"], rows["segments"], rows["ids"])
    for layer, module in chain:
        values = layer.forward_fn(module, values) if layer.forward_fn else module(values)
    targets = shift_labels(rows["labels"])
    further = [defer_targets(targets, rows["segments"], depth) for depth in range(1, 1 + depths)]
    own, *others = (Targets.find(ids, (ids != -100).sum().double()) for ids in (targets, *further))
    loss = FurtherTokenLoss(TokenLoss(source.config), COEF, depths)
    value = loss(values, replace(own, further=tuple(others)))
    value.backward()
    sums, counts = loss.sums[0].take()
    gradients = {
        layer.hf_prefix + name: parameter.grad
        for layer, module in chain
        if layer.owns_weights
        for name, parameter in module.named_parameters()
    }
    return (value.item(), (sums / counts).tolist(), counts.tolist()), gradients


@pytest.mark.parametrize(
    ("family", "depths", "tied"), [("deepseek_v3", 2, False), ("glm4_moe", 1, True), ("qwen3_next", 1, False)]
)
def test_they_equal_plain_modules(tmp_path: Path, family: str, depths: int, tied: bool) -> None:
    save_with_further(tmp_path, family, depths, tied)
    rows = draw_rows()
    (loss, losses, counts), gradients = run(edit_weights(open_weights(str(tmp_path)), [FurtherLayers()]), rows, depths)

    plain, documents = PlainFurther(tmp_path, family).double(), list_documents(rows)
    totals = [sum(each) for each in zip(*(plain.compute_losses(*document) for document in documents), strict=True)]
    numbers = [sum(count_targets(labels, depth) for _, labels in documents) for depth in range(1 + depths)]
    means = [total / number for total, number in zip(totals, numbers, strict=True)]
    (means[0] + COEF / depths * sum(means[1:])).backward()
    assert counts == numbers[1:] and len(set(numbers)) == 1 + depths
    assert loss == pytest.approx(means[0].item(), rel=BOUND)
    assert losses == pytest.approx([mean.item() for mean in means[1:]], rel=BOUND)
    expected = plain.list_gradients()
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < BOUND * max(gradient.abs().max(), 1e-6 * largest), name
