"""Finds the names and pieces in which a Hugging Face checkpoint stores the tensors of a layer.

`transformers` renames and rearranges tensors between disk and memory (`conversion_mapping`, 5.23): experts that are
stacked in memory are stored one by one on disk. Its own code for saving is applied here to small tensors that hold
their own element numbers; the result shows which part of which tensor each piece is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import extract_weight_conversions_for_model
from transformers.core_model_loading import revert_weight_conversion

from errors import UserError
from models.layers.layer import Layer, TensorPiece
from models.layers.wrapped import Wrapper

_SIDE = 12  # of a small tensor: divisible by the numbers of pieces that tensors are cut into, 2, 3 and 4
_NUMBER = "987654321"  # a placeholder for the layer's index in names


def name_pieces(config: PretrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with the pieces that their tensors have on disk; unchanged where names and shapes are the same
    as in memory.

    Raises UserError for a family whose tensors are rearranged in any way other than cut, stacked or renamed.
    """
    model = wrap_module(config)
    return _name_pieces(model, layers) if _has_conversions(model) else list(layers)


def _has_conversions(model: PreTrainedModel) -> bool:
    return extract_weight_conversions_for_model(model) is not None


def name_wrapped_pieces(config: PretrainedConfig, layers: Sequence[Layer], wrapper: Wrapper) -> list[Layer]:
    """Return the layers with the names that the text model's tensors have in a folder of the model around it.

    Such a folder may have the text model's own names after its prefix, and then these are used: `transformers` cannot
    read back what it saves where the renaming of another part is undone too (Kimi's, 5.23, whose layers become blocks).
    A text model without conversions (Step 3.5) has the names in memory, and what is published is known from the model
    around it alone.
    """
    own_base = wrapper.own_base
    named = _name_pieces(wrapper.model, wrapper.rename(layers))
    if not _has_conversions(wrap_module(config)):
        return named
    embedding = named[0].get_pieces("weight")[0].hf_name
    prefix = embedding.removesuffix(layers[0].hf_prefix.removeprefix(own_base) + "weight")
    chosen = []
    for alone, layer in zip(name_pieces(config, layers), named, strict=True):
        pieces = {}
        for name in layer.shapes() if layer.owns_weights and alone.hf_prefix.startswith(own_base) else ():
            own = [
                replace(piece, hf_name=prefix + piece.hf_name.removeprefix(own_base))
                for piece in alone.get_pieces(name)
            ]
            if _mean_the_same(own, layer.get_pieces(name), wrapper):
                pieces[name] = own
        chosen.append(layer.with_pieces({**layer.pieces, **pieces}))
    return chosen


def _mean_the_same(some: Sequence[TensorPiece], others: Sequence[TensorPiece], wrapper: Wrapper) -> bool:
    """Return whether both name the same parts of the same tensors in memory."""
    return [(wrapper.name_in_memory(piece.hf_name), piece.index) for piece in some] == [
        (wrapper.name_in_memory(piece.hf_name), piece.index) for piece in others
    ]


def _name_pieces(model: PreTrainedModel, layers: Sequence[Layer]) -> list[Layer]:
    known: dict[object, dict[str, list[TensorPiece]]] = {}
    named = []
    for layer in layers:
        shapes = layer.shapes() if layer.owns_weights else {}
        prefix, number = _split_number(layer.hf_prefix)
        kind = (layer.module_class, tuple(shapes.items()), prefix)
        if kind not in known:
            known[kind] = _find_pieces(model, replace(layer, hf_prefix=prefix), shapes)
        named.append(layer.with_pieces({name: _fill_in(pieces, number) for name, pieces in known[kind].items()}))
    return named


def _split_number(prefix: str) -> tuple[str, str]:
    """Return the prefix with `_NUMBER` instead of the layer's own number, and that number; empty where it has none."""
    match = re.search(r"\.(\d+)\.$", prefix)
    return (f"{prefix[: match.start(1)]}{_NUMBER}.", match[1]) if match else (prefix, "")


