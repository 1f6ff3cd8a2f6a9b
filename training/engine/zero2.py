"""ZeRO-2 in the pipeline engine: notifies `ShardedSums` when passes begin and end, and of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as instructions

from training.engine.executor import ScheduleEngine, WeightPass
from training.engine.shard_groups import ShardGroups
from training.engine.sharded_sums import ShardedSums
from training.pipeline.module import StageModule
from training.pipeline.weight_gradients import list_split

Instruction = Callable[..., None]


class Half(Enum):
    """A whole backward pass, or one of the two halves into which a schedule splits it."""

    both = "both"
    inputs = "inputs"
    weights = "weights"


def shard_sums(engine: ScheduleEngine, reduce_dtype: torch.dtype, groups: ShardGroups | None) -> ShardedSums:
    """Build the sharded gradients of this rank's stage, and add all its gradients to them, those of weight passes too.

    groups: None where they are sharded over all replicas.
    """
    module = engine.module
    sums = ShardedSums(
        engine.optimizer,
        _list_passes(module),
        kept_whole=[weight for weight, _ in module.get_tied_weights_and_groups()],
        reduce_dtype=reduce_dtype,
        replicas=None if groups is None else groups.replicas,
    )
    engine.add_to_sum = sums.add
    return sums


def _list_passes(module: StageModule) -> dict[tuple[int, Half], list[torch.nn.Parameter]]:
    """(chunk, half) -> the parameters that may get a gradient in it. Those outside layers (placeholders, those of a
    loss) may get one in any backward pass but the second half."""
    chunks = {chunk: module.list_modules(chunk) for chunk in module.chunk_numbers}
    layers = [layer for found in chunks.values() for layer in found]
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = [parameter for parameter in module.parameters() if id(parameter) not in in_layers]
    deferred = {
        id(each) for layer in layers for _, part in list_split(layer) for each in part.parameters(recurse=False)
    }
    passes = {}
    for chunk, found in chunks.items():
        own = list({id(each): each for layer in found for each in layer.parameters() if each.requires_grad}.values())
        passes[chunk, Half.both] = own + others
        passes[chunk, Half.inputs] = [each for each in own if id(each) not in deferred] + others
        passes[chunk, Half.weights] = [each for each in own if id(each) in deferred]
    return passes


def announce_passes(executed: Mapping[type, Instruction], sums: ShardedSums) -> dict[type, Instruction]:
    """Return an `_INSTRUCTION_MAP` whose passes accumulate into `sums`."""
    run_backward, run_weights = executed[instructions.BackwardPass], executed[WeightPass]

    def backward(engine: ScheduleEngine, *, chunk: int, splits: bool, **arguments: Any) -> None:
        sums.start_pass((chunk, Half.inputs if splits else Half.both))
        run_backward(engine, chunk=chunk, splits=splits, **arguments)
        sums.finish_pass()

    def weights(engine: ScheduleEngine, *, chunk: int, **arguments: Any) -> None:
        sums.start_pass((chunk, Half.weights))
        run_weights(engine, chunk=chunk, **arguments)
        sums.finish_pass()

    def reduce(engine: ScheduleEngine) -> None:
        sums.finish_step()

    return {
        **executed,
        instructions.BackwardPass: backward,
        WeightPass: weights,
        instructions.ReduceGrads: reduce,
    }
