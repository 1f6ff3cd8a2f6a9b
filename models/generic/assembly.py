"""Builds the layers of a family without a file: embedding, decoder layers, head, and what its backbone does around
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.generic.backbone import Backbone, find_name, has_weights
from models.generic.parts import (
    BackboneBiasedHead,
    BackboneContext,
    BackboneDecoderLayer,
    BackboneEmbedding,
    BackboneHead,
    FinalNorm,
    Finish,
    Preparation,
    hand_scaled_to_loss,
)
from models.generic.shrink import build_small, restore_dropout, shrink
from models.layers.decoder import hand_to_loss
from models.layers.layer import Layer


@dataclass(frozen=True)
class BackboneSpec:
    """The parts of a backbone that hold weights, by name and in the order of the forward pass.

    embedding: the token embedding. before: parts that run before the layers. after: parts that run after them.
    prepares: whether the backbone changes embeddings. finishes: whether it does more after the layers than call
    `after`.
    """

    embedding: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    prepares: bool
    finishes: bool


_known: dict[str, BackboneSpec] = {}  # by config


def assemble(config: PretrainedConfig) -> list[Layer]:
    """Return the pipeline layers of the model that `config` describes. Raises UserError for a model that layers cannot
    represent."""
    spec = read_backbone_spec(config)
    backbone = Backbone(config)
    prefix = f"{backbone.name}."
    _refuse_what_depends_on_weights(backbone)
    tied_key = "embedding" if getattr(config, "tie_word_embeddings", False) else None
    embedding = backbone.parts[spec.embedding]
    prepares_alone = spec.prepares and not spec.before
    layers = [
        Layer(
            f"{prefix}{spec.embedding}.",
            _derive(BackboneEmbedding, embedding),
            (embedding, backbone if prepares_alone else None),
            tied_key,
        )
    ]
    if spec.before:
        layers.append(Layer(prefix, Preparation, ({name: backbone.parts[name] for name in spec.before}, backbone)))
    context = BackboneContext(config, backbone)
    classes = {type(layer): _derive(BackboneDecoderLayer, layer, "DecoderLayer") for layer in backbone.layers}
    layers += [
        Layer(f"{prefix}{backbone.list_name}.{index}.", classes[type(layer)], (config, index, context))
        for index, layer in enumerate(backbone.layers)
    ]
    if len(spec.after) == 1 and not spec.finishes:
        norm = backbone.parts[spec.after[0]]
        layers.append(Layer(f"{prefix}{spec.after[0]}.", _derive(FinalNorm, norm, type(norm).__name__), (norm,)))
    elif spec.after or spec.finishes:
        layers.append(Layer(prefix, Finish, ({name: backbone.parts[name] for name in spec.after}, backbone)))
    return [*layers, _make_head(backbone, layers[0])]


def read_backbone_spec(config: PretrainedConfig) -> BackboneSpec:
    """Run a small model of the same config and return how its backbone uses its parts. Raises UserError where the model
    does something that layers cannot represent."""
    key = config.to_json_string(use_diff=False)
    if key not in _known:
        _known[key] = _watch(restore_dropout(shrink(config), config))
    return _known[key]


def _watch(config: PretrainedConfig) -> BackboneSpec:
    backbone = Backbone(config)
    model, input_ids = build_small(config)
    embedding, found = find_name(model, model.get_input_embeddings()), model.get_submodule(backbone.name)
    owner, _, embedding = embedding.rpartition(".")
    if owner != backbone.name:
        raise UserError(
            f"its embedding is '{owner}.{embedding}' and its layers are in '{backbone.name}', not next to it"
        )
    layers = list(getattr(found, backbone.list_name))
    calls: list[tuple[str, Any, Any]] = []  # name, first input, output

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first = args[0] if args else kwargs.get("hidden_states")
            calls.append((name, first, output if isinstance(output, torch.Tensor) else output[0]))

        return hook

    for name, part in found.named_children():
        if has_weights(part) and name != backbone.list_name:
            part.register_forward_hook(note(name), with_kwargs=True)
    for layer in layers:
        layer.register_forward_hook(note(""), with_kwargs=True)
    found.register_forward_hook(note("the backbone"), with_kwargs=True)
    with torch.no_grad():
        model(input_ids, use_cache=False)
    names = [name for name, _, _ in calls]
    if names.count("") != len(layers):
        raise UserError(f"it runs {names.count('')} layers where it has {len(layers)}")
    first, last = names.index(""), len(names) - 1 - names[::-1].index("")
    before, between, after = names[:first], set(names[first : last + 1]), names[last + 1 : -1]
    parts = {name for name, part in backbone.parts.items() if has_weights(part)}
    if strange := (between - {""}) | (parts - set(names)) | (set(before) & set(after)):
        raise UserError(f"its part '{min(strange)}' is not used exactly once, before or after the layers")
    if not before or before[0] != embedding:
        raise UserError(f"'{embedding}' is not the first of its parts that is used")
    finished = calls[-2][2] if after else calls[last][2]
    return BackboneSpec(
        embedding,
        tuple(before[1:]),
        tuple(after),
        prepares=not torch.equal(calls[first][1], calls[0][2]),
        finishes=not torch.equal(calls[-1][2], finished),
    )


def _refuse_what_depends_on_weights(backbone: Backbone) -> None:
    """Refuse layers that are called with tensors other than hidden states that depend on weights or tokens. A stage has
    only its own layers' weights, so such arguments can depend on positions only."""
    position_ids = torch.arange(4).unsqueeze(0)
    for index, given in enumerate(backbone.read_arguments(torch.zeros(1, 4, 1), position_ids, lambda *kind: None)):
        for name, value in given.items():
            if any(tensor.isnan().any() for tensor in _list_tensors(value)):
                raise UserError(
                    f"its layer {index} is given '{name}' in addition to hidden states, which depends on weights or "
                    "tokens; only hidden states and integers cross a boundary between stages"
                )


def _list_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for inner in values for tensor in _list_tensors(inner)]


def _derive(mixin: type[nn.Module], template: nn.Module, name: str | None = None) -> type[nn.Module]:
    """Return a class of `mixin` and the template's class. name: of the class; `transformers` recognizes norms by it
    when it initializes weights."""
    return type(name or mixin.__name__, (mixin, type(template)), {})


def _make_head(backbone: Backbone, embedding: Layer) -> Layer:
    head: Any = backbone.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(f"its head is a {type(head).__name__}, not a matrix")
    before, after = backbone.read_head()
    factor = before * after
    if embedding.tied_key is not None:
        if head.bias is not None:
            raise UserError("its head is the embedding and has a bias")
        forward = hand_to_loss if factor == 1 else partial(hand_scaled_to_loss, factor)
        return Layer(
            embedding.hf_prefix, embedding.module_class, embedding.args, embedding.tied_key, forward_fn=forward
        )
    name = f"{find_name(backbone.model, head)}."
    if head.bias is None:
        return Layer(name, BackboneHead, (head, factor))
    if factor != 1:
        raise UserError("its head has a bias and its logits are scaled")
    return Layer(name, BackboneBiasedHead, (head,))
