"""The cost of tensor parallelism against stages and replicas: step times of the same global batch, and the share of
them in the ranks' sums.

    python benchmarks/tensor_parallel.py [--rounds 15] [--ranks 2] [--hidden_size 512]

One rank a core. The layouts take steps in turns of a round, each in processes of its own; printed are the median over
the rounds of the ratio to the first layout's step, and of the share of a step that `all_reduce` takes of the
tensor-parallel group, waiting for the other ranks included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from benchmarks.workload import build_engine, build_llama, compose_run, repeat_batch, run_ranks

MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 2, 32, 128, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=512)
    arguments = parser.parse_args()
    ranks = arguments.ranks
    layouts = {f"pp{ranks}": (ranks, 1), f"tp{ranks}": (1, ranks), f"dp{ranks}": (1, 1)}
    if ranks % 4 == 0:
        layouts |= {f"tp2 x pp{ranks // 2}": (ranks // 2, 2)}
    measured = {
        name: run_ranks(measure, ranks, *layout, arguments.hidden_size, arguments.rounds)[0]
        for name, layout in layouts.items()
    }
    first = statistics.median(measured[next(iter(layouts))][0])
    print(
        f"{ranks} ranks, hidden {arguments.hidden_size}, {GLOBAL_BATCH_SIZE} samples of {SEQ_LENGTH} tokens a step, "
        f"{arguments.rounds} rounds"
    )
    for name, (seconds, shares) in measured.items():
        step = statistics.median(seconds)
        print(
            f"{name:>10}  step {step * 1000:7.0f} ms  {step / first:.2f} x  sums over the ranks "
            f"{statistics.median(shares):.1%} of it"
        )


def measure(
    num_stages: int, tensor_parallel_size: int, hidden_size: int, rounds: int
) -> tuple[list[float], list[float]]:
    """(seconds of each step, the share of it in sums over the tensor-parallel group)."""

    config = compose_run(
        f"num_stages={num_stages}",
        f"tensor_parallel_size={tensor_parallel_size}",
        f"micro_batch_size={MICRO_BATCH_SIZE}",
        f"global_batch_size={GLOBAL_BATCH_SIZE}",
        f"max_seq_length={SEQ_LENGTH}",
        "precision=fp32",
        "activation_checkpoint_interval=0",
    )
    architecture = build_llama(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB_SIZE,
    )
    engine = build_engine(architecture, config)
    batches = repeat_batch(MICRO_BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE)
    in_sums = 0.0
    plain_sum = dist.all_reduce

    def timed_sum(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_sums
        start = time.perf_counter()
        work = plain_sum(*args, **kwargs)
        in_sums += (time.perf_counter() - start) * (
            kwargs.get("group") is engine.module.ranks.parallel.group is not None
        )
        return work

    seconds, shares = [], []
    with patch.object(dist, "all_reduce", timed_sum):
        for _ in range(2 + rounds):
            dist.barrier()
            in_sums, start = 0.0, time.perf_counter()
            engine.train_step(batches, 0, 1)
            seconds.append(time.perf_counter() - start)
            shares.append(in_sums / seconds[-1])
    return seconds[2:], shares[2:]


if __name__ == "__main__":
    main()
