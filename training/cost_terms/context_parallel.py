"""Context parallelism: the bytes that ranks send and hold for attention over shared sequences, by heads or around a
ring, and the time of both. Its savings are in the costs of layers on a part of the sequence.

B micro-batch, H query heads, L tokens of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.parallel.blocks import MOST_SCORES
from training.config.schema import Device, Precision
from training.cost_terms.cost_term import Chunk, Kept, PassCost, PlannedRun, Stage, Summed
from training.cost_terms.layers import time_attention
from training.costs.cost import LayerCost, SharedAttention
from training.costs.hardware import GB
from training.costs.links import Sent, find_bandwidth
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
    """The cost added to a pass."""

    sent_bytes: float = 0  # by a rank
    waiting: float = 0  # seconds, for communication
    work: float = 0  # seconds by which attention exceeds the GPU's fastest kernels


def compute_exchanges(chunk: Chunk) -> PassCost:
    """Return the time that sharing attention adds; around a ring only communication that exceeds the work it
    overlaps."""
    if not (sharing := _list_sharing(chunk.layers)):
        return PassCost()
    run, is_ring = chunk.run, sharing[0][1].is_ring
    axis = RING if is_ring else CONTEXT
    bandwidth = find_bandwidth(axis, run.layout, chunk.stage_id, run.hardware) * GB
    forward, backward = _sum_passes(chunk, is_ring, bandwidth)
    waiting = forward.waiting + backward.waiting
    return PassCost(
        forward_seconds=forward.work + forward.waiting,
        backward_seconds=backward.work + backward.waiting,
        sending_seconds=waiting,
        sent=Sent({axis: waiting * bandwidth}),
    )


def compute_workspace(chunk: Chunk) -> Kept:
    """Return the workspace of a ring's attention, for one layer at a time in the backward pass: blocks that are sent,
    received and worked on, with their gradients, and the gradient of queries in fp32."""
    run, most = chunk.run, 0
    for _, shared in _list_sharing(chunk.backward_layers):
        if shared.is_ring:
            blocks = 2 * _count_block(shared, run) + 3 * _count_block_gradient(shared, run)
            queries = 4 * run.tokens * shared.heads * shared.head_sizes[0]
            most = max(most, blocks + queries + _count_chunk_bytes(shared, run) * _makes_scores(shared, run))
    return Kept(recomputation=most)


def compare_modes(stage: Stage) -> list[ModeCost]:
    """Return the costs of the modes that the model supports, on both kinds of link."""
    if not (sharing := _list_sharing(stage.layers)):
        return []
    shared = sharing[0][1]
    can = {"ulysses": shared.heads % stage.run.layout.context_parallel_size == 0, "ring": shared.has_ring}
    return [_compare(stage, mode, shared.is_ring) for mode in can if can[mode]]


def _compare(stage: Stage, mode: str, runs_ring: bool) -> ModeCost:
    hardware, is_ring = stage.run.hardware, mode == "ring"
    inside = hardware.rate_to(1 if is_ring else stage.run.layout.context_parallel_size - 1)
    within, between = (
        sum((each for chunk in stage.chunks for each in _sum_passes(chunk, is_ring, link * GB)), start=_Pass())
        for link in (inside, hardware.inter_node_bandwidth)
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
    send = _travel if is_ring else _exchange
    passes = (chunk.layers, False), (chunk.backward_layers, True), (chunk.list_recomputed(), False)
    forward, backward, again = (
        sum((send(*each, chunk.run, bandwidth, is_backward) for each in _list_sharing(layers)), start=_Pass())
        for layers, is_backward in passes
    )
    return forward, backward + again


def _exchange(layer: LayerCost, shared: SharedAttention, run: PlannedRun, bandwidth: float, is_backward: bool) -> _Pass:
    """Queries, keys, values and outputs, all but the rank's own part, are sent each way, and attention waits for them.
    Fewer heads of keys and values than ranks are repeated."""
    size = run.layout.context_parallel_size
    repeated = math.lcm(shared.kv_heads, size)
    exchanged = run.tokens * (shared.heads + repeated) * sum(shared.head_sizes) * run.weight_bytes
    nbytes = exchanged * (size - 1) / size
    return _Pass(sent_bytes=nbytes, waiting=nbytes / bandwidth)


def _travel(layer: LayerCost, shared: SharedAttention, run: PlannedRun, bandwidth: float, is_backward: bool) -> _Pass:
    """Keys and values go to all others, each overlapped with a step of attention; in the backward pass their gradients
    too, whose last transfer, home, is not overlapped. torch returns what merges blocks from FlashAttention-2's kernels
    alone, which some GPUs run slower than their own; where those do not apply, scores are written to memory and read
    again."""
    size, block = run.layout.context_parallel_size, _count_block(shared, run)
    gradient = _count_block_gradient(shared, run) if is_backward else 0
    attending = time_attention(layer, run, is_backward)
    if _makes_scores(shared, run):
        scores = run.tokens * layer.work.attention_flops / (2 * sum(shared.head_sizes))  # queries x keys, of all heads
        work = scores * SCORE_BYTES[is_backward] / run.hardware.stream_rate
    else:
        work = time_attention(layer, run, is_backward, by_flash_attention_2=True) - attending
    step_seconds = (attending + work) / size
    exposed = max(0.0, (block + gradient) / bandwidth - step_seconds)
    return _Pass(
        sent_bytes=(size - 1) * block + size * gradient,
        waiting=(size - 1) * exposed + gradient / bandwidth,
        work=work,
    )


def _count_block(shared: SharedAttention, run: PlannedRun) -> int:
    """Bytes of the keys and values that travel around a ring."""
    return run.tokens * shared.kv_heads * sum(shared.head_sizes) * run.weight_bytes


def _count_block_gradient(shared: SharedAttention, run: PlannedRun) -> int:
    """Bytes of their gradients, in fp32."""
    return run.tokens * shared.kv_heads * sum(shared.head_sizes) * 4


def _count_chunk_bytes(shared: SharedAttention, run: PlannedRun) -> int:
    """Bytes of a ring's backward pass where scores are written to memory: probabilities of a piece and the gradient of
    its scores, in fp32, and a copy in a smaller training dtype."""
    length = run.config.max_seq_length // run.layout.context_parallel_size
    rows, chunk = run.tokens // length * shared.heads, length // 2
    scores = min(rows * chunk * chunk, max(MOST_SCORES, rows * chunk))
    return scores * (8 + (run.weight_bytes if run.weight_bytes < 4 else 0))


def _makes_scores(shared: SharedAttention, run: PlannedRun) -> bool:
    """Whether blocks around a ring are products of matrices: `models/parallel/block_kernels.py` has what kernels do not
    take."""
    is_in_fp32 = run.hardware.device is Device.cuda and run.config.precision is Precision.fp32
    return shared.has_window or run.is_eager or is_in_fp32


def _list_sharing(layers: Sequence[LayerCost]) -> list[tuple[LayerCost, SharedAttention]]:
    """The layers whose attention ranks share."""
    return [(layer, layer.shared_attention) for layer in layers if layer.shared_attention]
