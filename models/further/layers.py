"""Layers that predict further tokens (multi-token prediction, 2412.19437, section 2.2): what they compute, whatever
their parameters are called.

Depth k predicts, from position i, token i + k + 1. With h_0 the hidden states after the final norm, e the embedding:

    h_k[i] = norm(layer(project([norm(e[token i + k]); norm(h_{k-1}[i])])))

`layer` is a decoder layer of the family, embedding and head are the model's own. The paper's text has the two halves
the other way round; all published weights, and the servers that draft with them (vLLM, SGLang, Megatron), have the
embedding first, and h_{k-1} after its norm.

Hidden states of all depths travel as one tensor, end to end along the rows, so the layers after them need no change:
[(1 + K) B, T, D]. A first layer with the model's tied embedding appends the embeddings of the K shifted tokens, and
layer k turns the embeddings of block k into h_k. A shifted token may be another document's, or none: no target of its
own document is predicted from there, nor does any position with a target attend to it.

B micro-batch, T sequence, D hidden, K depths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PretrainedConfig

from models.layers.context import Activations, MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer


class FurtherDecoderLayer(PipelineDecoderLayer):
    """Mixin: the layer of one depth. A naming scheme says which of its modules are the norms, the projection and the
    decoder layer.

    decoder_prefix: the names of the decoder layer's parts begin with it.
    """

    decoder_prefix = ""

    def place(self, config: PretrainedConfig, depth: int, num_depths: int) -> None:
        """Set which depth, from 1, of how many this is."""
        self._depth, self._num_depths, self._num_layers = depth, num_depths, config.num_hidden_layers

    @property
    def number_in_model(self) -> int:
        """After the decoder layers, of which it has another one's `layer_idx`."""
        return self._num_layers + self._depth - 1

    def forward(self, inputs: Activations) -> Activations:
        blocks = list(inputs[0].chunk(1 + self._num_depths))
        combined = self.combine(blocks[self._depth], blocks[self._depth - 1])
        blocks[self._depth] = self.finish(self.decode((combined, *inputs[1:])))
        return torch.cat(blocks), *inputs[1:]

    def combine(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the decoder layer's input [B, T, D], from the embeddings of this depth and the hidden states of the
        one before."""
        raise NotImplementedError

    def decode(self, inputs: Any) -> torch.Tensor:
        """Return the decoder layer's output [B, T, D]."""
        raise NotImplementedError

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [B, T, D] after the last norm, which the head takes."""
        raise NotImplementedError


class Joined(nn.Linear):
    """The projection of an embedding and hidden states, end to end, to the hidden size."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(2 * config.hidden_size, config.hidden_size, bias=False)


def build_norm(template: Layer) -> nn.Module:
    """Build another norm of the kind of the final one."""
    return template.module_class(*template.args)


def apply_norm(norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the result of a norm that takes activations."""
    return norm((hidden_states,))[0]


class ShiftedEmbeddings:
    """How the first of these layers uses the model's embedding: it appends the embeddings of the shifted tokens.

    In: (hidden_states [B, T, D], position_ids, segment_ids, input_ids [B, T], of whole sequences). Out: without tokens,
    which nothing needs any longer, and hidden_states [(1 + K) B, T, D].
    """

    def __init__(self, num_depths: int, context: MicroBatchContext) -> None:
        """context: of the layers, which knows the rank's part of each sequence."""
        self._num_depths, self._context = num_depths, context

    def __call__(self, embedding: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Activations:
        hidden_states, position_ids, segment_ids, input_ids = inputs
        shifted = [shift(input_ids, depth) for depth in range(1, 1 + self._num_depths)]
        parts = [self._context.sequence_part.take(tokens) for tokens in shifted]
        embeddings = [embedding((tokens, position_ids, segment_ids))[0] for tokens in parts]
        return torch.cat([hidden_states, *embeddings]), position_ids, segment_ids


def shift(tokens: torch.Tensor, depth: int) -> torch.Tensor:
    """Return at each position of [B, T] the token `depth` positions later, 0 where there is none."""
    return pad(tokens[:, depth:], (0, depth))