def _fill_in(pieces: Sequence[TensorPiece], number: str) -> list[TensorPiece]:
    return [replace(piece, hf_name=piece.hf_name.replace(_NUMBER, number)) for piece in pieces] if number else [*pieces]


def wrap_module(config: PretrainedConfig, module: nn.Module | None = None) -> PreTrainedModel:
    """Return a model of the config's class that has `module` and nothing else: the class knows the conversions and the
    initialization of its parts."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    if module is not None:
        model.add_module("layer", module)
    return model


def _find_pieces(
    model: PreTrainedModel, layer: Layer, shapes: Mapping[str, torch.Size]
) -> dict[str, list[TensorPiece]]:
    """Return the pieces by the names in the layer's module; only for tensors that are stored differently on disk."""
    wholes, first = {}, 0
    for name, shape in shapes.items():
        small = _shrink(shape)
        wholes[name] = torch.arange(first, first + small.numel()).view(small)
        first += small.numel()
    on_disk = revert_weight_conversion(model, {layer.hf_prefix + name: whole for name, whole in wholes.items()})
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in wholes}
    for hf_name, part in on_disk.items():
        refused = UserError(
            f"model_type '{model.config.model_type}': '{hf_name.replace(_NUMBER, 'N')}' is rearranged on disk in a way "
            "that is not supported"
        )
        name, piece = _locate(layer, hf_name, part, wholes, refused)
        pieces[name].append(
            TensorPiece(piece.hf_name, _enlarge(piece.index, wholes[name].shape, shapes[name], refused))
        )
    return {name: found for name, found in pieces.items() if found != [TensorPiece(layer.hf_prefix + name)]}


def _shrink(shape: torch.Size) -> torch.Size:
    """Return a small shape: stacks keep their number of matrices; all other dimensions become short."""
    kept = 1 if len(shape) > 2 else 0
    return torch.Size([*shape[:kept], *(min(length, _SIDE) for length in shape[kept:])])


def _locate(
    layer: Layer, hf_name: str, part: torch.Tensor, wholes: Mapping[str, torch.Tensor], refused: UserError
) -> tuple[str, TensorPiece]:
    """Return the name of the tensor that a part on disk belongs to, and the piece. Raises `refused` where it is not a
    piece of it."""
    lowest, highest = int(part.min()), int(part.max())
    name = next(name for name, whole in wholes.items() if whole.flatten()[0] <= lowest <= whole.flatten()[-1])
    whole = wholes[name]
    index: tuple[int | slice, ...] = ()
    if part.shape != whole.shape:
        first = torch.unravel_index(torch.tensor(lowest) - whole.flatten()[0], whole.shape)
        last = torch.unravel_index(torch.tensor(highest) - whole.flatten()[0], whole.shape)
        is_one_of_a_stack = part.ndim < whole.ndim
        index = tuple(
            int(low) if is_one_of_a_stack and axis == 0 else slice(int(low), int(high) + 1)
            for axis, (low, high) in enumerate(zip(first, last, strict=True))
        )
    if (_NUMBER in layer.hf_prefix and _NUMBER not in hf_name) or not torch.equal(whole[index], part):
        raise refused
    return name, TensorPiece(hf_name, index)


def _enlarge(
    index: tuple[int | slice, ...], small: torch.Size, shape: torch.Size, refused: UserError
) -> tuple[int | slice, ...]:
    """Return the same part of the full-size tensor, without trailing whole dimensions. Raises `refused` where it would
    not begin and end at whole rows."""
    enlarged: list[int | slice] = []
    for place, short, length in zip(index, small, shape, strict=False):
        if isinstance(place, int):
            enlarged.append(place)
        else:
            start, stop = place.start * length / short, place.stop * length / short
            if not (start.is_integer() and stop.is_integer()):
                raise refused
            enlarged.append(slice(int(start), int(stop)))
    while enlarged and enlarged[-1] == slice(0, shape[len(enlarged) - 1]):
        enlarged.pop()
    return tuple(enlarged)
