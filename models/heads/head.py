"""The interface of heads: what comes after the last norm of a text model in place of the LM head.

A head is one file in this folder, with a `Head`, and its line in the table of `models/heads/table.py`. What it computes
is left to the loss, as with the LM head: the module hands over hidden states and its matrix, so only positions with
targets are multiplied, and packed rows need no layer of their own. Which positions those are, and the loss, belong to
the objective (`training/objectives/objective.py`). A model's config.json names its head by its class (`architectures`):
code that reads a model's layers looks at its config alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.layers.context import Activations
from models.layers.decoder import hand_to_loss


class ProjectionHead(nn.Linear):
    """A matrix from the hidden size to the labels, without a bias."""

    sees_positions = True  # of all tokens of a row

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, config.num_labels, bias=False)

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the loss takes: hidden states [B, T, D] and the matrix [C, D], C labels."""
        return hand_to_loss(self, inputs)


@dataclass(frozen=True)
class Head:
    """One head.

    words: what messages call a model that has it. loaded_with: the class of transformers that loads its export.
    ending: of the names of its classes in transformers, a regular expression. classes: class of a config -> its class
    there, for each family that has one. module: the class of its layer, built from the config. prefix: of the names of
    its tensors. peft_task: peft's name for what it is trained for. has_weights: False where hidden states are the
    results, and the model's tensors have the names of its family's class without a head.
    """

    words: str
    loaded_with: str
    ending: str
    classes: Mapping[type[PretrainedConfig], Any]
    module: type[nn.Module]
    prefix: str
    peft_task: str
    has_weights: bool = True


@dataclass(frozen=True)
class Labels:
    """The outputs of a head, as a run asks for them.

    names: of each, in their order; empty where they have none. num_labels: how many without names; None where the run
    takes those of its model. problem_type: transformers' word for what they mean; None where its config needs none.
    """

    names: tuple[str, ...] = ()
    num_labels: int | None = None
    problem_type: str | None = None

    @property
    def size(self) -> int | None:
        """The number of outputs; None if the model decides it."""
        return len(self.names) or self.num_labels
