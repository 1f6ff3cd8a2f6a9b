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
from training.cost_terms.table import HOST_BYTES_A_RANK
from training.costs.hardware import Machine, complete_hardware
from training.distributed.process import broadcast_from_main
from training.distributed.ranks import Ranks
from training.layer_times import LayerTimes, apply_times, build_task, measure
from training.planner.plan import Plan, compute_model_flops, plan_resolved
from training.resolution.resolve import ResolvedRun

_TIME_BUDGET = 1.0  # seconds, for layers of all kinds together


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a run."""

    plan: Plan  # its times are of rows with the average padding of the data, its memory is that of the longest rows
    is_known: bool  # whether a file of conf/hardware describes the device; else the times are those of another one
    filled: float  # tokens of a row without padding, on average

    @property
    def peak_memory(self) -> list[int]:
        """Bytes on the device of a rank, per stage [P]; a CPU also holds what is offloaded."""
        is_host = self.plan.run.hardware.device is Device.cpu
        memories = [stage.memory for stage in self.plan.stages]
        return [memory.peak + is_host * (memory.host - HOST_BYTES_A_RANK) for memory in memories]

    @property
    def mfu(self) -> float | None:
        """The MFU of the predicted step, as `compute_mfu` counts it."""
        seconds = self.plan.step_seconds
        return self.compute_mfu(self.filled * self._rows_per_step / seconds, seconds)

    def compute_mfu(self, tokens_per_second: float, step_time: float) -> float | None:
        """Return the MFU by the plan's convention (`compute_model_flops`), with attention over rows of the measured
        average length; None where the peak is unknown."""
        if not self.is_known:
            return None
        tokens_a_row = tokens_per_second * step_time / self._rows_per_step
        return tokens_per_second * compute_model_flops(self.plan.costs, tokens_a_row) / self.plan.peak_flops

    @property
    def _rows_per_step(self) -> int:
        return self.plan.tokens_per_step // self.plan.run.config.max_seq_length


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
    task = broadcast_from_main(lambda: build_task(run, lengths.padded, _TIME_BUDGET), ranks)
    seen: list[Any] = [None] * ranks.world_size
    dist.gather_object(measure(task), seen if ranks.is_main else None)
    return seen


def predict(
    run: ResolvedRun,
    machine: Machine | None,
    lengths: RowLengths,
    times: Sequence[LayerTimes] = (),
    auxiliary: ResolvedRun | None = None,
) -> Prediction:
    """Return the plan of a run that is about to start.

    machine: complete; None for a GPU that is unknown. lengths: of its rows. times: those of `time_layers`; empty
    on a GPU. auxiliary: a frozen model that is in memory next to the model; of full rows.
    """
    config = run.config
    assumed = machine or replace(
        complete_hardware(config.hardware, config.precision, run.layout.world_size), device=Device.cuda
    )
    padded, longest = (
        replace(run, config=replace(config, max_seq_length=length)) for length in (lengths.padded, lengths.longest)
    )
    costs, measured = apply_times(times, padded, assumed) if times else (None, assumed)
    plan = plan_resolved(padded, measured, costs, auxiliary)
    if lengths.longest != lengths.padded:
        fullest = plan_resolved(longest, assumed, auxiliary=auxiliary)
        pairs = zip(plan.stages, fullest.stages, strict=True)
        stages = [replace(stage, memory=other.memory) for stage, other in pairs]
        plan = replace(plan, stages=stages, longest_sample=fullest.longest_sample)
    return Prediction(plan, is_known=machine is not None, filled=lengths.filled)
