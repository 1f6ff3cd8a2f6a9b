"""Frozen weights that stay in the form in which they are published, read without dequantizing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch

from models.layers.frozen import FrozenStack
from models.layers.layer import Layer
from models.weights.edits import EditedWeights
from models.weights.source import WeightSource


@runtime_checkable
class PublishedWeights(Protocol):
    """A source of weights in a form, a name in `FORMS` of `models/layers/frozen.py`: a Hugging Face folder."""

    @property
    def form(self) -> str: ...

    def read_kept(self, layer: Layer, name: str) -> tuple[torch.Tensor, ...] | None:
        """Return the parts of a tensor of the layer's module in the form: of a stack of experts [E, ...], of those that
        the layer reads; of a projection [1, ...], and None for one that the files hold in another way.

        Raises UserError for a stack that is not quantized or not in whole blocks, and for another shape.
        """


def read_kept(source: WeightSource, layer: Layer, names: Iterable[str], dtype: torch.dtype) -> dict[str, FrozenStack]:
    """Return weights of a layer, in the host's memory, as the files hold them: stacks, of the experts that the layer
    reads, and projections, without those that are not quantized.

    source: with a `form`, so that edits change nothing but their names. names: in the layer's module. dtype: of the
    rows that they are multiplied with. Raises UserError for a stack that is not quantized, or not as the layer's shapes
    are.
    """
    while isinstance(source, EditedWeights):
        layer, source = source.name_before(layer), source.before
    assert isinstance(source, PublishedWeights), source
    found, whole = {}, layer.build_on_meta()
    for name in names:
        parts = source.read_kept(layer, name)
        if parts is not None:
            shape = torch.Size((len(parts[0]), *whole.get_parameter(name).shape[-2:]))
            found[name] = FrozenStack(source.form, parts, shape, dtype)
    return found
