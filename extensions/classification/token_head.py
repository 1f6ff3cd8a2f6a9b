"""Scores of tokens: one number per label from each token's hidden state, with a bias.

`transformers` calls it `...ForTokenClassification`. Of its classes those that are all alike are taken
(`GenericForTokenClassification`); the others have layers of their own before the scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PretrainedConfig
from transformers.modeling_layers import GenericForTokenClassification

from models.heads.head import Head
from models.layers.context import Activations
from models.layers.decoder import hand_biased_to_loss, hand_to_loss


class TokenHead(nn.Linear):
    """A matrix from the hidden size to the labels, and a bias unless config.json says that there is none."""

    sees_positions = True  # of all tokens of a row

    def __init__(self, config: PretrainedConfig) -> None:
        has_bias = getattr(config, "token_classification_bias", True)
        super().__init__(config.hidden_size, config.num_labels, bias=has_bias)

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, ...]:
        """Return what the loss takes: hidden states [B, T, D] and the matrix [C, D], a bias as one more column; and the
        document of each token, int32 [B, T]."""
        hand = hand_to_loss if self.bias is None else hand_biased_to_loss
        return *hand(self, inputs), inputs[2]


class _AlikeClasses(Mapping[type[PretrainedConfig], Any]):
    """The classes of `transformers` that put nothing but dropout before the scores. Looked up when asked for: importing
    the modules of all families takes a minute."""

    def __getitem__(self, config_class: type[PretrainedConfig]) -> Any:
        found = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[config_class]
        if not issubclass(found, GenericForTokenClassification):
            raise KeyError(config_class)
        return found

    def __iter__(self) -> Iterator[type[PretrainedConfig]]:
        return iter(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)

    def __len__(self) -> int:
        return len(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)


TOKEN_CLASSIFICATION = Head(
    words="token classifier",
    loaded_with="AutoModelForTokenClassification",
    ending="ForTokenClassification",
    classes=_AlikeClasses(),
    module=TokenHead,
    prefix="score.",
    peft_task="TOKEN_CLS",
)
HEADS = (TOKEN_CLASSIFICATION,)
