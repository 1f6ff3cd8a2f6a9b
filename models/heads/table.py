"""The table of heads: which one a config describes, the config of a model that gets another one, and its layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

from transformers import PretrainedConfig

from errors import UserError
from extension import load_parts
from models.heads.head import Head, Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.layers.layer import Layer

_OWN = (SEQUENCE_CLASSIFICATION,)
_UNKNOWN_SIZE = 2  # labels of a plan whose data are not there to name them: they take next to nothing


def find_head(config: PretrainedConfig) -> Head | None:
    """Return the head that the config names; None for an LM head."""
    names = config.architectures or ()
    return next(
        (head for head in (*_OWN, *load_parts("heads")) if any(re.search(f"{head.ending}$", name) for name in names)),
        None,
    )


def list_labels(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of a head's labels, in their order; empty where config.json gives none, and `transformers`
    numbers them."""
    names = tuple(config.id2label[index] for index in range(config.num_labels))
    return () if names == tuple(f"LABEL_{index}" for index in range(config.num_labels)) else names


def describe_head(config: PretrainedConfig, head: Head, labels: Labels) -> PretrainedConfig:
    """Return the config of a model with the layers of `config` and this head: its own, whose labels get the names that
    they lack, or a new one.

    Raises UserError for a family that has no such models, and for a head with other labels.
    """
    _check_family(config, head)
    described = copy.deepcopy(config)
    if find_head(config) is None:
        described.architectures = [head.classes[type(config)].__name__]
        described.num_labels = labels.size or _UNKNOWN_SIZE
    _check_labels(described, labels)
    if labels.names:
        described.id2label = dict(enumerate(labels.names))
        described.label2id = {name: index for index, name in enumerate(labels.names)}
    described.problem_type = labels.problem_type or described.problem_type
    return described


def _check_family(config: PretrainedConfig, head: Head) -> None:
    """Check that `transformers` has such models of this family: otherwise nothing could load one. Raises UserError."""
    if type(config) not in head.classes:
        raise UserError(
            f"a '{config.model_type}' cannot be a {head.words}: transformers has no class for it "
            f"({head.loaded_with}), so nothing could load it; take a model of another family"
        )


def _check_labels(config: PretrainedConfig, labels: Labels) -> None:
    """Raises UserError where a model has other labels than those that the run asks for."""
    own, architecture = list_labels(config), config.architectures[0]
    if labels.size is not None and labels.size != config.num_labels:
        raise UserError(
            f"config.json: a {architecture} with num_labels={config.num_labels}; the run needs {labels.size}: give a "
            "model with as many, or one without such a head"
        )
    if own and labels.names and own != labels.names:
        raise UserError(
            f"config.json: a {architecture} with the labels {', '.join(own)}; data.labels={', '.join(labels.names)}: "
            "omit data.labels, or give a model without such a head"
        )
    if labels.problem_type and config.problem_type not in (None, labels.problem_type):
        raise UserError(
            f"config.json: a {architecture} with problem_type={config.problem_type}; "
            f"data.problem_type={labels.problem_type}: give the same, or a model without such a head"
        )


def put_head(config: PretrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of a causal language model with the head that the config names instead of their own: a tied
    embedding is then the embedding alone. Raises UserError for a family that has no such models."""
    head = find_head(config)
    if head is None:
        return list(layers)
    _check_family(config, head)
    body = [replace(layer, tied_key=None) for layer in layers[:-1]]
    return [*(body if head.has_weights else _drop_prefix(body)), Layer(head.prefix, head.module, (config,))]


def _drop_prefix(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with the names that their tensors have in the model without a head: those of the model with
    one, without the prefix that all of them share."""
    prefix = layers[0].hf_prefix.split(".")[0] + "."
    if not all(layer.hf_prefix.startswith(prefix) for layer in layers):
        return list(layers)
    return [
        replace(
            layer,
            hf_prefix=layer.hf_prefix.removeprefix(prefix),
            pieces={
                name: [replace(piece, hf_name=piece.hf_name.removeprefix(prefix)) for piece in pieces]
                for name, pieces in layer.pieces.items()
            },
        )
        for layer in layers
    ]
