"""What a run is expected to do: its plan for the machine that it runs on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from models.architecture import build_layers
from models.parallel.tensor_parallel import shard_layers
from training.config.schema import Device, HardwareConfig, RunConfig, load_hardware
from training.distributed.topology import Layout
from training.objectives.registry import get_objective
from training.pipeline.partition import Fits
from training.planner.cost import LayerCost
from training.planner.hardware import Machine, complete_hardware
from training.planner.levers.lever import PlannedRun
from training.planner.memory import HOST_BYTES_A_RANK
from training.planner.plan import Plan, build_fits, compute_model_flops, compute_plan, count_costs, list_owners


@dataclass(frozen=True)
class Prediction:
    """peak_memory: bytes on the device of a rank, per stage [P]; a CPU also holds what is offloaded.

    peak_flops: FLOP/s of all ranks together; None on a card that no file of conf/hardware describes, and then the
    plan's times are those of another card.
    """

    plan: Plan
    peak_memory: list[int]
    peak_flops: float | None
    costs: Sequence[LayerCost]
    rows_per_step: int
    hardware: Machine  # that of the plan

    def count_parameters(self, trained: bool = False) -> int:
        """Of the model and its adapter, or only those that are trained; what layers share counts once."""
        return sum(cost.total_trainable if trained else cost.total_parameters for cost in list_owners(self.costs))

    def count_active(self) -> int:
        """Parameters that a token uses: of a mixture those of the experts that it chooses."""
        return sum(cost.num_active for cost in list_owners(self.costs))

    def compute_mfu(self, tokens_per_second: float, step_time: float) -> float | None:
        """By the plan's own convention (`compute_model_flops`), with attention over rows as long as they really were on
        average."""
        if self.peak_flops is None:
            return None
        tokens_a_row = tokens_per_second * step_time / self.rows_per_step
        return tokens_per_second * compute_model_flops(self.costs, tokens_a_row) / self.peak_flops


def find_machine(hardware: HardwareConfig, device_name: str, config: RunConfig, local_size: int) -> Machine | None:
    """What is known of this machine: `hardware`, when it is about this device, or the file of conf/hardware that is;
    complete.

    device_name: of the accelerator, "cpu" without one. local_size: ranks on this host. None for a card that no file
    describes.
    """
    for candidate in (hardware, *load_hardware()):
        has_peak = candidate.peak_flops is None or config.precision.value in candidate.peak_flops
        if has_peak and re.search(candidate.device_name, device_name):
            return complete_hardware(candidate, config.precision, local_size)
    return None


def predict(
    config: RunConfig,
    costs: Sequence[LayerCost],
    *,
    vocab_size: int,
    bounds: Sequence[int],
    layout: Layout,
    machine: Machine | None,
    device: Device,
) -> Prediction:
    """The plan of a run that is about to start. costs: those of `count_run_costs`. machine: complete, or None when it
    is unknown."""
    assumed = machine or replace(complete_hardware(config.hardware, config.precision, layout.world_size), device=device)
    plan = compute_plan(costs, bounds, PlannedRun(config, layout, vocab_size, assumed))
    on_host = [stage.memory.host - HOST_BYTES_A_RANK if device is Device.cpu else 0 for stage in plan.stages]
    return Prediction(
        plan=plan,
        peak_memory=[stage.memory.peak + host for stage, host in zip(plan.stages, on_host, strict=True)],
        peak_flops=machine.peak_flops[config.precision.value] * layout.world_size if machine else None,
        costs=costs,
        rows_per_step=layout.global_batch_size * get_objective(config).rows_per_sample,
        hardware=assumed,
    )


def find_fits(
    config: RunConfig,
    costs: Sequence[LayerCost],
    *,
    vocab_size: int,
    layout: Layout,
    device_name: str,
    local_size: int,
) -> Fits | None:
    """What a card of this machine holds of a run that trains, for the split; None where that is not known, and on a
    CPU.

    costs: those of `count_run_costs`. device_name, local_size: as in `find_machine`.
    """
    machine = None if device_name == "cpu" else find_machine(config.hardware, device_name, config, local_size)
    return None if machine is None else build_fits(costs, PlannedRun(config, layout, vocab_size, machine))


def count_run_costs(config: RunConfig, architecture: PretrainedConfig, layout: Layout) -> Sequence[LayerCost]:
    """The costs of the layers of a run, once for its split and its plan. architecture: with the run's attention
    kernel."""
    layers = shard_layers(architecture, build_layers(architecture), layout.tensor_parallel_size)
    return count_costs(config, architecture, layers, layout)
