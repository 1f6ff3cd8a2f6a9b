"""Context parallelism: the bytes that ranks send for attention over shared sequences, by heads or around a ring. Its
savings are in the costs of layers on a part of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.config.schema import AttnImplementation, Device, Precision
from training.cost_terms.cost_term import Chunk, CostTerm, PlannedRun, Stage
from training.costs.cost import LayerCost
from training.costs.hardware import GB
from training.costs.memory import Kept, Summed
from training.costs.shared_attention import SharedAttention
from training.costs.time import PassCost, Sent, find_bandwidth
from training.distributed.topology import CONTEXT, RING

# Reads and writes of one score by the operations of `models/parallel/blocks.py`, forward and backward: fp32, and a copy
# in bf16
SCORE_BYTES = (44, 88)


@dataclass(frozen=True, kw_only=True)
class ModeCost:
    """The cost of a mode for one micro-batch through a stage, forward and backward. is_chosen: by the run. sent_bytes:
    by a rank. seconds: added to the passes, on a link within a node and on one between nodes."""

    mode: str
    is_chosen: bool
    sent_bytes: float
    seconds_within: float
    seconds_between: float


@dataclass(frozen=True, kw_only=True)
class _Pass(Summed):
    """The cost added to a pass. sent_bytes: by a rank. waiting: seconds, for communication. work: seconds by which
    attention exceeds the GPU's fastest kernels; excess: those of them that other kernels would save."""

    sent_bytes: float = 0
    waiting: float = 0
    work: float = 0
    excess: float = 0


def compute_exchanges(chunk: Chunk) -> PassCost:
    """Return the time that sharing attention adds; around a ring only communication that exceeds the work it
    overlaps."""
    if not (shared := _list_shared(chunk.layers)):
        return PassCost()
    run, axis = chunk.run, RING if shared[0].is_ring else CONTEXT
    bandwidth = find_bandwidth(axis, run.layout, chunk.stage_id, run.hardware) * GB
    forward, backward = _sum_passes(chunk, shared[0].is_ring, bandwidth)
    return PassCost(
        forward_seconds=forward.work,
        backward_seconds=backward.work,
        excess_seconds=forward.excess + backward.excess,
        forward_sent=Sent({axis: forward.waiting * bandwidth}),
        backward_sent=Sent({axis: backward.waiting * bandwidth}),
    )


def compute_workspace(chunk: Chunk) -> Kept:
    """Return the workspace of attention, for one layer at a time in the backward pass."""
    workspaces = (
        shared.workspace_bytes + shared.chunk_bytes * _makes_scores(chunk.run, shared)
        for shared in _list_shared(chunk.backward_layers)
    )
    return Kept(recomputation=max(workspaces, default=0))


def compare_modes(stage: Stage) -> list[ModeCost]:
    """Return the costs of the modes that the model supports, on both kinds of link."""
    shared = _list_shared(stage.layers)
    can = {"ulysses": shared and shared[0].exchanged_bytes, "ring": shared and shared[0].block_bytes}
    return [_compare(stage, mode, shared[0].is_ring) for mode, nbytes in can.items() if nbytes]


def _compare(stage: Stage, mode: str, runs_ring: bool) -> ModeCost:
    hardware, is_ring = stage.run.hardware, mode == "ring"
    inside = hardware.rate_to(1 if is_ring else stage.run.layout.context_parallel_size - 1)
    links = (inside * GB, hardware.inter_node_bandwidth * GB)
    within, between = (
        sum((sum(_sum_passes(chunk, is_ring, link), start=_Pass()) for chunk in stage.chunks), start=_Pass())
        for link in links
    )
    return ModeCost(
        mode=mode,
        is_chosen=is_ring == runs_ring,
        sent_bytes=within.sent_bytes,
        seconds_within=within.waiting + within.work,
        seconds_between=between.waiting + between.work,
    )


def _sum_passes(chunk: Chunk, is_ring: bool, bandwidth: float) -> tuple[_Pass, _Pass]:
    """Forward and backward; recomputed layers go forward in both. bandwidth: bytes a second."""
    run = chunk.run
    send = _travel if is_ring else _exchange
    forward = backward = _Pass()
    for layer in chunk.layers:
        forward += send(layer, run, bandwidth, is_backward=False)
    for layer in chunk.backward_layers:
        backward += send(layer, run, bandwidth, is_backward=True)
    for layer in chunk.list_recomputed():
        backward += send(layer, run, bandwidth, is_backward=False)
    return forward, backward


def _exchange(layer: LayerCost, run: PlannedRun, bandwidth: float, *, is_backward: bool) -> _Pass:
    """Queries, keys, values and outputs, all but the rank's own part, are sent each way, and attention waits for
    them."""
    if (shared := layer.shared_attention) is None:
        return _Pass()
    size = run.layout.context_parallel_size
    nbytes = shared.exchanged_bytes * (size - 1) / size
    return _Pass(sent_bytes=nbytes, waiting=nbytes / bandwidth)


def _travel(layer: LayerCost, run: PlannedRun, bandwidth: float, *, is_backward: bool) -> _Pass:
    """Keys and values go to all others, each overlapped with a step of attention; in the backward pass their gradients
    too, whose last transfer, home, is not overlapped. torch returns what merges blocks from FlashAttention-2's kernels
    alone, which some GPUs run slower than their own; where those do not apply, scores are written to memory and read
    again."""
    if (shared := layer.shared_attention) is None:
        return _Pass()
    size = run.layout.context_parallel_size
    gradient = shared.block_gradient_bytes if is_backward else 0
    attending, excess = run.time_attention(layer, is_backward), 0.0
    if _makes_scores(run, shared):
        work = shared.scores * SCORE_BYTES[is_backward] / run.hardware.stream_rate
    else:
        work = run.time_flash_attention_2(layer, is_backward) - attending
        excess = work
    step_seconds = (attending + work) / size
    exposed = max(0.0, (shared.block_bytes + gradient) / bandwidth - step_seconds)
    return _Pass(
        sent_bytes=(size - 1) * shared.block_bytes + size * gradient,
        waiting=(size - 1) * exposed + gradient / bandwidth,
        work=work,
        excess=excess,
    )


def _makes_scores(run: PlannedRun, shared: SharedAttention) -> bool:
    """Whether blocks around a ring are products of matrices: `models/parallel/block_kernels.py` has what kernels do not
    take."""
    config = run.config
    return (
        shared.has_window
        or config.attn_implementation is AttnImplementation.eager
        or (run.hardware.device is Device.cuda and config.precision is Precision.fp32)
    )


def _list_shared(layers: Sequence[LayerCost]) -> list[SharedAttention]:
    return [layer.shared_attention for layer in layers if layer.shared_attention is not None]


CONTEXT_PARALLEL = CostTerm(chunk_cost=compute_exchanges, chunk_memory=compute_workspace)
