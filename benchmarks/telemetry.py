"""Measures the cost of timing every instruction of a step.

    python benchmarks/telemetry.py [--pairs 40] [--micro_batches 16]

Two ranks of one core each, a Llama of two stages. One engine takes steps in pairs, one with the clock of
`training/observability/stage_timer.py` and one without, in turns the first; printed is the median ratio, and next to it
what the clock itself takes of a step when its marks are made and read around nothing, since a per cent of a step is
less than the noise of a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.workload import build_engine, build_llama, compose_run, repeat_batch, run_ranks

NUM_STAGES, MICRO_BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 2, 2, 128, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--micro_batches", type=int, default=16)
    arguments = parser.parse_args()
    timed, plain, alone = run_ranks(measure, NUM_STAGES, arguments.pairs, arguments.micro_batches)[0]
    ratios = sorted(a / b for a, b in zip(timed, plain, strict=True))
    step = statistics.median(plain)
    print(
        f"pp{NUM_STAGES}, {arguments.micro_batches} micro-batches, a step of {step * 1000:.0f} ms, {arguments.pairs} "
        "pairs"
    )
    print(
        f"with the clock / without: {statistics.median(ratios):.4f} ({ratios[len(ratios) // 4]:.4f} - "
        f"{ratios[3 * len(ratios) // 4]:.4f}, the middle half)"
    )
    print(f"the clock alone: {alone * 1e6:.0f} us a step, {alone / step:.3%} of it, its sum over the ranks included")


def measure(pairs: int, micro_batches: int) -> tuple[list[float], list[float], float]:
    """(seconds of the timed steps, of the others, of the clock without a step)."""
    from training.observability.stage_timer import MemoryPeak, StageTimer

    config = compose_run(
        f"num_stages={NUM_STAGES}",
        f"micro_batch_size={MICRO_BATCH_SIZE}",
        f"gradient_accumulation_steps={micro_batches}",
        f"max_seq_length={SEQ_LENGTH}",
        "precision=fp32",
        "activation_checkpoint_interval=0",
    )
    architecture = build_llama(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
    )
    engine = build_engine(architecture, config)
    batches = repeat_batch(MICRO_BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE)
    clock = StageTimer(engine, MemoryPeak(engine.device))

    def step(is_timed: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        if is_timed:
            clock.attach()
            clock.start_step()
        engine.train_step(batches, 0, 1)
        if is_timed:
            clock.finish_step()
            clock.detach()
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(3):
        step(True)
    timed, plain = [], []
    for pair in range(pairs):
        for is_timed in (True, False) if pair % 2 else (False, True):
            (timed if is_timed else plain).append(step(is_timed))
    return timed, plain, measure_alone(micro_batches)


def measure_alone(micro_batches: int, rounds: int = 200) -> float:
    """Seconds of a step whose units do nothing, timed, less those of the same step untimed; the least of a
    few."""
    from deepspeed.runtime.pipe import schedule

    from training.observability.stage_timer import MemoryPeak, StageTimer

    class Idle:
        device, observer = torch.device("cpu"), None

        def observe(self, observer: Any) -> None:
            self.observer = observer

        def train(self) -> None:
            for commands in schedule.TrainSchedule(micro_batches, NUM_STAGES, dist.get_rank()):
                for command in commands:
                    if self.observer is not None:
                        self.observer.before(type(command).__name__)
                        self.observer.after(type(command).__name__)

    engine: Any = Idle()
    clock = StageTimer(engine, MemoryPeak(engine.device))

    def seconds(is_timed: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        if is_timed:
            clock.start_step()
        engine.train()
        if is_timed:
            clock.finish_step()
        return time.perf_counter() - start

    plain = min(seconds(False) for _ in range(rounds))
    engine.observe(clock)
    return statistics.median(seconds(True) for _ in range(rounds)) - plain


if __name__ == "__main__":
    main()
