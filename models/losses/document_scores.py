"""Scores of documents, from hidden states and a head's matrix: the part that losses over documents share.

N documents of a micro-batch, B rows, T tokens, D hidden, C labels.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from batch import Targets
from models.parallel.shard import NO_CP, ContextParallel, sum_parts


def score_documents(
    outputs: tuple[torch.Tensor, torch.Tensor],
    targets: Targets,
    sequence_part: ContextParallel = NO_CP,
) -> torch.Tensor:
    """Return the scores of the documents, [N, C], fp32 at least: rounded to bf16, rewards of 10 would differ by steps
    of 0.06.

    outputs: hidden states [B, T, D] and the head's matrix [C, D]. targets: the number of each document at its last
    token, with the column `labels`, [N, K]. sequence_part: the part of each row that this rank holds; the scores are
    those of all documents, on each rank of the group.
    """
    hidden_states, weight = outputs
    indices = targets.indices
    dtype = torch.promote_types(weight.dtype, torch.float32)
    chosen = hidden_states.flatten(0, 1).index_select(0, indices)
    scores = F.linear(chosen.to(dtype), weight.to(dtype))
    if sequence_part.size == 1:  # the documents in their order
        return scores
    placed = scores.new_zeros(len(targets.columns["labels"]), len(weight))
    placed = placed.index_copy(0, targets.ids.flatten().index_select(0, indices), scores)
    return sum_parts(placed, sequence_part)
