"""Finds where the documents of a micro-batch begin and end, without waiting for the device.

A document begins at each row's start and wherever positions do not continue; padding continues the positions of the
last document of its row, and belongs to it (a causal model's tokens never see later ones). The number of documents is
data on the device, and reading it would stop the host until the device has caught up. So the host supplies an upper
bound in advance: the loader knows the lengths of a step's rows (`DocumentBounds`).

B micro-batch, T sequence, N documents of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    BlockMask,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)


@dataclass(frozen=True)
class DocumentBounds:
    """Upper bounds for every micro-batch of a step, or of an evaluation.

    most: documents in a micro-batch, a row of padding counted as one. longest: tokens of a document, including the
    padding after it.
    """

    most: int
    longest: int


class Documents(NamedTuple):
    """The arguments of attention kernels for packed rows: all rows of a micro-batch end to end, and where to cut them.

    offsets: int32 [N + 1], on the device: document i is tokens offsets[i] .. offsets[i + 1] - 1. Where there are fewer
    documents than the host's bound, the last ones are empty; the kernels' blocks return at once for those (flash
    attention's `if (m_block * kBlockM >= binfo.actual_seqlen_q) return`), and each costs 128 rows of the backward
    pass's fp32 workspace, so N is the bound of a step and not of the whole data.
    longest: an upper bound of their lengths; kernels start as many blocks per document as it takes.
    window: tokens that a token sees, itself included; None for all before it.
    """

    offsets: torch.Tensor
    longest: int
    window: int | None


def measure_documents(position_ids: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return int64 [B, T]: the number of tokens of each token's document; arbitrary for padding."""
    segments = segment_ids.long()
    longest = segments.new_zeros(len(segments), segments.shape[1] + 1)
    longest = longest.scatter_reduce(1, segments, (position_ids + 1) * (segments > 0), "amax")
    return longest.gather(1, segments)


class TokenDocuments(NamedTuple):
    """The document of each token, for means over documents. The N tokens of a micro-batch are its rows end to end.

    documents: int64 [N], counted from 0 over all rows; arbitrary for padding. is_real: bool [N], false for padding.
    lengths: fp32 [C], tokens of each document; 1 where there are fewer documents than the host's bound.
    """

    documents: torch.Tensor
    is_real: torch.Tensor
    lengths: torch.Tensor


def locate_tokens(segment_ids: torch.Tensor, bounds: DocumentBounds | None) -> TokenDocuments:
    """Return the document of each token. segment_ids: int32 [B, T], 0 for padding. bounds: None makes room for as many
    documents as tokens."""
    is_real = segment_ids > 0
    starts = is_real & (segment_ids != F.pad(segment_ids, (1, 0))[:, :-1])
    documents = (starts.flatten().cumsum(0) - 1).clamp(min=0)
    lengths = torch.zeros(documents.numel() if bounds is None else bounds.most, device=segment_ids.device)
    lengths.index_add_(0, documents, is_real.flatten().to(lengths.dtype))
    return TokenDocuments(documents, is_real.flatten(), lengths.clamp(min=1))


def number_documents(position_ids: torch.Tensor, bounds: DocumentBounds | None) -> torch.Tensor | None:
    """Return the document of each token, int64 [B, T], counted from 1 over all rows; None where no row holds several.

    bounds: None reads the number from the device, and waits for it.
    """
    if bounds is not None and bounds.most <= len(position_ids):
        return None
    continues = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if bounds is None and bool(continues.all()):
        return None
    starts = F.pad(~continues, (1, 0), value=True)
    return starts.flatten().cumsum(0).view_as(starts)


def number_chunks(position_ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the chunk of each token, int64 [B, T], counted from 1: like `number_documents`, with documents cut every
    `chunk` tokens."""
    starts = (position_ids % chunk == 0) | F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=True)
    return starts.flatten().cumsum(0).view_as(starts)


def bound_chunks(bounds: DocumentBounds | None, position_ids: torch.Tensor, chunk: int) -> DocumentBounds | None:
    """Return bounds for the chunks of `number_chunks`: the last chunk of each document may be shorter."""
    if bounds is None:
        return None
    return DocumentBounds(bounds.most + position_ids.numel() // chunk, min(bounds.longest, chunk))


def bound_documents(
    position_ids: torch.Tensor, numbers: torch.Tensor | None, bounds: DocumentBounds | None
) -> tuple[int, int]:
    """Return upper bounds of the documents of rows [B, T] and of the tokens of one. numbers: the document of each
    token; None where each row is one. bounds: None asks the device for their number."""
    num_rows, length = position_ids.shape
    if bounds is not None:
        return bounds.most, min(bounds.longest, length)
    return num_rows if numbers is None else int(numbers[-1, -1]), length


def locate_documents(numbers: torch.Tensor, bounds: DocumentBounds | None) -> tuple[torch.Tensor, int]:
    """Return `offsets` and `longest` of `Documents`. numbers: the document of each token, [B, T]."""
    most, longest = bound_documents(numbers, numbers, bounds)
    # The place of each document's first token; after the last document B x T, which is no token's
    firsts = torch.arange(1, most + 2, device=numbers.device)
    return torch.searchsorted(numbers.flatten(), firsts, out_int32=True), longest


def locate_rows(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `offsets` and `longest` of `Documents` where each row of position_ids [B, T] is one document."""
    length = position_ids.shape[1]
    stop = position_ids.numel() + 1
    return torch.arange(0, stop, length, dtype=torch.int32, device=position_ids.device), length


def build_packed_mask(
    config: PretrainedConfig, hidden_states: torch.Tensor, numbers: torch.Tensor, window: int | None
) -> torch.Tensor | BlockMask:
    """Return the mask of rows that hold several documents, as `transformers` makes it for the config's attention; its
    own functions first check from the positions whether there is anything to mask, and so wait for the device
    (`find_packed_sequence_indices`, 5.23).

    numbers: the document of each token, [B, T].
    """
    batch_size, length = numbers.shape
    causal = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
        batch_size=batch_size,
        q_length=length,
        kv_length=length,
        mask_function=and_masks(packed_sequence_mask_function(numbers), causal),
        allow_is_causal_skip=False,
        dtype=hidden_states.dtype,
        config=config,
        device=hidden_states.device,
    )
