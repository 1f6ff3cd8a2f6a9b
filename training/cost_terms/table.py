"""The table of cost terms, and its sums: the memory of a stage, and the time of its passes and of the end of its
step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from training.cost_terms.activations import ACTIVATIONS
from training.cost_terms.boundaries import BOUNDARIES
from training.cost_terms.context_parallel import CONTEXT_PARALLEL
from training.cost_terms.cost_term import Chunk, CostTerm, Kept, Memory, PassCost, Stage, StepCost
from training.cost_terms.first_pass import FIRST_PASS
from training.cost_terms.gradients import GRADIENTS
from training.cost_terms.layer_ranks import EXPERT_PARALLEL, TENSOR_PARALLEL
from training.cost_terms.layers import LAYERS
from training.cost_terms.loss import LOSS
from training.cost_terms.model_states import MODEL_STATES
from training.cost_terms.optimizer_step import OPTIMIZER_STEP
from training.pipeline.schedule import InFlight

T = TypeVar("T", Memory, Kept, PassCost, StepCost)
HOST_BYTES_A_RANK = 3 * 2**30  # a process with CUDA's libraries loaded; an assumption

COST_TERMS: tuple[CostTerm, ...] = (
    MODEL_STATES,  # precision, offload_optimizer, optimizer, replicas
    LAYERS,  # freeze, adapter
    GRADIENTS,  # gradient_accumulation_steps, precision, world_size
    ACTIVATIONS,  # activation_checkpoint_interval, activation_checkpoint_mode, activation_offload
    BOUNDARIES,  # num_stages, schedule
    LOSS,  # task
    CONTEXT_PARALLEL,  # context_parallel_size
    FIRST_PASS,  # task, distill.online
    TENSOR_PARALLEL,  # tensor_parallel_size
    EXPERT_PARALLEL,  # expert_parallel_size
    OPTIMIZER_STEP,  # optimizer, offload_optimizer
)


def sum_memory(stage: Stage) -> Memory:
    """Return the memory of a stage. Activations are those of the micro-batches in flight when they take most; one group
    of layers is recomputed at a time."""
    once = _sum_once("stage_memory", stage, Memory(host=HOST_BYTES_A_RANK))
    kept = [_sum_once("chunk_memory", chunk, Kept()) for chunk in stage.chunks]
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
    return _sum_once("chunk_cost", chunk, PassCost())


def sum_step_cost(stage: Stage) -> StepCost:
    """Return the cost of the end of a step on a stage."""
    return _sum_once("stage_cost", stage, StepCost())


def _sum_once(cost: str, part: Chunk | Stage, start: T) -> T:
    """Return the sum of a field of `CostTerm` for a chunk or a stage, once for those of one kind: a search plans
    thousands, and most stages of a plan are alike."""
    sums, key = part.run.sums, (cost, part.kind)
    if key not in sums:
        terms = [getattr(term, cost) for term in COST_TERMS]
        sums[key] = sum((compute(part) for compute in terms if compute), start=start)
    found: T = sums[key]
    return found
