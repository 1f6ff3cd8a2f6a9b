"""Reward models: a text model whose head computes one number per row, from the hidden state of its last token.

`transformers` calls it `...ForSequenceClassification` with one label, and config.json says so (`architectures`,
`num_labels`): code that reads a model's layers looks at its config alone. B rows, T tokens, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig

from errors import UserError
from models.layers.context import Activations
from models.layers.layer import Layer
from models.parallel.shard import NO_CP, ContextParallel, sum_parts

_CLASSIFIER = "ForSequenceClassification"
PREFIX = "score."


class ScoreHead(nn.Linear):
    """The head in place of the LM head. The last token of a row is its last that is not padding; of ranks that split
    sequences one has it."""

    sequence_part: ContextParallel = NO_CP

    sees_positions = True  # of all tokens of a row

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False)

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [B], fp32 at least: rounded to bf16, rewards of 10 would differ by steps of 0.06; and the
        rows' lengths in tokens, int64 [B]: a row of length 0 is padding alone, and its score means nothing."""
        hidden_states, _, segment_ids = inputs
        lengths = (segment_ids != 0).sum(dim=1)
        places = torch.arange(segment_ids.shape[1], device=lengths.device).expand_as(segment_ids)
        is_last = self.sequence_part.take(places) == (lengths - 1).clamp(min=0).unsqueeze(1)  # [B, T]
        row_index, found = is_last.int().max(dim=1).indices, is_last.any(dim=1)
        chosen = hidden_states[torch.arange(len(row_index), device=row_index.device), row_index]  # [B, D]
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        scores = nn.functional.linear(chosen.to(dtype), self.weight.to(dtype)).squeeze(1)
        return sum_parts(torch.where(found, scores, 0.0), self.sequence_part), lengths


def is_reward_model(config: PretrainedConfig) -> bool:
    """Return whether the config describes a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def describe_reward_model(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a reward model with the layers of `config`. Raises UserError for a family without reward
    models."""
    check_family(config)
    described = copy.deepcopy(config)
    described.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    described.num_labels = 1
    return described


def check_family(config: PretrainedConfig) -> None:
    """Check that `transformers` has reward models of this family: otherwise nothing could load one.
    Raises UserError."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"a '{config.model_type}' cannot be a reward model: transformers has no class for its sequence "
            "classification, so nothing could load it; take a model of another family"
        )


def put_score_head(config: PretrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of a causal language model with a score head instead of their own: a tied embedding is then the
    embedding alone.

    Raises UserError for a family that has no reward models, and for a classifier with several labels.
    """
    check_family(config)
    if config.num_labels != 1:
        raise UserError(
            f"config.json: a {config.architectures[0]} with num_labels={config.num_labels}; a reward model has one "
            "label"
        )
    return [
        *(replace(layer, tied_key=None) for layer in layers[:-1]),
        Layer(PREFIX, ScoreHead, (config,)),
    ]
