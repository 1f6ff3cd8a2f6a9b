"""The inputs of a stage's layers other than hidden states, derived once per micro-batch from the integers that cross a
boundary.

B micro-batch, T sequence, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from models.layers.documents import (
    DocumentBounds,
    Documents,
    TokenDocuments,
    bound_chunks,
    bound_documents,
    build_packed_mask,
    locate_documents,
    locate_rows,
    locate_tokens,
    measure_documents,
    number_chunks,
    number_documents,
)
from models.layers.packed_attention import FLASH, VARLEN
from models.layers.recurrent import DocumentBatches, batch_documents
from models.layers.rope_scaling import depends_on_length, find_length_limit
from models.parallel.blocks import SequenceMask
from models.parallel.shard import NO_CP, ContextParallel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# hidden_states [B, T, D]; position_ids int64 [B, T], from 0 in each document; segment_ids int32 [B, T], 0 for padding,
# the documents of a row from 1. The first layer gets input_ids int64 [B, T] instead of hidden_states.
# With context parallelism hidden_states and input_ids are of the rank's part of the sequence, the integers whole. With
# sequence parallelism hidden_states are of a part of that between the blocks of layers.
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class MicroBatchContext:
    """Attention masks, documents and rotary angles of the micro-batch that a stage is working on.

    All layers of a stage share one object, and none of them derives these for itself: everything that follows from the
    integers of a micro-batch is derived here, once, when a layer needs it. A family that differs overrides
    `derive_shared` or `build_mask`.

    Not an `nn.Module` on purpose: the engine casts modules to the training dtype, and inverse frequencies rounded to
    bf16 turn long positions into noise.
    """

    def __init__(self, config: PretrainedConfig, rotary: nn.Module | None = None) -> None:
        """rotary: the family's rotary embedding, or None for a family without."""
        self.config = config
        self.rotary = rotary
        self.sequence_part: ContextParallel = NO_CP
        # Of the next micro-batches; None where the host does not know, and has to ask the device for each
        self.bounds: DocumentBounds | None = None
        self.locates_tokens = False  # set where something asks for `tokens`
        self._batches_documents = False  # set where something asks for `batches`
        # Of the current micro-batch. Without batches each of its rows is one document
        self.tokens: TokenDocuments | None = None
        self.batches: DocumentBatches | None = None
        self._position_ids: torch.Tensor | None = None
        self._segment_ids: torch.Tensor | None = None
        self._own_positions: torch.Tensor | None = None
        self._shared: dict[str, Any] = {}
        self._by_type: dict[str, dict[str, Any]] = {}
        self._numbers: torch.Tensor | None = None

    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, inputs: Activations, attention_type: str, layer_idx: int) -> dict[str, Any]:
        """Return the keyword arguments for the `forward` of a layer. attention_type: "full_attention",
        "sliding_attention", ...

        The engine gives each micro-batch its own `position_ids` tensor and the layers pass it on unchanged, so its
        identity (kept alive here) identifies the micro-batch. A checkpointed layer that is recomputed later misses and
        computes again. Selective checkpointing records a layer operator by operator and must find the same ones again,
        so the computation here is hidden from it.
        """
        inputs = inputs[:3]  # tokens may follow
        position_ids = inputs[1]
        with _disable_current_modes():
            if position_ids is not self._position_ids:
                self._position_ids, self._segment_ids = position_ids, inputs[2]
                self._numbers = number_documents(position_ids, self.bounds)
                own = self._take_part(inputs)
                self.tokens = self._locate_tokens(inputs[2]) if self.locates_tokens else None
                self.batches = self._batch_documents()
                self._own_positions = own[1]
                self._shared, self._by_type = self.derive_shared(_describe_all(own)), {}
            return self.give(inputs, attention_type, layer_idx)

    def give(self, inputs: Activations, attention_type: str, layer_idx: int) -> dict[str, Any]:
        """Return the result of `__call__`, from the tensors that have been derived."""
        if attention_type not in self._by_type:
            self._by_type[attention_type] = self.derive_by_type(_describe_all(inputs), attention_type)
        return {"position_ids": self._own_positions, **self._by_type[attention_type], **self._shared}

    def _take_part(self, inputs: Activations) -> Activations:
        """Return the inputs with the integers of the rank's part of the sequence."""
        return inputs[0], self.sequence_part.take(inputs[1]), self.sequence_part.take(inputs[2])

    def _locate_tokens(self, segment_ids: torch.Tensor) -> TokenDocuments:
        """Return the documents of the tokens in the rank's part; documents may continue in other parts."""
        tokens = locate_tokens(segment_ids, self.bounds)
        documents, is_real = (
            self.sequence_part.take(each.view_as(segment_ids)).flatten() for each in (tokens.documents, tokens.is_real)
        )
        return TokenDocuments(documents, is_real, tokens.lengths)

    def request_batches(self) -> None:
        """Compute `batches` from now on, for the current micro-batch too."""
        self._batches_documents, self._position_ids = True, None

    def derive_shared(self, inputs: Activations) -> dict[str, Any]:
        """Return the keyword arguments that are the same for all layers. inputs: the rank's part of the sequence."""
        if self.rotary is None:
            return {}
        hidden_states, position_ids, _ = inputs
        return {"position_embeddings": self._compute_angles(self.rotary, hidden_states, position_ids)}

    def _compute_angles(self, rotary: nn.Module, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Return the rotary embedding's output for the part's positions, usually two tensors [B, T, head_dim].

        Where they depend on the length of a document, each document has the angles that it has alone, and nothing is
        kept: `dynamic_rope_update` of `transformers` (5.23) takes the longest row, padding included, and continues with
        the frequencies of the longest batch so far.
        """
        rotary.to(hidden_states.device)
        if not depends_on_length(self.config):
            return rotary(hidden_states, position_ids=position_ids)
        assert self._position_ids is not None and self._segment_ids is not None
        lengths = measure_documents(self._position_ids, self._segment_ids)
        limit, is_stepwise = find_length_limit(self.config)
        positions = self._position_ids
        angles = _list_tensors(_compute_for_length(rotary, hidden_states, positions.clamp(max=limit - 1), limit))
        if is_stepwise:  # other frequencies beyond the limit, the same for all lengths
            longer = [(lengths > limit, positions, limit + 1)]
        else:  # the host waits for the device here: each length has frequencies of its own
            longer = [
                (lengths == length, positions.clamp(max=length - 1), length)
                for length in lengths[lengths > limit].unique().tolist()
            ]
        for chosen, clamped, length in longer:
            others = _list_tensors(_compute_for_length(rotary, hidden_states, clamped, length))
            angles = [torch.where(chosen[..., None], new, old) for new, old in zip(others, angles, strict=True)]
        parts = tuple(map(self.sequence_part.take, angles))
        return parts if len(parts) > 1 else parts[0]

    def build_mask(self, inputs: Activations, attention_type: str) -> torch.Tensor | BlockMask | None:
        """Return the mask of one type of attention, in the form that the attention implementation takes.

        Documents of a packed row are kept apart by positions that restart. Padding needs no mask: it comes after the
        tokens, and its positions continue those of the last document, so a batch without packed rows has no mask at
        all.
        """
        hidden_states, position_ids, _ = inputs
        numbers, _ = self._number_documents(position_ids, attention_type)
        window = self._find_window(attention_type)
        if numbers is not None:
            return build_packed_mask(self.config, hidden_states, numbers, window)
        make_mask = create_causal_mask if window is None else create_sliding_window_causal_mask
        # Without a cache, whose name differs (`past_key_values`, from 5.24 `cache`), and without positions:
        # `transformers` would wait for the device to see whether they restart
        return make_mask(self.config, hidden_states, None, None)

    def find_documents(self, inputs: Activations, attention_type: str) -> Documents | None:
        """Return the documents that attention without a mask must keep apart; None for whole rows
        under a causal mask."""
        position_ids, window = inputs[1], self._find_window(attention_type)
        numbers, bounds = self._number_documents(position_ids, attention_type)
        if numbers is not None:
            return Documents(*locate_documents(numbers, bounds), window)
        if window is not None and window < position_ids.shape[1]:
            return Documents(*locate_rows(position_ids), window)
        return None

    def _batch_documents(self) -> DocumentBatches | None:
        if self._numbers is None or not self._batches_documents:
            return None
        # A CPU can read the lengths of documents, which makes tighter batches
        return batch_documents(self._numbers, None if self._numbers.device.type == "cpu" else self.bounds)

    def derive_by_type(self, inputs: Activations, attention_type: str) -> dict[str, Any]:
        """Return the keyword arguments of one type of attention for the attention implementation. inputs: the whole
        sequence."""
        implementation = self.config._attn_implementation
        if self.sequence_part.is_ring:
            return {"attention_mask": None, "sequence_mask": self._build_sequence_mask(inputs, attention_type)}
        if implementation == VARLEN:
            return {"attention_mask": None, "documents": self.find_documents(inputs, attention_type)}
        if implementation in FLASH:
            return {"attention_mask": None, **self._name_for_flash(inputs[1], attention_type)}
        return {"attention_mask": self.build_mask(inputs, attention_type)}

    def _build_sequence_mask(self, inputs: Activations, attention_type: str) -> SequenceMask:
        numbers, window = self._numbers, self._find_window(attention_type)
        most, longest = bound_documents(inputs[1], numbers, self.bounds)
        return SequenceMask(numbers, window if window is not None and window < longest else None, most, longest)

    def _name_for_flash(self, position_ids: torch.Tensor, attention_type: str) -> dict[str, Any]:
        """Return the documents under the names of `transformers`' `FlashAttentionKwargs`; the layers themselves handle
        windows.

        Without them it checks, in each layer, whether a micro-batch of one row is packed, and waits for the device; it
        takes larger micro-batches to be unpacked (`_is_packed_sequence`, 5.23).
        """
        numbers, bounds = self._number_documents(position_ids, attention_type)
        if numbers is None and len(position_ids) > 1:
            return {}
        offsets, longest = locate_rows(position_ids) if numbers is None else locate_documents(numbers, bounds)
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        return dict(zip(names, (offsets, offsets, longest, longest), strict=True))

    def _number_documents(
        self, position_ids: torch.Tensor, attention_type: str
    ) -> tuple[torch.Tensor | None, DocumentBounds | None]:
        """Return the result of `number_documents`, and its bounds. In chunked attention each chunk counts as a
        document."""
        chunk = self.config.attention_chunk_size if attention_type == "chunked_attention" else None
        if chunk is None or chunk >= position_ids.shape[1]:
            return self._numbers, self.bounds
        return number_chunks(position_ids, chunk), bound_chunks(self.bounds, position_ids, chunk)

    def _find_window(self, attention_type: str) -> int | None:
        return self.config.sliding_window if attention_type == "sliding_attention" else None


def _compute_for_length(rotary: nn.Module, hidden_states: torch.Tensor, position_ids: torch.Tensor, length: int) -> Any:
    """Return the rotary embedding's output for positions of rows that have this many tokens, whatever the positions:
    the module takes the length from the largest one, so that one is appended."""
    setattr(rotary, "max_seq_len_cached", 0)  # noqa: B010  # a plain attribute of a module
    last = position_ids.new_full((len(position_ids), 1), length - 1)
    angles = rotary(hidden_states, position_ids=torch.cat([position_ids, last], dim=1))
    return tuple(each[:, :-1] for each in _list_tensors(angles))


def _list_tensors(angles: Any) -> list[torch.Tensor]:
    return [angles] if isinstance(angles, torch.Tensor) else list(angles)


def _describe_all(inputs: Activations) -> Activations:
    """Return inputs whose hidden states have as many tokens as there are positions. Only their shape, dtype and device
    are used."""
    hidden_states, position_ids, segment_ids = inputs
    if hidden_states.shape[1] != position_ids.shape[1]:
        hidden_states = hidden_states[:, :1].expand(-1, position_ids.shape[1], -1)
    return hidden_states, position_ids, segment_ids
