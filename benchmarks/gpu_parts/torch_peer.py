"""torch.distributed.pipelining on the same work: one process per rank, started with the overrides of our run.

RANK=... python -m benchmarks.gpu_parts.torch_peer RESULT.json KEY=VALUE ...
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import peers
from benchmarks.gpu_parts.measured_runs import STEPS, WARM_UP, Speed
from benchmarks.workload import compose_run
from models.weights.sources import open_weights
from training.distributed.process import current_device, join_process_group, leave_process_group, take_device
from training.distributed.ranks import read_ranks
from training.observability.stage_timer import MemoryPeak
from training.setup import build_setup


def main() -> None:
    ranks = read_ranks()
    take_device(ranks)
    join_process_group()
    memory = MemoryPeak(current_device())
    config = compose_run(*sys.argv[2:])
    work = peers.Work(config, build_setup(config, open_weights(config.model_name_or_path), ranks))
    step = peers.build_torch(work, work.setup.bounds)
    memory.start()
    seconds = statistics.median([time_step(step) for _ in range(WARM_UP + STEPS)][WARM_UP:])
    peak = torch.tensor(float(memory.read()), dtype=torch.float64, device=current_device())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if ranks.is_main:
        tokens = work.layout.global_batch_size * config.max_seq_length
        Path(sys.argv[1]).write_text(json.dumps(asdict(Speed(tokens / seconds, None, peak.item()))))
    leave_process_group()


def time_step(step: peers.Step) -> float:
    """All ranks start together and end together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    if current_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
