"""Rotary angles that depend on a document's length: each document's are those that it has alone in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import build_family
from torch import nn

from batch import IGNORE_INDEX
from errors import UserError
from models.architecture.lookup import build_layers, check_length
from models.generic.proof import run_layers

LONG = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 4.0], "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "phi3": {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, **LONG},
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "sliding_window": None,
    },
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
        "max_position_embeddings": 16,
    },
}
ROWS = ((30,), (12,), (9, 21), (24, 4))  # documents of each row; the rest is padding
LENGTH = 36


@pytest.mark.parametrize("family", ROPES)
def test_each_document_has_the_loss_that_it_has_alone(family: str) -> None:
    model = build_family(family, **ROPES[family]).double()
    layers = build_layers(model.config)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 300, (length,), generator=generator) for row in ROWS for length in row]
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for document in documents:
            fresh = build_family(family, **ROPES[family]).double()  # nothing is kept of the documents before
            logits = fresh(document[None]).logits[0, :-1]
            expected += nn.functional.cross_entropy(logits, document[1:], reduction="sum")
    input_ids = torch.zeros(len(ROWS), LENGTH, dtype=torch.long)
    position_ids = torch.arange(LENGTH).repeat(len(ROWS), 1)
    segment_ids = torch.zeros(len(ROWS), LENGTH, dtype=torch.int32)
    targets = torch.full((len(ROWS), LENGTH), IGNORE_INDEX)
    rest = iter(documents)
    for row, lengths in enumerate(ROWS):
        start = 0
        for number, length in enumerate(lengths, start=1):
            document, place = next(rest), slice(start, start + length)
            input_ids[row, place], segment_ids[row, place] = document, number
            position_ids[row, start:] = torch.arange(LENGTH - start)  # padding continues the last document
            targets[row, start : start + length - 1] = document[1:]
            start += length
    loss, _ = run_layers(
        layers, model.state_dict(), input_ids, model.config, position_ids, targets, segment_ids=segment_ids
    )
    count = (targets != IGNORE_INDEX).sum()
    assert (loss * count).item() == pytest.approx(expected.item(), rel=1e-9)


def test_families_without_a_file_are_refused_beyond_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    config = build_family("granite", rope_parameters=rope, max_position_embeddings=16).config
    check_length(config, 16)
    with pytest.raises(
        UserError, match="max_seq_length=17: the rotary positions of this 'granite' change with the lon"
    ):
        check_length(config, 17)
