"""Stacks of experts that stay in the form in which they are published, read without dequantizing them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from models.experts.frozen import FrozenStack
from models.layers.layer import Layer
from models.weights.edits import EditedWeights
from models.weights.hugging_face_folder import HuggingFaceFolder
from models.weights.source import WeightSource


def read_stacks(source: WeightSource, layer: Layer, names: Iterable[str], dtype: torch.dtype) -> dict[str, FrozenStack]:
    """Return stacks of a layer, in the host's memory, as the files hold them; of the experts that the layer reads.

    source: with a `form`, so that no edit changes experts. names: in the layer's module. dtype: of the rows that they
    are multiplied with. Raises UserError for one that is not quantized, or not as the layer's shapes are.
    """
    while isinstance(source, EditedWeights):
        source = source.before
    assert isinstance(source, HuggingFaceFolder), source
    found, whole = {}, layer.build_on_meta()
    for name in names:
        parts = source.read_stack(layer, name)
        shape = torch.Size((len(parts[0]), *whole.get_parameter(name).shape[1:]))
        found[name] = FrozenStack(source.form, parts, shape, dtype)
    return found
