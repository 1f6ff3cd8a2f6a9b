"""Measures this machine for a plan: times layers (`layer_times.py`) in as many processes at once as ranks will share
it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from training.costs.cost import LayerCost
from training.costs.hardware import Machine, list_stated
from training.planner.layer_times import LayerTimes, Task, apply_times, build_task, list_kinds, measure
from training.resolution.resolve import ResolvedRun


def profile_layers(run: ResolvedRun, machine: Machine) -> tuple[list[LayerCost], Machine]:
    """Return the costs of the run's layers with the seconds that they take here, and `machine` with the bandwidths that
    were measured. Takes 10 to 20 seconds, and the memory of a few layers per process."""
    config, layout = run.config, run.layout
    available = sorted(os.sched_getaffinity(0))
    size = min(layout.world_size, len(available))
    share = len(available) // size
    cores = [available[rank * share : (rank + 1) * share] for rank in range(size)]
    return apply_times(
        _run_at_once(build_task(config, run.architecture, layout, list_kinds(run.costs)), cores),
        run.costs,
        machine,
        list_stated(config.hardware),
        tokens=layout.micro_batch_size * config.max_seq_length,
        oversubscription=max(1.0, layout.world_size / len(available)),  # ranks per core
    )


def _run_at_once(task: Task, cores: Sequence[Sequence[int]]) -> list[LayerTimes]:
    """Measure `task` in one process per entry of `cores`, all at the same time."""
    # threads of torch do not survive a fork; the server has none
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(len(cores)):
            end, other_end = context.Pipe(duplex=False)
            shared = {"store": f"{folder}/store", "task": task, "answer": other_end}
            process = context.Process(target=_work, args=(rank, cores), kwargs=shared, daemon=True)
            process.start()
            other_end.close()  # so that a process that dies ends the wait for its answer
            processes.append(process)
            ends.append(end)
        seen = [end.recv() for end in ends]
        for process in processes:
            process.join()
    return seen


def _work(rank: int, cores: Sequence[Sequence[int]], *, store: str, task: Task, answer: Connection) -> None:
    os.sched_setaffinity(0, cores[rank])
    torch.set_num_threads(len(cores[rank]))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(cores))
    answer.send(measure(task))
    dist.barrier()
    dist.destroy_process_group()
