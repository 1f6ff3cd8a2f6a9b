"""Vectors of texts, and the loss of queries that have to find their own document among those of a whole batch (InfoNCE,
1807.03748): with cosines s of a query and the documents, t the temperature and m the margin (1902.08564),

    -log softmax((s - m [own]) / t) of its own document

D sizes at once (2205.13147) make it the mean over the first d dimensions of the vectors, and over all of them.

N texts of a micro-batch, B rows, T tokens, D hidden, Q queries, K documents of each, its own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from batch import Targets
from extensions.retrieval.keys import Pooling
from models.layers.documents import DocumentBounds, locate_tokens

SHOWN = (("recall_at_1", "recall@1 {:.1%}"), ("mrr", "mrr {:.4f}"))


def pool_texts(outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets, pooling: Pooling) -> torch.Tensor:
    """Return the vectors of the texts, [N, D], fp32 at least.

    outputs: hidden states [B, T, D], and the text of each token in its row, int32 [B, T], from 1, 0 for padding.
    targets: as in `score_documents`.
    """
    hidden_states, segment_ids = outputs
    indices, tokens = targets.indices, hidden_states.flatten(0, 1)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    if pooling is Pooling.last:
        return tokens.index_select(0, indices).to(dtype)
    where = locate_tokens(segment_ids, DocumentBounds(max(1, len(indices)), segment_ids.shape[1]))
    texts = tokens.to(dtype).masked_fill(~where.is_real.unsqueeze(1), 0)
    sums = texts.new_zeros(len(where.lengths), texts.shape[1]).index_add(0, where.documents, texts)
    return (sums / where.lengths.unsqueeze(1))[: len(indices)]


@dataclass(frozen=True)
class Contrast:
    """How queries are compared with documents. sizes: of the vectors' beginnings that are vectors too, ascending and
    less than D; empty for none."""

    temperature: float
    margin: float = 0.0
    sizes: tuple[int, ...] = ()

    def compare(
        self, queries: torch.Tensor, documents: torch.Tensor, own: torch.Tensor, left_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of some queries, [Q], and for all dimensions and each of `sizes` the rank of their own
        document, from 1, float64 [1 + sizes, Q]: documents that are as near count against it; NaN where a cosine is.

        queries: [Q, D]. documents: all of them, [P, D]. own: the number of each query's own one, int64 [Q]. left_out:
        bool [Q, P], the documents that a query is not compared with.
        """
        losses, ranks = [], []
        for size in (queries.shape[1], *self.sizes):
            cosines = F.normalize(queries[:, :size]) @ F.normalize(documents[:, :size]).T  # [Q, P]
            reached = cosines.gather(1, own[:, None])
            # NaN is as near as nothing: without this it would have the best rank
            is_known = cosines.isfinite().all(dim=1)
            is_near = (cosines >= reached).masked_fill_(left_out, False)
            ranks.append(is_near.sum(dim=1).double().where(is_known, torch.nan))
            lowered = cosines.scatter_add(1, own[:, None], torch.full_like(reached, -self.margin))
            logits = (lowered / self.temperature).masked_fill_(left_out, -torch.inf)
            losses.append(F.cross_entropy(logits, own, reduction="none"))
        return torch.stack(losses).mean(dim=0), torch.stack(ranks).detach()


def summarize_ranks(losses: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Return sums over the queries: of the losses, of those whose own document is the nearest and of reciprocal ranks,
    and for each further size of those whose document is the nearest; float64 [3 + sizes]. losses: [Q]. ranks: as
    `Contrast.compare` returns them."""
    is_nearest = (ranks == 1).double().where(ranks.isfinite(), torch.nan).sum(dim=1)
    return torch.cat([losses.detach().double().sum()[None], is_nearest[:1], (1 / ranks[:1]).sum(dim=1), is_nearest[1:]])


def name_sums(sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of what `summarize_ranks` sums."""
    return ("loss", "recall_at_1", "mrr", *(f"recall_at_1_dim{size}" for size in sizes))
