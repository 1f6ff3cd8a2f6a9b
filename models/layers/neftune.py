"""NEFTune (2310.05914): uniform noise on token embeddings while a model is trained.

A document of L tokens gets noise from [-alpha, alpha) / sqrt(L * D) in each of its D channels; L counts no padding and,
in a packed row, no other document. It is added to the output of `transformers`' embedding, so after the scale of a
family whose embedding scales itself.

The numbers are a hash of the step's seed, the document's tokens, the position in the document, and the channel. Nothing
is drawn, so they are the same at every layout, packed or not, on every rank of a tensor-parallel group, on ranks that
have parts of a document, and when a layer is recomputed. Documents of the same tokens in one step get the same noise.

B rows, T places, D hidden.
"""

from __future__ import annotations

import math

import torch

from models.layers.context import Activations
from models.layers.decoder import Embedding
from models.parallel.shard import NO_CP, ContextParallel, sum_parts

_MASK = 0xFFFFFFFF  # numbers of 32 bits, kept in int64 so that products fit
_STEP = 0x9E3779B1  # odd: multiples of it differ in all bits


class EmbeddingNoise:
    """The noise of one stage's embedding. Call `start_step` before the passes of a step."""

    def __init__(self, alpha: float, sequence_part: ContextParallel = NO_CP) -> None:
        self._alpha, self._seed, self._sequence_part = alpha, 0, sequence_part
        self._keys = self._scales = torch.empty(0)

    def attach(self, embedding: Embedding) -> None:
        embedding.noise = self.add
        # Before a shard of the vocabulary changes the token ids
        embedding.register_forward_pre_hook(self._identify, prepend=True)

    def start_step(self, seed: int) -> None:
        self._seed = seed & _MASK

    @torch.no_grad()
    def _identify(self, embedding: Embedding, args: tuple[Activations]) -> None:
        """Compute a key and a scale for each token of a micro-batch."""
        if embedding.training:
            input_ids, position_ids, segment_ids = args[0]
            self._keys, lengths = identify_tokens(input_ids, position_ids, segment_ids, self._seed, self._sequence_part)
            self._scales = self._alpha / (lengths * embedding.embedding_dim).sqrt()

    def add(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with noise. embeddings: [B, T, D] of the micro-batch that was last identified."""
        noise = [
            compute_uniform(keys, embeddings.shape[-1]).mul_(scales.unsqueeze(-1)).to(embeddings.dtype)
            for keys, scales in zip(self._keys, self._scales, strict=True)
        ]
        return embeddings + torch.stack(noise)


def identify_tokens(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    segment_ids: torch.Tensor,
    seed: int,
    sequence_part: ContextParallel = NO_CP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a key for each token, int64 [B, T], from its document's tokens and its position there; and the number of
    tokens of its document, fp32 [B, T]; infinite for padding.

    sequence_part: `input_ids` and the results have the tokens of this part of the rows; a document may continue in
    other parts.
    """
    all_documents = segment_ids.long()
    documents, places = sequence_part.take(all_documents), _mix(sequence_part.take(position_ids) * _STEP)
    room = all_documents.new_zeros(len(all_documents), all_documents.shape[1] + 1)  # for as many documents as tokens
    sums = sum_parts(room.scatter_add(1, documents, _mix(input_ids ^ places)), sequence_part).gather(1, documents)
    sizes = room.scatter_add(1, all_documents, torch.ones_like(all_documents))
    lengths = sizes.gather(1, documents).float()
    keys = _mix(_mix((sums & _MASK) ^ seed) ^ places)
    return keys, lengths.masked_fill(documents == 0, math.inf)


def compute_uniform(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Return numbers from [-1, 1), fp32 [T, width], for keys [T]."""
    channels = torch.arange(1, width + 1, device=keys.device) * _STEP
    return _mix(keys.unsqueeze(-1) + channels).float() / 2**31 - 1


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Apply a bijection of 32-bit numbers in which every bit depends on all (C. Wellons' lowbias32)."""
    numbers = numbers & _MASK
    numbers = ((numbers ^ (numbers >> 16)) * 0x7FEB352D) & _MASK
    numbers = ((numbers ^ (numbers >> 15)) * 0x846CA68B) & _MASK
    return numbers ^ (numbers >> 16)
