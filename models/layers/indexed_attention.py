"""Attention to the keys that an indexer selects: of those that a query sees, the `index_topk` with the highest scores
(DeepSeek-V3.2, 2512.02556).

The selection is that of `transformers`' indexer. Its own code makes scores [B, T, I, T] in fp32 (5.24), 69 GB a layer
at 16,384 tokens; here they are made for a chunk of queries at a time, and only of queries that see more keys than are
selected. Where no query of a micro-batch does, attention is dense. The indexer is frozen: the loss of tokens has no
gradient in a choice, and the loss that trains an indexer is not here.

B micro-batch, T sequence, H query heads, E head size, I heads of the indexer, K selected keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    eager_attention_forward,
)

from models.layers import grouped_queries
from models.layers.context import Activations, MicroBatchContext
from models.layers.layer import leave_untrained
from models.layers.packed_attention import VARLEN
from models.layers.selection_cost import Selecting, SelectionCost, mark_selection

KERNELS = ("sdpa", VARLEN, "eager")  # that families of this attention can use; varlen where it is dense
OBSTACLE = "its indexer selects the keys that a query attends to, and ranks do not share what it selects"
_NUM_SCORES = 2**26  # that exist at a time: 256 MiB in fp32
_NUM_QUERIES = 1024  # that attend at a time: each chunk's mask is [B, 1, 1024, T], and each adds gradients [B, H, T, E]
Angles = tuple[torch.Tensor, torch.Tensor]


class IndexedRows(NamedTuple):
    """The rows of a micro-batch in which a query may see more keys than are selected.

    numbers: int64 [B, T], the document of each token; None where each row is one.
    """

    numbers: torch.Tensor | None

    def find_visible(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return bool [B or 1, stop - start, stop]: the keys that queries `start` to `stop` - 1 of the rows see."""
        places = torch.arange(stop, device=device)
        visible = places <= places[start:, None]
        if self.numbers is None:
            return visible.unsqueeze(0)
        return visible & (self.numbers[:, start:stop, None] == self.numbers[:, None, :stop])


class IndexedContext(MicroBatchContext):
    """Gives layers `indexed_rows` in place of a mask where a document may be longer than the number of selected
    keys."""

    def derive_by_type(self, inputs: Activations, attention_type: str) -> dict[str, Any]:
        length = inputs[1].shape[1]
        longest = length if self.bounds is None else min(self.bounds.longest, length)
        if longest <= self.config.index_topk:
            return super().derive_by_type(inputs, attention_type)
        return {"attention_mask": None, "indexed_rows": IndexedRows(self._numbers)}


