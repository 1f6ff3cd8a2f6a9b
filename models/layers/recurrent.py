"""Layers that carry a state along the row (state-space layers, linear attention, short convolutions), and packed rows.

Attention keeps the documents of a row apart by its mask. A state has none: the state that a document leaves reaches the
next one. `transformers` passes cumulative lengths to the kernels of three packages and refuses packed rows without them
(`use_kernel_func_from_hub_with_fallback`, 5.23). So here such a mixer sees each document as a row of its own, whichever
kernel computes it. The rest of the layer (norms, experts, its attention) sees the rows as they are.

After a document its row is filled with whatever comes next: a causal mixer never sees later tokens, and its output for
the filling is dropped. Documents of similar length share a batch, so that the longest does not set the width of all.

B micro-batch, T sequence, N documents of a micro-batch, D hidden.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from models.layers.documents import DocumentBounds, locate_documents

_STATES = {"cache_params", "state"}  # arguments of a mixer's forward in transformers: its initial state
_CACHES = {"past_key_values", "cache"}  # up to 5.23, from 5.24; attention takes one too
# For attention alone
_DROPPED = {"documents", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_MASKS = {"attention_mask", "conv_mask"}  # of padding, which comes after the tokens, where no mixer sees it


class DocumentBatches(NamedTuple):
    """The documents of packed rows as batches with one document per row.

    batches: int64 [n, L] each, longest documents first: for each place the index of its token among the micro-batch's
    rows end to end. places: int64 [B T]: the place of each token, the batches end to end.
    """

    batches: tuple[torch.Tensor, ...]
    places: torch.Tensor


class Context(Protocol):
    """The part of `models.layers.context.MicroBatchContext` that mixers use. batches: None where each row is one
    document."""

    batches: DocumentBatches | None

    def request_batches(self) -> None: ...


def batch_documents(numbers: torch.Tensor, bounds: DocumentBounds | None) -> DocumentBatches:
    """Return the documents in batches. numbers: the document of each token, [B, T], counted from 1 over all rows.
    bounds: None reads the lengths from the device, and waits for it."""
    offsets, longest = locate_documents(numbers, bounds)
    lengths, num_tokens = offsets.diff(), numbers.numel()  # [N]
    order = lengths.argsort(descending=True, stable=True)
    if bounds is None:
        widths = lengths[order].tolist()
    else:  # Of k documents the shortest has at most the k-th part of all tokens
        widths = [min(longest, num_tokens // (rank + 1)) for rank in range(len(lengths))]
    widths = [width for width in widths if width]  # of documents that exist
    starts = offsets[:-1][order]
    batches, rows = [], []
    first = place = 0
    for count, width in _group(widths):
        columns = torch.arange(width, device=numbers.device)
        tokens = starts[first : first + count, None] + columns
        batches.append(tokens.clamp(max=num_tokens - 1))
        rows.append(place + width * torch.arange(count, device=numbers.device))
        first, place = first + count, place + count * width
    document = numbers.flatten() - 1  # [B T]
    rows.append(starts.new_zeros(len(starts) - first, dtype=torch.long))  # of documents that do not exist
    row = torch.cat(rows)[order.argsort()]  # [N], where each document's row begins
    within = torch.arange(num_tokens, device=numbers.device) - offsets[document]
    return DocumentBatches(tuple(batches), row[document] + within)


def _group(widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (rows, width) of each batch: a document is at least half as wide as its batch. widths: of the documents,
    the longest first."""
    first = 0
    for rank, width in enumerate(widths):
        if 2 * width <= widths[first]:
            yield rank - first, widths[first]
            first = rank
    yield len(widths) - first, widths[first]


def isolate_documents(layer: nn.Module, context: Context, layer_type: str) -> None:
    """Make the mixers of a decoder layer see each document of a packed row alone. Does nothing to a layer without
    mixers.

    layer_type: of the layer, as its config names it.
    """
    for mixer in find_mixers(layer, layer_type):
        context.request_batches()
        mixer.forward = partial(_run, mixer.forward, tuple(_list_arguments(mixer)), context)


def find_mixers(layer: nn.Module, layer_type: str) -> list[nn.Module]:
    """Return the outermost modules of a layer of `transformers` that carry a state from token to token: those that take
    an initial state, those that hold a convolution over tokens, and the module in place of attention where the layer's
    type is linear attention."""
    is_linear = layer_type == "linear_attention"
    found: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if module is not layer and not inside and _carries_state(module, is_linear):
            found[name] = module
    return list(found.values())


def list_read_weights(layer: nn.Module, layer_type: str) -> set[str]:
    """Return the names of the projections in a layer's mixers whose weights the mixer reads itself, to pass them to a
    kernel or a product of its own: an adapter around such a projection would have no effect."""
    names = {part: name for name, part in layer.named_modules()}
    return {
        f"{names[mixer]}.{name}"
        for mixer in find_mixers(layer, layer_type)
        for name in re.findall(r"self\.(\w+)\.weight", inspect.getsource(inspect.unwrap(type(mixer).forward)))
        if isinstance(getattr(mixer, name), nn.Linear)
    }


def _carries_state(module: nn.Module, is_linear: bool) -> bool:
    taken = _list_arguments(module)
    return (
        not _STATES.isdisjoint(taken)
        or any(isinstance(child, nn.Conv1d) for child in module.children())
        or (is_linear and not _CACHES.isdisjoint(taken))
    )


def _list_arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments, read from the class: an isolated mixer's own `forward` takes anything."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _run(forward: Callable[..., Any], names: tuple[str, ...], context: Context, *args: Any, **kwargs: Any) -> Any:
    """Run the mixer's `forward`, whose argument names are `names`; on whole rows where each is one document."""
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: None if name in _MASKS else value for name, value in given.items() if name not in _DROPPED}
    if context.batches is None:
        return forward(**given)
    return _run_apart(forward, context.batches, given[names[0]].shape[:2], given)


@torch.compiler.disable
def _run_apart(
    forward: Callable[..., Any], documents: DocumentBatches, shape: torch.Size, given: dict[str, Any]
) -> Any:
    """Run the mixer on batches of documents. shape: B, T. given: the mixer's arguments; the first tensor that it
    returns is [B, T, ...]."""
    outputs = []
    for tokens in documents.batches:
        outputs.append(forward(**{name: _take(value, tokens, shape) for name, value in given.items()}))
    if isinstance(outputs[0], torch.Tensor):
        return _put_back(outputs, documents.places, shape)
    return tuple(
        _put_back(parts, documents.places, shape) if _has_shape(parts[0], documents.batches[0].shape) else None
        for parts in zip(*outputs, strict=True)
    )


def _take(value: Any, tokens: torch.Tensor, shape: torch.Size) -> Any:
    """Return an argument for the documents of one batch: tensors [B, T, ...] become [n, L, ...]."""
    if isinstance(value, tuple):
        return tuple(_take(part, tokens, shape) for part in value)
    if not _has_shape(value, shape):
        return value
    return value.flatten(0, 1).index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


def _put_back(outputs: Sequence[torch.Tensor], places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the outputs [n, L, ...] of the batches as [B, T, ...]."""
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, places).unflatten(0, shape)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:2] == shape
