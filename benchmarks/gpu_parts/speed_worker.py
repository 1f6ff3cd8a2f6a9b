"""Measures variants of a model one after the other in one process, which imports and connects once.

Each is built as a run builds it (`training/build.py`), of random weights drawn on the device, takes steps of full rows
in which every token is a target, and is dropped. A failure ends the process, which is then started anew
(`processes.Worker`).

    RANK=0 WORLD_SIZE=1 ... python -m benchmarks.gpu_parts.speed_worker     and a job as JSON on each line of its input
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.measured_runs import STEPS, TRACED_STEP, WARM_UP
from benchmarks.workload import RandomWeights, build_engine, build_llama, compose_run, repeat_batch
from data.loading.step_totals import StepTotals
from models.layers.fused_kernels import find_obstacle
from models.weights.quantized import QUANTIZATION_CONFIG, parse_quantization
from training.config.precision import DTYPES
from training.config.schema import FusedKernels
from training.distributed.process import current_device, join_process_group, synchronize, take_device
from training.distributed.ranks import read_ranks
from training.engine.engine import Engine
from training.observability.stage_timer import MemoryPeak
from training.observability.step_trace import StepTrace

_LEFT = 2**30  # bytes on the device after a variant was dropped, at most


def main() -> None:
    take_device(read_ranks())
    join_process_group()
    for line in sys.stdin:
        job = json.loads(line)
        found = _JOBS[job["kind"]](job)
        found["is_last"] = drop() > _LEFT  # the next variant would have less memory than a run has
        file = Path(job["result"])
        file.with_suffix(".part").write_text(json.dumps(found))
        os.replace(file.with_suffix(".part"), file)


def measure_speed(job: dict[str, Any]) -> dict[str, Any]:
    """Return tokens per second and the peak memory of a variant, and why `fused_kernels` fuses nothing.

    fields: of config.json. overrides: of the run. trace: a folder for the trace of one more step, or None.
    """
    fields = {key: value for key, value in job["fields"].items() if key != QUANTIZATION_CONFIG}
    form = parse_quantization(job["fields"], Path("config.json")).form
    device, architecture = current_device(), build_llama(**fields)
    config = compose_run(*job["overrides"])
    memory = MemoryPeak(device)
    source = RandomWeights(architecture, DTYPES[config.precision], str(device), form)
    engine = build_engine(architecture, config, source)
    memory.start()
    rows, length = config.micro_batch_size, config.max_seq_length
    batch = engine.layout.global_batch_size
    batches = repeat_batch(rows, length, architecture.vocab_size, str(device))
    totals = StepTotals(
        batch * length, batch * (length - 1), batch, batch, most_documents=rows, longest_document=length
    )

    def take_step(step: int) -> torch.Tensor:
        return engine.train_step(batches, step, WARM_UP + STEPS, totals=totals)[0]

    seconds = []
    for step in range(WARM_UP + STEPS):
        synchronize()
        start = time.perf_counter()
        loss = take_step(step)
        synchronize()
        seconds.append(time.perf_counter() - start)
    peak = memory.read()
    if job["trace"]:
        trace = StepTrace(TRACED_STEP, Path(job["trace"]))
        trace.start()
        take_step(TRACED_STEP - 1)
        synchronize()
        trace.finish()
    fuses = config.fused_kernels is FusedKernels.auto
    found = {
        "tokens_per_second": batch * length / statistics.median(seconds[WARM_UP:]), "peak": peak, "loss": loss.item(),
        "tokens": rows * length,
        "obstacle": find_obstacle(device) if fuses else None,
    }  # fmt: skip
    _release(engine)
    return found


def check_device(job: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a matrix product in bf16 relative to the same in fp64, and what the device reaches."""
    device, size = current_device(), job["size"]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    product = left @ right
    expected = left[:64].double() @ right.double()
    error = ((product[:64].double() - expected).norm() / expected.norm()).item()
    seconds = time_calls(lambda: left @ right)
    copied = time_calls(lambda: right.copy_(left))
    return {"error": error, "flops": 2 * size**3 / seconds, "bytes": 2 * left.nbytes / copied}


def time_calls(call: Any, count: int = 20) -> float:
    """Return seconds per call."""
    call()
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def _release(engine: Engine) -> None:
    """Free a stage's weights: what refers to the last engine of a process is freed with the next one."""
    for tensor in [*engine.module.parameters(), *engine.module.buffers()]:
        tensor.data = tensor.new_empty(0)


def drop() -> int:
    """Free what nothing refers to any more. Returns the bytes that are still allocated on the device; 0 on a CPU."""
    torch._dynamo.reset()
    gc.collect()
    if current_device().type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


_JOBS = {"speed": measure_speed, "device": check_device}

if __name__ == "__main__":
    main()
