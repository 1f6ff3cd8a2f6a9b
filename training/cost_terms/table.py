"""The table of cost terms, and its sums: the memory of a stage, and the time of its passes and of the end of its
step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from training.cost_terms import (
    activations,
    buffers,
    context_parallel,
    first_pass,
    gradients,
    layer_ranks,
    layers,
    loss,
    model_states,
    optimizer_step,
    selection,
)
from training.cost_terms.cost_term import Chunk, Kept, Memory, PassCost, Stage, StepCost
from training.pipeline.schedule import InFlight

T = TypeVar("T", Memory, Kept, PassCost, StepCost)
HOST_BYTES_A_RANK = 3 * 2**30  # a process with CUDA's libraries loaded; an assumption

STAGE_MEMORY: tuple[Callable[[Stage], Memory], ...] = (  # allocated once
    model_states.compute_model_states,
    buffers.compute_messages,
    buffers.compute_gradients_in_pass,
    loss.compute_loss,
    first_pass.compute_auxiliary,
)
CHUNK_MEMORY: tuple[Callable[[Chunk], Kept], ...] = (  # of each micro-batch in flight
    activations.compute_kept,
    context_parallel.compute_workspace,
)
PASSES: tuple[Callable[[Chunk], PassCost], ...] = (  # of each micro-batch
    layers.compute_passes,
    gradients.compute_sums,
    activations.compute_recomputation,
    selection.compute_selection,
    loss.compute_loss_cost,
    context_parallel.compute_exchanges,
    first_pass.compute_first_pass,
    layer_ranks.compute_sums,
    layer_ranks.compute_exchanges,
)
STEP: tuple[Callable[[Stage], StepCost], ...] = (  # once, after the passes
    gradients.compute_reduction,
    optimizer_step.compute_update,
)


def sum_memory(stage: Stage) -> Memory:
    """Return the memory of a stage. Activations are those of the micro-batches in flight when they take most; one group
    of layers is recomputed at a time."""
    once = _sum_once(STAGE_MEMORY, stage, Memory(host=HOST_BYTES_A_RANK))
    kept = [_sum_once(CHUNK_MEMORY, chunk, Kept()) for chunk in stage.chunks]
    in_flight = stage.run.schedule.list_in_flight(stage.stage_id)
    activations = max(_sum_in_flight(counts, kept) for counts in in_flight)
    in_backward = max(
        _sum_in_flight(counts, kept) + kept[number].recomputation
        for counts, number in stage.run.schedule.list_backward(stage.stage_id)
    )
    return once + Memory(
        activations=activations,
        recomputation=max(0, in_backward - activations),
        host=max(sum(held * each.host for held, each in zip(counts.held, kept, strict=True)) for counts in in_flight),
    )


def _sum_in_flight(counts: InFlight, kept: Sequence[Kept]) -> int:
    return sum(
        held * each.activations + deferred * each.deferred for held, deferred, each in zip(*counts, kept, strict=True)
    )


def sum_pass_cost(chunk: Chunk) -> PassCost:
    """Return the cost of one micro-batch through a chunk."""
    return _sum_once(PASSES, chunk, PassCost())


def sum_step_cost(stage: Stage) -> StepCost:
    """Return the cost of the end of a step on a stage."""
    return _sum_once(STEP, stage, StepCost())


def _sum_once(terms: Sequence[Callable[[Any], T]], part: Chunk | Stage, start: T) -> T:
    """Return the sum of a chunk's or a stage's terms, once for those of one kind: a search plans thousands, and most
    stages of a plan are alike."""
    sums, key = part.run.sums, (type(start), part.kind)
    if key not in sums:
        sums[key] = sum((compute(part) for compute in terms), start=start)
    found: T = sums[key]
    return found
