"""Predicts a run that is about to start: its plan for the machine that it runs on, and for rows as long as its
data's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from data.loading.row_lengths import RowLengths
from training.config.schema import Device, HardwareConfig, RunConfig, load_hardware
from training.cost_terms.cost_term import PlannedRun
from training.cost_terms.table import HOST_BYTES_A_RANK
from training.costs.cost import LayerCost
from training.costs.hardware import Machine, complete_hardware, list_stated
from training.distributed.process import broadcast_from_main
from training.distributed.ranks import Ranks
from training.distributed.topology import Layout
from training.planner.layer_times import LayerTimes, apply_times, build_task, list_kinds, measure
from training.planner.plan import Plan, compute_model_flops, compute_plan, list_owners, list_resolved_stages
from training.resolution.resolve import ResolvedRun

# Elements of the layers of a kind that are timed, and of the optimizer step; seconds for all kinds together
_TIMED_ELEMENTS, _FEWEST_ELEMENTS, _TIME_BUDGET = 2**23, 2**14, 1.0


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a run. plan: its times are of a step whose rows have the average padding of the data, its
    memory is that of the longest rows.

    peak_memory: bytes on the device of a rank, per stage [P], with the longest rows; a CPU also holds what is
    offloaded. filled: tokens of a row without padding, on average.
    peak_flops: FLOP/s of all ranks together; None on a GPU that no file of conf/hardware describes, and then the
    plan's times are those of another GPU.
    """

    plan: Plan
    peak_memory: list[int]
    peak_flops: float | None
    costs: Sequence[LayerCost]
    rows_per_step: int
    hardware: Machine  # that of the plan
    filled: float

    @property
    def mfu(self) -> float | None:
        """The MFU of the predicted step, as `compute_mfu` counts it."""
        seconds = self.plan.step_seconds
        return self.compute_mfu(self.filled * self.rows_per_step / seconds, seconds)

    def count_parameters(self, trained: bool = False) -> int:
        """Return the number of parameters of the model and its adapter, or of the trained ones; shared ones count
        once."""
        return sum(
            cost.parameters.whole_trained if trained else cost.parameters.whole for cost in list_owners(self.costs)
        )

    def count_active(self) -> int:
        """Return the number of parameters that a token uses: in a mixture, those of the experts that it chooses."""
        return sum(cost.parameters.active for cost in list_owners(self.costs))

    def compute_mfu(self, tokens_per_second: float, step_time: float) -> float | None:
        """Return the MFU by the plan's convention (`compute_model_flops`), with attention over rows of the measured
        average length; None where the peak is unknown."""
        if self.peak_flops is None:
            return None
        tokens_a_row = tokens_per_second * step_time / self.rows_per_step
        return tokens_per_second * compute_model_flops(self.costs, tokens_a_row) / self.peak_flops


def find_machine(hardware: HardwareConfig, device_name: str, config: RunConfig, local_size: int) -> Machine | None:
    """Return the complete description of this machine: `hardware` if it describes this device, else the file of
    conf/hardware that does.

    device_name: of the accelerator, "cpu" without one. local_size: ranks on this host. None for a device that no file
    describes.
    """
    for candidate in (hardware, *load_hardware()):
        has_peak = candidate.peak_flops is None or config.precision.value in candidate.peak_flops
        if has_peak and re.search(candidate.device_name, device_name):
            return complete_hardware(candidate, config.precision, local_size)
    return None


def time_layers(run: ResolvedRun, lengths: RowLengths, ranks: Ranks) -> list[LayerTimes]:
    """Time the layers of a run that is about to start on a CPU, on all its ranks at once. Returns the measurements of
    each rank on the main rank, None for each on the others. Takes about a second. All ranks call it."""
    kinds, updated = broadcast_from_main(lambda: _choose_timed(run.costs, run.layout), ranks)
    task = replace(
        build_task(replace(run.config, max_seq_length=lengths.padded), run.architecture, run.layout, kinds),
        updated=updated,
        time_budget=_TIME_BUDGET / len(kinds),
    )
    seen: list[Any] = [None] * ranks.world_size
    dist.gather_object(measure(task), seen if ranks.is_main else None)
    return seen


def _choose_timed(costs: Sequence[LayerCost], layout: Layout) -> tuple[list[list[int]], int]:
    """Return the layers of each kind to time, up to `_TIMED_ELEMENTS` parameters and at least one; and the elements of
    the optimizer step to time."""
    kinds = [
        indices[: max(1, _TIMED_ELEMENTS // max(1, costs[indices[0]].parameters.held))] for indices in list_kinds(costs)
    ]
    trained = sum(cost.parameters.whole_trained for cost in list_owners(costs)) // layout.world_size
    return kinds, max(_FEWEST_ELEMENTS, min(_TIMED_ELEMENTS, trained))


def predict(
    run: ResolvedRun,
    machine: Machine | None,
    device: Device,
    lengths: RowLengths,
    times: Sequence[LayerTimes] = (),
    teacher: ResolvedRun | None = None,
) -> Prediction:
    """Return the plan of a run that is about to start.

    machine: complete, or None when it is unknown. lengths: of its rows. times: those of `time_layers`. teacher: one
    that is in memory next to the model; of full rows.
    """
    config, layout = run.config, run.layout
    assumed = machine or replace(complete_hardware(config.hardware, config.precision, layout.world_size), device=device)

    def plan_rows(length: int) -> tuple[Plan, Sequence[LayerCost], Machine]:
        rows = replace(config, max_seq_length=length)
        counted, seen = run.counts.count_costs(layout, length), assumed
        if times:
            tokens = layout.micro_batch_size * length
            counted, seen = apply_times(times, counted, assumed, list_stated(config.hardware), tokens=tokens)
        in_memory = list_resolved_stages(teacher, seen)
        planned = PlannedRun(rows, layout, run.architecture.vocab_size, seen, in_memory)
        return compute_plan(counted, run.bounds, planned), counted, seen

    plan, costs_of_plan, hardware = plan_rows(lengths.padded)
    if lengths.longest != lengths.padded:
        fullest, *_ = plan_rows(lengths.longest)
        pairs = zip(plan.stages, fullest.stages, strict=True)
        stages = [replace(stage, memory=longest.memory) for stage, longest in pairs]
        plan = replace(plan, stages=stages, longest_sample=fullest.longest_sample)
    on_host = [stage.memory.host - HOST_BYTES_A_RANK if device is Device.cpu else 0 for stage in plan.stages]
    return Prediction(
        plan=plan,
        peak_memory=[stage.memory.peak + host for stage, host in zip(plan.stages, on_host, strict=True)],
        peak_flops=machine.peak_flops[config.precision.value] * layout.world_size if machine else None,
        costs=costs_of_plan,
        rows_per_step=layout.global_batch_size * run.objective.group_size(config.data),
        hardware=hardware,
        filled=lengths.filled,
    )
