"""The table of cost terms, and its sums: the memory of a stage, and the time of its passes and of the end of its
step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from training.cost_terms.activations import ACTIVATIONS
from training.cost_terms.boundaries import BOUNDARIES
from training.cost_terms.context_parallel import CONTEXT_PARALLEL
from training.cost_terms.cost_term import Chunk, CostTerm, Stage
from training.cost_terms.expert_parallel import EXPERT_PARALLEL
from training.cost_terms.gradient_sums import GRADIENT_SUMS
from training.cost_terms.layers import LAYERS
from training.cost_terms.loss import FIRST_PASS, LOSS
from training.cost_terms.model_states import MODEL_STATES
from training.cost_terms.optimizer_step import OPTIMIZER_STEP
from training.cost_terms.replicas import REPLICAS
from training.cost_terms.teacher import TEACHER
from training.cost_terms.tensor_parallel import TENSOR_PARALLEL
from training.costs.memory import HOST_BYTES_A_RANK, Kept, Memory
from training.costs.time import PassCost, StepCost
from training.pipeline.schedule import InFlight

COST_TERMS: tuple[CostTerm, ...] = (
    MODEL_STATES,  # precision, offload_optimizer, optimizer, replicas
    LAYERS,  # freeze, adapter
    GRADIENT_SUMS,  # gradient_accumulation_steps, precision
    ACTIVATIONS,  # activation_checkpoint_interval, activation_checkpoint_mode, activation_offload
    BOUNDARIES,  # num_stages, schedule
    LOSS,  # task
    CONTEXT_PARALLEL,  # context_parallel_size
    FIRST_PASS,  # task
    TEACHER,  # distill.online
    TENSOR_PARALLEL,  # tensor_parallel_size
    EXPERT_PARALLEL,  # expert_parallel_size
    REPLICAS,  # world_size
    OPTIMIZER_STEP,  # optimizer, offload_optimizer
)


def sum_memory(stage: Stage) -> Memory:
    """Return the memory of a stage. Activations are those of the micro-batches in flight when they take most; one group
    of layers is recomputed at a time."""
    once = _sum_once(_sum_stage_memory, stage)
    kept = [_sum_once(_sum_kept, chunk) for chunk in stage.chunks]
    in_flight = stage.schedule.list_in_flight(stage.stage_id)
    activations = max(_sum_in_flight(counts, kept) for counts in in_flight)
    in_backward = max(
        _sum_in_flight(counts, kept) + kept[number].recomputation
        for counts, number in stage.schedule.list_backward(stage.stage_id)
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
    return _sum_once(_sum_passes, chunk)


def sum_step_cost(stage: Stage) -> StepCost:
    """Return the cost of the end of a step on a stage."""
    return _sum_once(_sum_step, stage)


def _sum_once(compute: Callable[[Any], Any], part: Chunk | Stage) -> Any:
    """Return what `compute` returns for a chunk or a stage, once for those of one kind: a search plans thousands, and
    most stages of a plan are alike. Ranks that share a sequence may be nearer to each other on one stage than on
    another."""
    sums, place = part.run.sums, part.stage_id if part.run.layout.context_parallel_size > 1 else None
    key = compute, place, part.kind
    if key not in sums:
        sums[key] = compute(part)
    return sums[key]


def _sum_stage_memory(stage: Stage) -> Memory:
    terms = (term.stage_memory(stage) for term in COST_TERMS if term.stage_memory)
    return sum(terms, start=Memory(host=HOST_BYTES_A_RANK))


def _sum_kept(chunk: Chunk) -> Kept:
    return sum((term.chunk_memory(chunk) for term in COST_TERMS if term.chunk_memory), start=Kept())


def _sum_passes(chunk: Chunk) -> PassCost:
    return sum((term.chunk_cost(chunk) for term in COST_TERMS if term.chunk_cost), start=PassCost())


def _sum_step(stage: Stage) -> StepCost:
    return sum((term.stage_cost(stage) for term in COST_TERMS if term.stage_cost), start=StepCost())
