"""The arithmetic of ranks and batches, in one pure object.

Ranks are laid out as DeepSpeed's `PipeModelDataParallelTopology` does it: rank = (stage_id * dp_size + dp_rank) * tensor_parallel_size +
tp_rank. So the ranks that share layers, which talk most, are neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from errors import UserError
from training.config.schema import PipelineSchedule, RunConfig


@dataclass(frozen=True)
class Layout:
    """world_size = tensor_parallel_size * num_stages * dp_size; global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_size.

    num_chunks: of layers, that a rank holds; more than one under schedule=interleaved.
    """

    world_size: int
    num_stages: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    tensor_parallel_size: int = 1
    num_chunks: int = 1

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.num_stages

    @property
    def dp_size(self) -> int:
        return self.ranks_per_stage // self.tensor_parallel_size

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def stage_id(self, rank: int) -> int:
        return rank // self.ranks_per_stage

    def dp_rank(self, rank: int) -> int:
        return rank % self.ranks_per_stage // self.tensor_parallel_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tensor_parallel_size

    def list_tensor_parallel_groups(self) -> list[list[int]]:
        """The ranks that share layers, group by group."""
        size = self.tensor_parallel_size
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def describe_placement(self, hosts: list[str]) -> str:
        """Which stages lie on which host, and what crosses between hosts. hosts: the host of each rank."""
        stages = {
            host: sorted({self.stage_id(rank) for rank in range(self.world_size) if hosts[rank] == host})
            for host in dict.fromkeys(hosts)
        }
        text = "; ".join(f"{host}: stage {_ranges(on_host)}" for host, on_host in stages.items())
        last = (
            self.world_size if self.num_chunks > 1 else self.world_size - self.ranks_per_stage
        )  # chunks lead from the last stage to the first
        pairs = [(rank, (rank + self.ranks_per_stage) % self.world_size) for rank in range(last)]
        crossing = sum(hosts[first] != hosts[second] for first, second in pairs)
        apart = sum(
            len({hosts[rank] for rank in range(self.world_size) if self.stage_id(rank) == stage}) > 1
            for stage in range(self.num_stages)
        )
        text += f"; {crossing} of {len(pairs)} stage boundaries and the replicas of {apart} of {self.num_stages} stages cross hosts"
        groups = [group for group in self.list_tensor_parallel_groups() if len({hosts[rank] for rank in group}) > 1]
        if groups:
            text += (
                f"; warning: {len(groups)} tensor-parallel groups cross hosts, the first of ranks {_ranges(groups[0])}: each layer then sends its "
                "activations over the network four times a micro-batch. Start a multiple of "
                f"tensor_parallel_size={self.tensor_parallel_size} ranks on each host, or give a smaller tensor_parallel_size and more num_stages"
            )
        return text

    def describe(self) -> str:
        interleaved = f" ({self.num_chunks} chunks each)" if self.num_chunks > 1 else ""
        tensor = f"tp{self.tensor_parallel_size} x " if self.tensor_parallel_size > 1 else ""
        return (
            f"{tensor}pp{self.num_stages}{interleaved} x dp{self.dp_size} = {self.world_size} ranks; global batch {self.global_batch_size} = micro-batch "
            f"{self.micro_batch_size} x accumulation {self.gradient_accumulation_steps} x dp {self.dp_size}"
        )


def build_layout(config: RunConfig, world_size: int, num_layers: int, has_accelerator: bool) -> Layout:
    """The layout that the keys ask for.

    Raises UserError, naming the key, where they contradict each other or the number of ranks.
    """
    stages = config.num_stages
    if stages < 1:
        raise UserError(f"num_stages={stages}: at least 1")
    if stages > num_layers:
        raise UserError(
            f"num_stages={stages} exceeds the model's {num_layers} layers; set num_stages to {num_layers} or less"
        )
    width = config.tensor_parallel_size
    if width < 1:
        raise UserError(f"tensor_parallel_size={width}: at least 1")
    replica = stages * width
    if world_size % replica:
        product = (
            f"num_stages={stages}" if width == 1 else f"tensor_parallel_size={width} x num_stages={stages} = {replica}"
        )
        raise UserError(
            f"{product} does not divide the number of started ranks, {world_size}; {_ranks_to_start(replica, world_size, has_accelerator)}"
        )
    micro_batch_size, accumulation = _batch_arithmetic(config, world_size // replica)
    if config.schedule is PipelineSchedule.interleaved:
        _check_interleaved(stages, config.virtual_stages_per_rank, accumulation, num_layers)
        return Layout(world_size, stages, micro_batch_size, accumulation, width, config.virtual_stages_per_rank)
    return Layout(world_size, stages, micro_batch_size, accumulation, width)


def _check_interleaved(stages: int, num_chunks: int, micro_batches: int, num_layers: int) -> None:
    if stages * num_chunks > num_layers:
        raise UserError(
            f"num_stages={stages} x virtual_stages_per_rank={num_chunks} is {stages * num_chunks} chunks, and the model has {num_layers} layers; "
            "lower one of them, or set schedule=1f1b"
        )
    if micro_batches % stages:
        below = micro_batches // stages * stages
        raise UserError(
            f"schedule=interleaved needs a number of micro-batches that is a multiple of num_stages={stages}; gradient_accumulation_steps="
            f"{micro_batches} is none, the nearest is {f'{below} or ' if below else ''}{below + stages}; change the batch, or set schedule=1f1b"
        )


def _ranks_to_start(replica: int, world_size: int, has_accelerator: bool) -> str:
    """replica: the ranks of one."""
    fitting = math.ceil(world_size / replica) * replica
    command = f"start it with `deepspeed --num_gpus {fitting} trainer_base_ds_mp.py ...`"
    if has_accelerator:
        return command + " or change num_stages"
    return command + " (without GPUs the launcher starts one rank unless --num_gpus says how many processes)"


def _batch_arithmetic(config: RunConfig, dp_size: int) -> tuple[int, int]:
    """(micro_batch_size, gradient_accumulation_steps) from any two of the three batch keys."""
    micro, accumulation, total = config.micro_batch_size, config.gradient_accumulation_steps, config.global_batch_size
    given = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "global_batch_size": total}
    for key, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{key}={value}: at least 1")
    if micro is not None and accumulation is not None:
        if total not in (None, micro * accumulation * dp_size):
            raise UserError(
                f"micro_batch_size={micro} x gradient_accumulation_steps={accumulation} x dp={dp_size} is {micro * accumulation * dp_size}, "
                f"not global_batch_size={total}; give two of them and set the third to null"
            )
        return micro, accumulation
    if micro is not None and total is not None:
        return micro, _divide(total, micro * dp_size, f"micro_batch_size={micro} x dp={dp_size}")
    if accumulation is not None and total is not None:
        return _divide(
            total, accumulation * dp_size, f"gradient_accumulation_steps={accumulation} x dp={dp_size}"
        ), accumulation
    missing = ", ".join(key for key, value in given.items() if value is None)
    raise UserError(
        f"two of micro_batch_size, gradient_accumulation_steps and global_batch_size must be given; missing: {missing}"
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _divide(global_batch_size: int, divisor: int, what: str) -> int:
    if global_batch_size % divisor:
        below = global_batch_size // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise UserError(
            f"global_batch_size={global_batch_size} is no multiple of {what} = {divisor}; the nearest is {nearest}"
        )
    return global_batch_size // divisor
