"""Checks whether the documents of a packed row see nothing of each other: a small model of a family without a file must
give the same loss and gradients for them as for each document in a row of its own."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from batch import IGNORE_INDEX
from models.experts.grouped import GROUPED
from models.generic.assembly import assemble
from models.generic.proof import find_difference, list_gradients, run_layers
from models.generic.shrink import build_small

_LENGTHS = ((3, 9, 12), (7, 1, 16))  # of the documents of each row


def compare_with_documents_alone(config: PretrainedConfig) -> tuple[float, str]:
    """Return the largest relative difference of loss and gradients, and the name of that tensor. For small models.

    In fp64: rows that are cut differently are summed in another order, and the gradients of some recurrent layers
    magnify that beyond the bound in fp32.
    """
    config._experts_implementation = GROUPED
    layers = assemble(config)
    model, input_ids = build_small(config)
    weights = model.double().state_dict()
    documents = [
        document for row, lengths in zip(input_ids, _LENGTHS, strict=True) for document in row.split(list(lengths))
    ]
    targets = [torch.nn.functional.pad(document[1:], (0, 1), value=IGNORE_INDEX) for document in documents]
    packed_positions = torch.cat([torch.arange(len(document)) for document in documents]).view_as(input_ids)
    alone = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    alone_targets = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
    results = []
    for rows, row_targets, position_ids in (
        (input_ids, torch.cat(targets).view_as(input_ids), packed_positions),
        (alone, alone_targets, None),
    ):
        loss, modules = run_layers(layers, weights, rows, config, position_ids, row_targets)
        loss.backward()
        results.append({"loss": loss, **list_gradients(modules)})
    return find_difference(*results)
