"""Causal attention in blocks of queries and keys: the contribution of one block to outputs and gradients, by the
log-sum-exp of the scores (2205.14135).

A block is a run of consecutive queries and one of keys, each with its places in the row. torch's fused kernels compute
it in one call, whatever the number of documents in it (`block_kernels.py`), unless a window prevents that. Otherwise it
is matrix products: scores are made for a bounded number of queries at a time, and only with keys that some of them see.
Sums are fp32, or fp64 for fp64 tensors. Where documents begin is computed on the device, once per micro-batch: nothing
here waits for it.

B micro-batch, H query heads, G heads of keys and values, R = H / G, E head size; L tokens of a rank, l and m queries
and keys of a sub-block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn import functional as F

from models.parallel.block_kernels import Attended, BlockDocuments, find_kernel

MOST_SCORES = 2**26  # made at a time: 256 MiB in fp32


class Block(NamedTuple):
    """queries, keys: their indices among a rank's L tokens, and among the keys. first_query, first_key: the places in
    the row of the first of them."""

    queries: slice
    keys: slice
    first_query: int
    first_key: int

    @property
    def is_diagonal(self) -> bool:
        """Whether queries and keys are the same tokens; else all keys come before the queries."""
        return self.first_query == self.first_key

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass(frozen=True)
class SequenceMask:
    """Which tokens before it, and itself, a token sees.

    documents: int64 [B, T], of whole rows, counted from 1 over all rows: a token sees its own document; None for all
    tokens. window: the number of nearest tokens that it sees; None for all. most: an upper bound of the number of
    documents, longest: of the tokens of one; both are needed with documents.
    """

    documents: torch.Tensor | None
    window: int | None
    most: int = 0
    longest: int = 0
    _located: dict[tuple[int, int], BlockDocuments] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert self.documents is None or (self.most and self.longest)

    def can_see(self, block: Block) -> bool:
        """Return whether a document may be long enough to have keys and queries of the block."""
        between = block.first_query - (block.first_key + block.num_keys)  # the last key and first query are two more
        return self.documents is None or block.is_diagonal or self.longest >= between + 2

    def locate(self, block: Block) -> BlockDocuments | None:
        """Return the documents of a whole block between two chunks, computed on their device when first asked for; None
        where each row is one document."""
        if self.documents is None:
            return None
        place = block.first_query, block.first_key
        if place not in self._located:
            queries = self.documents[:, block.first_query : block.first_query + block.num_queries]
            keys = self.documents[:, block.first_key : block.first_key + block.num_keys]
            found = self._locate_diagonal(queries) if block.is_diagonal else _locate_shared(queries, keys)
            self._located[place] = found
        return self._located[place]

    def _locate_diagonal(self, documents: torch.Tensor) -> BlockDocuments:
        """documents: of the block's tokens, [B, l]. Those that have no token in it are empty."""
        numbers = torch.arange(1, self.most + 2, device=documents.device)
        offsets = torch.searchsorted(documents.flatten(), numbers, out_int32=True)
        return BlockDocuments(offsets, offsets, min(self.longest, documents.shape[1]), self.window)


def _locate_shared(queries: torch.Tensor, keys: torch.Tensor) -> BlockDocuments:
    """Return the documents of a block whose keys [B, m] all come before its queries [B, l]. At most one document of a
    row is in both: the last keys and the first queries. So there are three of each row: earlier keys without queries,
    what is in both, later queries without keys."""
    sees_keys, has_queries = queries == keys[:, -1:], keys == queries[:, :1]
    seeing, seen = sees_keys.sum(1), has_queries.sum(1)
    num_queries, num_keys = torch.full_like(seeing, queries.shape[1]), torch.full_like(seen, keys.shape[1])
    query_stops = torch.stack([torch.zeros_like(seeing), seeing, num_queries], dim=1)
    key_stops = torch.stack([num_keys - seen, num_keys, num_keys], dim=1)
    rows = torch.arange(len(queries), device=queries.device).unsqueeze(1)
    query_offsets, key_offsets = (
        F.pad((stops + rows * width).flatten(), (1, 0)).to(torch.int32)
        for stops, width in ((query_stops, queries.shape[1]), (key_stops, keys.shape[1]))
    )
    return BlockDocuments(
        query_offsets,
        key_offsets,
        max(queries.shape[1], keys.shape[1]),
        keyless=~sees_keys[:, None, :, None],
        unseen=~has_queries[:, None, :, None],
    )


def split_queries(block: Block, window: int | None, most_queries: int) -> Iterator[Block]:
    """Yield the block in parts of at most `most_queries`, each with the keys that some of its queries see; parts that
    see none are omitted."""
    keys = range(block.first_key, block.first_key + block.num_keys)
    for start in range(block.queries.start, block.queries.stop, most_queries):
        stop = min(start + most_queries, block.queries.stop)
        first_query = block.first_query + start - block.queries.start
        first = keys.start if window is None else max(keys.start, first_query - window + 1)
        last = min(keys.stop, first_query + stop - start)
        if first < last:
            offset = block.keys.start - keys.start
            yield Block(slice(start, stop), slice(first + offset, last + offset), first_query, first)