class IndexedAttention(Selecting, DeepseekV32Attention):
    """The attention of DeepSeek-V3.2, and of families with the same parts.

    rotate_index: the rotary embedding of the indexer, a function of `transformers` that takes queries, keys, cosines
    and sines.
    """

    rotate_index: ClassVar[Callable[..., tuple[torch.Tensor, torch.Tensor]]] = staticmethod(apply_rotary_pos_emb)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        leave_untrained(self.indexer)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        attention_mask: torch.Tensor | None = None,
        indexed_rows: IndexedRows | None = None,
        prev_topk_indices: torch.Tensor | None = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        """Return the outputs [B, T, D] of hidden states [B, T, D], None, and the selection that `select` describes, as
        the attention of GLM-5 does. indexed_rows: None for dense attention, which selects nothing. prev_topk_indices:
        the selection of an earlier layer, for one without an indexer."""
        compressed = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(compressed).unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)  # [B, H, T, E]
        unrotated, rotated = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_proj_with_mqa(hidden_states)
        latent, shared = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        rotated, shared = apply_rotary_pos_emb_interleave(rotated, shared.unsqueeze(1), *position_embeddings)
        query = torch.cat([unrotated, rotated], dim=-1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent))
        heads = heads.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim)).transpose(1, 2)
        key, value = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat([key, shared.expand(-1, key.shape[1], -1, -1)], dim=-1)
        options = {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        selection = None
        if indexed_rows is None:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            output, _ = attend(self, query, key, value, attention_mask, **options, **given)
        else:
            selection = prev_topk_indices
            if self.indexer is not None:
                selection = self.select(hidden_states, compressed, position_embeddings, indexed_rows)
            assert selection is not None
            output = self._attend_selected(query, key, value, selection, indexed_rows, options)
        return self.o_proj(output.flatten(2)), None, selection

    @torch.compiler.disable  # a graph would have the operators of every chunk
    @torch.no_grad()
    @mark_selection()
    def select(
        self, hidden_states: torch.Tensor, compressed: torch.Tensor, angles: Angles, rows: IndexedRows
    ) -> torch.Tensor:
        """Return the selected keys of the queries that may see more than K keys: int32 [B, T - K, K], places in the
        row. Of a query that sees fewer, the rest are keys that it does not see.

        compressed: the normalized low-rank queries of attention, [B, T, q_lora_rank].
        """
        indexer, (num_rows, length, _) = self.indexer, hidden_states.shape
        keys = self._rotate(indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2), angles)
        keys = keys.squeeze(2).float().transpose(1, 2)  # [B, E, T]
        selected, chunks = [], list(self._cut_scores(num_rows, length))
        if hidden_states.is_meta:  # a plan counts the others by `count_selection`: of long rows they are thousands
            chunks = [max(chunks, key=_count_pairs)]
            others = length - indexer.index_topk - (chunks[0][1] - chunks[0][0])
            selected.append(hidden_states.new_empty(num_rows, others, indexer.index_topk, dtype=torch.int32))
        for start, stop in chunks:
            part = slice(start, stop)
            cosines, sines = angles[0][:, part], angles[1][:, part]
            totals = self._score(hidden_states[:, part], compressed[:, part], (cosines, sines), keys[..., :stop])
            totals.masked_fill_(~rows.find_visible(start, stop, totals.device), -torch.inf)
            selected.append(totals.topk(indexer.index_topk, dim=-1, sorted=False).indices.int())
        return torch.cat(selected, dim=1)

    def _score(
        self, hidden_states: torch.Tensor, compressed: torch.Tensor, angles: Angles, keys: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores [B, chunk, S] of a chunk of queries in fp32: those of all heads are there while this runs.

        keys: of the indexer, in fp32, [B, E, S].
        """
        indexer = self.indexer
        queries = indexer.wq_b(compressed).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        queries = self._rotate(queries, angles).float()
        scores = torch.bmm(queries.flatten(1, 2), keys).relu_()  # [B, chunk x I, S]
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
        weights = weights * (indexer.n_heads * indexer.head_dim) ** -0.5
        scores = scores.view(-1, indexer.n_heads, keys.shape[-1])
        totals = torch.bmm(weights.view(-1, 1, indexer.n_heads), scores)
        return totals.view(*hidden_states.shape[:2], -1)

    def _cut_scores(self, num_rows: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of each chunk of queries that are scored together."""
        size = max(1, _NUM_SCORES // (num_rows * self.indexer.n_heads * length))
        return _cut(self.indexer.index_topk, length, size)

    def count_selection(self, num_rows: int, length: int, itemsize: int) -> SelectionCost | None:
        num_late = length - self.config.index_topk
        if num_late <= 0:
            return None
        attending = _cut(self.config.index_topk, length, _NUM_QUERIES)
        masks = num_rows * itemsize * sum((stop - start) * stop for start, stop in attending)
        indexer = self.indexer
        if indexer is None:
            return SelectionCost(mask_bytes=masks)
        width = indexer.n_heads * indexer.head_dim
        chunks = list(self._cut_scores(num_rows, length))
        pairs = sum(map(_count_pairs, chunks))
        start, stop = max(chunks, key=_count_pairs)
        size, others = stop - start, num_late - (stop - start)
        late = indexer.wq_b.weight.numel() + indexer.weights_proj.weight.numel()
        # Of a chunk, in fp32: scores of all heads, their sums, and queries; which keys are visible. Keys of all tokens
        scores = 4 * size * (indexer.n_heads * stop + stop + width) + size * stop
        # Scores of all heads are written, cut off at 0 in place, and read; sums and queries go through more operators
        moved = 4 * ((4 * indexer.n_heads + 6) * (pairs - size * stop) + 10 * width * others)
        return SelectionCost(
            score_flops=2 * num_rows * (width + indexer.n_heads) * pairs,
            projection_flops=2 * num_rows * (length * indexer.wk.weight.numel() + num_late * late),
            score_bytes=num_rows * (scores + 4 * length * indexer.head_dim),
            selected_bytes=num_rows * torch.int32.itemsize * num_late * indexer.index_topk,
            mask_bytes=masks,
            num_chunks=len(chunks),
            moved_bytes=num_rows * moved,
        )

    def _rotate(self, states: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return the indexer's queries or keys, [B, T, heads, head size], with their first part rotated."""
        rotated, rest = states.tensor_split([self.qk_rope_head_dim], dim=-1)
        rotated, _ = self.rotate_index(rotated, rotated[:, :, :1], *angles, unsqueeze_dim=2)
        return torch.cat([rotated, rest], dim=-1)

    @torch.compiler.disable
    def _attend_selected(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        selection: torch.Tensor,
        rows: IndexedRows,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Return [B, T, H, E]: the first K queries of each row attend to all keys that they see, the others to those
        of the selection."""
        length, num_selected = query.shape[2], self.config.index_topk
        is_eager = self.config._attn_implementation == "eager"
        outputs = []
        for start, stop in [(0, num_selected), *_cut(num_selected, length, _NUM_QUERIES)]:
            visible = rows.find_visible(start, stop, query.device)
            if start:
                chosen = selection[:, start - num_selected : stop - num_selected].long()  # also keys after `stop`
                is_chosen = visible.new_zeros(*chosen.shape[:2], length).scatter_(-1, chosen, True)
                visible = visible & is_chosen[..., :stop]
            mask = visible.unsqueeze(1)
            parts = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])
            if is_eager:
                output, _ = eager_attention_forward(self, *parts, _to_addend(mask, query.dtype), **options)
            else:  # without a mask attention is causal, for which there are faster kernels
                is_causal = start == 0 and rows.numbers is None
                output, _ = grouped_queries.attend(self, *parts, None if is_causal else mask, **options)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def _to_addend(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what eager attention adds to scores: 0 for visible keys, else the least number."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first place of each chunk of `size`, and the one after its last."""
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


def _count_pairs(chunk: tuple[int, int]) -> int:
    """Return the products of a query and a key in a chunk of queries."""
    start, stop = chunk
    return (stop - start) * stop
