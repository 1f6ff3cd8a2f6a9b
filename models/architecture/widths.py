"""The width of what a layer takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.layers.layer import Layer


def find_input_width(layers: Sequence[Layer], index: int, hidden_size: int) -> int:
    """Return the width of the hidden states that goes into a layer: the model's, but next to a token table and a head
    that are narrower (OPT 350M)."""
    last = len(layers) - 1
    if index not in (1, last):
        return hidden_size
    table = getattr(layers[0 if index == 1 else last].build_on_meta(), "weight", None)
    return table.shape[1] if isinstance(table, torch.Tensor) and table.ndim == 2 else hidden_size