class BackwardPass(NamedTuple):
    """State of a backward pass for a rank's queries. output [B, H, L, E] and log_sums [B, H, L]: over all keys.
    row_products [B, H, L]: sum(output x its gradient) of each query. query_gradient [B, H, L, E]: the sum over the
    blocks so far."""

    output: torch.Tensor
    log_sums: torch.Tensor
    output_gradient: torch.Tensor
    row_products: torch.Tensor
    query_gradient: torch.Tensor


class BlockAttention:
    """Attention of a rank's queries over keys and values that arrive block by block."""

    def __init__(self, query: torch.Tensor, groups: int, scale: float, mask: SequenceMask, uses_kernels: bool) -> None:
        """query [B, H, L, E]; groups: G."""
        self._query, self._groups, self._scale, self._mask = query, groups, scale, mask
        self._sums = torch.promote_types(query.dtype, torch.float32)
        self._kernel = find_kernel(query) if uses_kernels else None

    def _fits_kernel(self, block: Block) -> bool:
        """Return whether the queries see all keys of their documents, or each those up to its own."""
        if self._kernel is None or self._mask.window is None:
            return self._kernel is not None
        farthest = block.first_query + block.num_queries - 1 - block.first_key
        return farthest < self._mask.window or (block.is_diagonal and self._mask.documents is not None)

    def _cut(self, block: Block) -> Iterator[Block]:
        batch, heads = self._query.shape[:2]
        return split_queries(block, self._mask.window, max(1, MOST_SCORES // (batch * heads * block.num_keys)))

    def start_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [B, H, L, E] and log-sum-exp [B, H, L] over no keys yet."""
        batch, heads, length, size = self._query.shape
        # In the layout that the projection after attention takes, which then keeps the same memory
        output = self._query.new_zeros(batch, length, heads, size, dtype=self._sums).transpose(1, 2)
        return output, torch.full(output.shape[:-1], -torch.inf, dtype=self._sums, device=output.device)

    def attend(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: list[Block],
        output: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> None:
        """Merge the blocks of key and value [B, G, L, E] into the output and log-sum-exp of the others, in place."""
        for block in filter(self._mask.can_see, blocks):
            if self._fits_kernel(block):
                _merge(block, *self._attend_fused(key, value, block), output, log_sums)
                continue
            for part in self._cut(block):
                _merge(part, *self._attend_part(key, value, part), output, log_sums)

    def _attend_fused(self, key: torch.Tensor, value: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [B, H, l, E] and log-sum-exp [B, H, l] of the block's keys alone."""
        assert self._kernel is not None
        query, keys = self._query[:, :, block.queries], block.keys
        documents = self._mask.locate(block)
        return self._kernel.attend(query, key[:, :, keys], value[:, :, keys], block.is_diagonal, self._scale, documents)

    def _attend_part(self, key: torch.Tensor, value: torch.Tensor, part: Block) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._score(key, part)  # [B, G, R l, m]
        # Where no key is visible all scores are -inf, and so is their log-sum-exp
        largest = _finite(scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        sums = weights.sum(dim=-1, keepdim=True)
        attended = self._multiply(weights, value[:, :, part.keys]) / sums.clamp(min=torch.finfo(sums.dtype).tiny)
        return self._ungroup(attended), self._ungroup(sums.log() + largest).squeeze(-1)

    def start_backward(self, attended: Attended, output_gradient: torch.Tensor) -> BackwardPass:
        """Return the state of a backward pass. attended: over all keys, the output in the training dtype.
        output_gradient [B, H, L, E]."""
        products = (attended[0].to(self._sums) * output_gradient).sum(-1)
        query_gradient = torch.zeros_like(self._query, dtype=self._sums)
        return BackwardPass(*attended, output_gradient.contiguous(), products, query_gradient)

    def differentiate(
        self, key: torch.Tensor, value: torch.Tensor, blocks: list[Block], through: BackwardPass
    ) -> torch.Tensor:
        """Return the gradients of key and value, [2, B, G, L, E]; the queries' gradient is added to in place."""
        gradients = torch.zeros(2, *key.shape, dtype=self._sums, device=key.device)
        for block in filter(self._mask.can_see, blocks):
            if self._fits_kernel(block):
                self._differentiate_fused(key, value, block, through, gradients)
                continue
            for part in self._cut(block):
                self._differentiate_part(key, value, part, through, gradients)
        return gradients

    def _differentiate_fused(
        self, key: torch.Tensor, value: torch.Tensor, block: Block, through: BackwardPass, gradients: torch.Tensor
    ) -> None:
        assert self._kernel is not None
        queries, keys = block.queries, block.keys
        grad_query, grad_key, grad_value = self._kernel.differentiate(
            through.output_gradient[:, :, queries],
            self._query[:, :, queries],
            key[:, :, keys],
            value[:, :, keys],
            (through.output[:, :, queries], through.log_sums[:, :, queries].contiguous()),
            block.is_diagonal,
            self._scale,
            self._mask.locate(block),
        )
        through.query_gradient[:, :, queries] += grad_query
        gradients[0][:, :, keys] += grad_key
        gradients[1][:, :, keys] += grad_value

    def _differentiate_part(
        self, key: torch.Tensor, value: torch.Tensor, part: Block, through: BackwardPass, gradients: torch.Tensor
    ) -> None:
        queries, keys = part.queries, part.keys
        per_query = through.log_sums, through.row_products
        sums, products = (self._group(each[:, :, queries].unsqueeze(-1)) for each in per_query)
        probabilities = self._score(key, part).sub_(sums).exp_()  # [B, G, R l, m]
        grad_output = self._group(through.output_gradient[:, :, queries])
        gradients[1][:, :, keys] += self._multiply(probabilities.mT, grad_output)
        grad_scores = self._multiply(grad_output, value[:, :, keys].mT).sub_(products).mul_(probabilities)
        grad_scores.mul_(self._scale)
        through.query_gradient[:, :, queries] += self._ungroup(self._multiply(grad_scores, key[:, :, keys]))
        gradients[0][:, :, keys] += self._multiply(grad_scores.mT, self._group(self._query[:, :, queries]))

    def _score(self, key: torch.Tensor, part: Block) -> torch.Tensor:
        """Return the scores [B, G, R l, m], -inf for tokens that are not seen."""
        query = self._group(self._query[:, :, part.queries])
        scores = self._multiply(query, key[:, :, part.keys].mT).mul_(self._scale)
        hidden = self._find_hidden(part)
        if hidden is not None:
            length = part.num_queries
            scores.unflatten(2, (-1, length)).masked_fill_(hidden, -torch.inf)
        return scores

    def _find_hidden(self, part: Block) -> torch.Tensor | None:
        """Return the mask of tokens that the queries do not see: bool, broadcastable to [B, G, R, l, m]; None where
        they see all."""
        device, documents, window = self._query.device, self._mask.documents, self._mask.window
        last_query = part.first_query + part.num_queries - 1
        last_key = part.first_key + part.num_keys - 1
        queries = torch.arange(part.first_query, last_query + 1, device=device).unsqueeze(1)
        keys = torch.arange(part.first_key, last_key + 1, device=device)
        found = []
        if last_key > part.first_query:
            found.append(keys > queries)
        if window is not None and last_query - part.first_key >= window:
            found.append(queries - keys >= window)
        if documents is not None:
            query_documents = documents[:, part.first_query : last_query + 1, None]
            key_documents = documents[:, None, part.first_key : last_key + 1]
            found.append((query_documents != key_documents)[:, None, None])
        hidden = None
        for each in found:
            hidden = each if hidden is None else hidden | each
        return hidden

    def _group(self, heads: torch.Tensor) -> torch.Tensor:
        """Reshape [B, H, l, ...] to [B, G, R l, ...]: heads that have the same keys, one after the other."""
        return heads.unflatten(1, (self._groups, -1)).flatten(2, 3)

    def _ungroup(self, groups: torch.Tensor) -> torch.Tensor:
        num_heads = self._query.shape[1]
        return groups.unflatten(2, (num_heads // self._groups, -1)).flatten(1, 2)

    def _multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return matrix products [B, G, ., .] with sums that are not rounded to the training dtype. A GPU multiplies in
        that dtype, as its attention kernels do; a CPU in fp32."""
        dtype = self._query.dtype
        if dtype != self._sums and left.is_cuda:
            left, right = (factor.to(dtype) for factor in (left, right))
            products = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), self._sums)
            return products.unflatten(0, left.shape[:2])
        return left.to(self._sums) @ right.to(self._sums)


def _merge(
    block: Block, added: torch.Tensor, added_sums: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor
) -> None:
    """Merge outputs and log-sum-exp of the block's keys into those of the keys so far."""
    before = log_sums[:, :, block.queries]
    # What the block's keys are of the sum of all; of a query without a key in either the outputs stay zeros
    share = (added_sums - before).sigmoid_().nan_to_num_()
    output[:, :, block.queries].lerp_(added.to(output.dtype), share.unsqueeze(-1))
    torch.logaddexp(before, added_sums, out=before)


def _finite(log_sums: torch.Tensor) -> torch.Tensor:
    return log_sums.clamp(min=torch.finfo(log_sums.dtype).min)
