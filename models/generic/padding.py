"""Checks whether padding after a row changes its loss: a row of a small model alone must give the same loss.

Where padding changes it, a loss depends on what else is in the batch, in `transformers` too.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PretrainedConfig

from batch import IGNORE_INDEX
from models.experts.grouped import GROUPED
from models.generic.assembly import assemble
from models.generic.proof import run_layers
from models.generic.shrink import build_small

_LENGTHS = (100, 90, 10)  # of the rows that a small model is given: all but the first are followed by padding


@torch.no_grad()
def compare_with_rows_alone(config: PretrainedConfig) -> float:
    """Return the relative difference of the losses, in float64. Runs both models; for small ones."""
    config = copy.deepcopy(config)
    config._experts_implementation = GROUPED
    for name in config.to_dict():
        if "jitter" in name and getattr(config, name):  # a router that draws would draw other numbers for other shapes
            setattr(config, name, 0.0)
    layers = assemble(config)
    plain = copy.deepcopy(config)
    plain._experts_implementation = "eager"
    model, _ = build_small(plain)
    model.double()
    shape, generator = (len(_LENGTHS), max(_LENGTHS)), torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, config.vocab_size, shape, generator=generator)
    targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    for row, length in enumerate(_LENGTHS):
        targets[row, length - 1 :] = IGNORE_INDEX
    expected = torch.zeros((), dtype=torch.float64)
    for row, length in zip(input_ids, _LENGTHS, strict=True):
        logits = model(row[None, :length], use_cache=False).logits[0, :-1]
        expected += nn.functional.cross_entropy(logits.double(), row[1:length], reduction="sum")
    loss, _ = run_layers(layers, model.state_dict(), input_ids, config, targets=targets)
    return abs(loss.item() * (targets != IGNORE_INDEX).sum().item() / expected.item() - 1)
