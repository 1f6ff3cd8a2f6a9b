"""Measures what context parallelism saves and costs, on two ranks of one core each.

    python benchmarks/context.py [--rounds 3] [--memory_length 16384] [--longest 32768] [--mode ulysses]

Prints a rank's peak of activations at `memory_length`, against that of one rank with whole sequences; the time per
token against two replicas with as many tokens per step, at 4,096; the share of a step in exchanges, waiting for the
other rank included; and the time a token takes as sequences double from 2,048 to `longest`. About 10 minutes, a third
of them the longest sequences.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from batch import Batch, Targets
from benchmarks.allocation import AllocationPeak
from benchmarks.workload import build_engine, build_llama, compose_run, repeat_batch, run_ranks
from models.parallel.ring import Transfer

VOCAB_SIZE, COMPARED_LENGTH, SHORTEST = 4096, 4096, 2048
SEQUENCES = 2  # of a step whose time is taken
LAYERS = 2
# Of the memory's model: chunks of logits have one size at any length, which few layers would not outweigh
LAYERS_HELD = 16
ROUNDS_UP_TO = 8192  # tokens; of longer sequences one step takes minutes, and is measured once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory_length", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--mode", choices=["ulysses", "ring"], default="ulysses", help="context_parallel_mode")
    arguments = parser.parse_args()
    report_memory(arguments.memory_length, arguments.mode)
    report_time(arguments.rounds, arguments.mode)
    report_lengths(arguments.rounds, arguments.longest, arguments.mode)


def report_memory(seq_length: int, mode: str) -> None:
    shared, alone = (run_ranks(measure_memory, ranks, ranks, seq_length, mode)[0] for ranks in (2, 1))
    print(
        f"{seq_length:,} tokens: activations of a rank {shared / 2**20:,.0f} MiB, of one rank alone "
        f"{alone / 2**20:,.0f} MiB: {shared / alone:.2f} of it",
        flush=True,
    )


def report_time(rounds: int, mode: str) -> None:
    """Measures in turns, twice each, since the machine's speed drifts."""
    ratios, shares = [], []
    for _ in range(2):
        seconds, exchange_shares = run_ranks(measure_steps, 2, 2, COMPARED_LENGTH, mode, rounds)[0]
        replicas, _ = run_ranks(measure_steps, 2, 1, COMPARED_LENGTH, mode, rounds)[0]
        ratios.append(statistics.median(seconds) / statistics.median(replicas))
        shares += exchange_shares
    print(
        f"{COMPARED_LENGTH:,} tokens: a token takes {describe(ratios, '.2f')} of two replicas' time; "
        f"{describe(shares, '.1%')} of a step in exchanges",
        flush=True,
    )


def report_lengths(rounds: int, longest: int, mode: str) -> None:
    for length in (SHORTEST * 2**n for n in range((longest // SHORTEST).bit_length())):
        taken = rounds if length <= ROUNDS_UP_TO else 1
        seconds, shares = run_ranks(measure_steps, 2, 2, length, mode, taken)[0]
        a_token = [1e3 * second / (SEQUENCES * length) for second in seconds]
        print(
            f"{length:>7,} tokens: {describe(a_token, '.3f')} ms a token; {describe(shares, '.1%')} in exchanges",
            flush=True,
        )


def describe(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def build(
    context_parallel_size: int, seq_length: int, mode: str, sequences: int = SEQUENCES, num_layers: int = LAYERS
) -> Any:
    """The engine of so many sequences a step: one of each replica, or all of the ranks that share them."""
    config = compose_run(
        "num_stages=1",
        f"context_parallel_size={context_parallel_size}",
        f"context_parallel_mode={mode if context_parallel_size > 1 else 'auto'}",
        "micro_batch_size=1",
        f"global_batch_size={sequences}",
        f"max_seq_length={seq_length}",
        "precision=fp32",
        "activation_checkpoint_interval=0",
    )
    architecture = build_llama(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=seq_length,
    )
    return build_engine(architecture, config)


def repeat_part(engine: Any, context_parallel_size: int, seq_length: int) -> Iterator[Any]:
    """The rank's part of the same micro-batch, forever."""
    whole = next(repeat_batch(1, seq_length, VOCAB_SIZE))
    assert whole.inputs is not None and whole.targets is not None
    take = engine.module.ranks.sequence_part.take
    inputs = replace(whole.inputs, input_ids=take(whole.inputs.input_ids).contiguous())
    denominator = whole.targets.denominator / context_parallel_size
    return itertools.repeat(Batch(inputs, Targets.find(take(whole.targets.ids).contiguous(), denominator)))


def measure_memory(context_parallel_size: int, seq_length: int, mode: str) -> int:
    """Bytes that are allocated at once in a step, at most, beyond those at its start; of the rank with more."""
    engine = build(context_parallel_size, seq_length, mode, sequences=1, num_layers=LAYERS_HELD)
    with AllocationPeak() as counter:
        for length in (64, seq_length):  # after a short step the optimizer has its state
            start = counter.peak = counter.alive
            engine.train_step(repeat_part(engine, context_parallel_size, length), 0, 1)
    peak = torch.tensor(counter.peak - start)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def measure_steps(
    context_parallel_size: int, seq_length: int, mode: str, rounds: int
) -> tuple[list[float], list[float]]:
    """Returns (seconds of each step, the share of it in exchanges), after a short warm-up step."""
    engine = build(context_parallel_size, seq_length, mode)
    exchanging = 0.0
    owner, name = (Transfer, "receive") if mode == "ring" else (dist, "all_to_all_single")
    exchange = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        nonlocal exchanging
        start = time.perf_counter()
        received = exchange(*arguments, **named)
        exchanging += time.perf_counter() - start
        return received

    seconds, shares = [], []
    with patch.object(owner, name, timed):
        for length in (SHORTEST, *[seq_length] * rounds):
            batches = repeat_part(engine, context_parallel_size, length)
            dist.barrier()
            exchanging, start = 0.0, time.perf_counter()
            engine.train_step(batches, 0, 1)
            seconds.append(time.perf_counter() - start)
            shares.append(exchanging / seconds[-1])
    return seconds[1:], shares[1:]


if __name__ == "__main__":
    main()
