"""No head: a text's vector is the hidden state after the last norm, of its last token or averaged over its tokens.

`transformers` calls such a model by the name of its family alone (`LlamaModel`), and its tensors by their names without
the prefix that they have in a model with a head.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import MODEL_MAPPING, PretrainedConfig

from models.heads.head import Head
from models.layers.context import Activations


class NoHead(nn.Module):
    """A layer without weights in the place of the head."""

    sees_positions = True  # of all tokens of a row

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the loss takes: hidden states [B, T, D], and the document of each token, int32 [B, T]."""
        return inputs[0], inputs[2]


HEAD = Head(
    words="embedding model",
    loaded_with="AutoModel",
    ending="(?<!LMHead)(?<!DoubleHeads)Model",
    classes=MODEL_MAPPING,
    module=NoHead,
    prefix="pooling.",  # of no tensor
    peft_task="FEATURE_EXTRACTION",
    has_weights=False,
)
HEADS = (HEAD,)
