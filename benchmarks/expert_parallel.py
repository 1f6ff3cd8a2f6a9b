"""Measures what dividing experts saves and costs, on two ranks of one core each.

    python benchmarks/expert_parallel.py [--rounds 9] [--precisions fp32 bf16] [--tiny]

Two replicas with all experts against the same two with half of them each (`expert_parallel_size=2`), of the same global
batch: what a rank has allocated after a step, at its peak, and by the plan, given the measured load of the rank with
most rows (`moe.imbalance`); of the weights and sums of experts, the share of those of a rank with all of them; the time
of a step, and the share of it in exchanges, waiting for the other rank included. Of a small model, whose steps show the
exchanges, and of one whose experts are most of the work. Steps are taken in turns in one process for each rank, since
the machine's speed drifts. --tiny: small ones, to see that it works.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from benchmarks.allocation import AllocationPeak
from benchmarks.workload import RandomWeights, build_engine, compose_run, repeat_batch, run_alone, run_ranks
from data.loading.step_totals import StepTotals

VOCAB_SIZE, LAYERS, EXPERTS, ACTIVE, RANKS = 2048, 2, 16, 4, 2
# hidden size, width of an expert, tokens of a micro-batch
SIZES = {"small": (256, 256, 256), "experts are most of the work": (512, 1408, 1024)}
TINY = {"tiny": (32, 32, 32)}
SUM_BYTES = 4  # of an accumulated gradient
MICRO_BATCHES = 2


class Clock:
    """Observes exchanges. seconds: in them, since it was set to 0."""

    seconds = 0.0

    def start_exchange(self) -> None:
        self._start = time.perf_counter()

    def finish_exchange(self) -> None:
        self.seconds += time.perf_counter() - self._start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    print(f"{RANKS} ranks, {EXPERTS} experts, {ACTIVE} of each token, {arguments.rounds} rounds")
    for (name, sizes), precision in itertools.product(
        (TINY if arguments.tiny else SIZES).items(), arguments.precisions
    ):
        report_memory(name, sizes, precision)
        report_time(name, sizes, precision, arguments.rounds)


def report_memory(name: str, sizes: tuple[int, int, int], precision: str) -> None:
    whole, divided = (run_ranks(measure_memory, RANKS, size, sizes, precision)[0] for size in (1, RANKS))
    share = (whole.experts - (whole.alive - divided.alive)) / whole.experts
    print(
        f"{name}, {precision}: a rank has {divided.alive / 2**20:,.1f} MiB, with all experts "
        f"{whole.alive / 2**20:,.1f}; of weights and sums of experts {share:.1%}"
    )
    for what, size, found in (("divided", RANKS, divided), ("all experts", 1, whole)):
        planned = run_alone(plan_peak, size, sizes, precision, found.load)
        print(
            f"{name}, {precision}: {what}, load {found.load:.2f}: at its peak {found.peak / 2**20:,.1f} MiB, by the "
            f"plan {planned / 2**20:,.1f} ({planned / found.peak - 1:+.1%})",
            flush=True,
        )


def report_time(name: str, sizes: tuple[int, int, int], precision: str, rounds: int) -> None:
    ratios, shares = run_ranks(measure_steps, RANKS, sizes, precision, rounds)[0]
    print(
        f"{name}, {precision}: a step takes {statistics.median(ratios):.2f} of that with all experts "
        f"({min(ratios):.2f} - {max(ratios):.2f}); {statistics.median(shares):.1%} of it in exchanges",
        flush=True,
    )


def describe(
    expert_parallel_size: int, sizes: tuple[int, int, int], precision: str, imbalance: float = 1
) -> tuple[Qwen3MoeConfig, Any]:
    """Return a model's config and its run's."""
    hidden_size, expert_size, seq_length = sizes
    config = compose_run(
        "num_stages=1",
        f"expert_parallel_size={expert_parallel_size}",
        f"moe.imbalance={imbalance}",
        "micro_batch_size=1",
        f"global_batch_size={RANKS * MICRO_BATCHES}",
        f"max_seq_length={seq_length}",
        f"precision={precision}",
        "activation_checkpoint_interval=0",
    )
    architecture = Qwen3MoeConfig(
        hidden_size=hidden_size, intermediate_size=expert_size, moe_intermediate_size=expert_size,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden_size // 4,
        vocab_size=VOCAB_SIZE, num_experts=EXPERTS, num_experts_per_tok=ACTIVE, norm_topk_prob=True,
        max_position_embeddings=seq_length, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    architecture._attn_implementation = "sdpa"
    return architecture, config


def build(expert_parallel_size: int, sizes: tuple[int, int, int], precision: str) -> tuple[Any, Any]:
    """Return the engine and its batches."""
    architecture, config = describe(expert_parallel_size, sizes, precision)
    return build_engine(architecture, config), repeat_batch(1, sizes[-1], VOCAB_SIZE)


class Measured(NamedTuple):
    """Bytes of the rank with more of them: after two steps, at its peak, and of its experts' weights and sums. load:
    rows of the rank whose experts get most, as a multiple of an even share."""

    alive: int
    peak: int
    experts: int
    load: float


def measure_memory(expert_parallel_size: int, sizes: tuple[int, int, int], precision: str) -> Measured:
    from training.pipeline.routers import MOST_LOADED_RANK

    num_rows, seq_length = RANKS * MICRO_BATCHES, sizes[-1]
    totals = StepTotals(num_rows * seq_length, num_rows * (seq_length - 1), num_rows, num_rows)
    with AllocationPeak() as counter:
        engine, batches = build(expert_parallel_size, sizes, precision)
        counter.peak = counter.alive  # loading is not of a step
        for _ in range(2):  # after the first the optimizer has its state
            engine.train_step(batches, 0, 1, totals=totals)
        counted = torch.tensor([counter.alive, counter.peak])
    dist.all_reduce(counted, dist.ReduceOp.MAX)
    experts = (each for name, each, _ in engine.module.named_hf_parameters() if ".experts." in name)
    expert_bytes = sum(each.numel() * (each.element_size() + SUM_BYTES) for each in experts)
    alive, peak = counted.tolist()
    load = engine.module.routers.finish_interval()[MOST_LOADED_RANK] if expert_parallel_size > 1 else 1
    return Measured(alive, peak, expert_bytes, load)


def plan_peak(expert_parallel_size: int, sizes: tuple[int, int, int], precision: str, load: float) -> int:
    """Return the bytes of a rank at its peak by the plan, of a GPU: a CPU's copy of a gradient, made while it is added,
    is no tensor that `AllocationPeak` would see."""
    from training.config.schema import Device
    from training.cost_terms.table import HOST_BYTES_A_RANK
    from training.costs.hardware import Machine
    from training.planner.plan import plan_resolved
    from training.resolution.resolve import resolve
    from training.resolution.target import Target

    architecture, config = describe(expert_parallel_size, sizes, precision, load)
    run = resolve(config, RandomWeights(architecture), Target(RANKS, has_accelerator=False))
    machine = Machine(
        name="any", device=Device.cuda, cards_per_node=8, memory=1, usable_memory=1, peak_flops={precision: 1},
        efficiency=1, memory_bandwidth=1, intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory=1,
        host_memory_bandwidth=1, host_link_bandwidth=1, device_name="any",
    )  # fmt: skip
    memory = plan_resolved(run, machine).stages[0].memory
    return memory.peak + memory.host - HOST_BYTES_A_RANK


def measure_steps(sizes: tuple[int, int, int], precision: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return, for each round, the ratio of a step with divided experts to one with all of them, and the share of the
    former in exchanges."""

    runs, clock = {size: build(size, sizes, precision) for size in (1, RANKS)}, Clock()
    runs[RANKS][0].module.ranks.expert_parallel.exchanges.observer = clock
    ratios, shares = [], []
    for _ in range(1 + rounds):
        seconds = {}
        for size, (engine, batches) in runs.items():
            dist.barrier()
            clock.seconds, start = 0.0, time.perf_counter()
            engine.train_step(batches, 0, 1)
            seconds[size] = time.perf_counter() - start
        ratios.append(seconds[RANKS] / seconds[1])
        shares.append(clock.seconds / seconds[RANKS])
    return ratios[1:], shares[1:]


if __name__ == "__main__":
    main()
