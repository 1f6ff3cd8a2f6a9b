"""Experts divided among ranks compute what whole ones do, wherever the routers send the rows: outputs, gradients of
hidden states and of router weights; gradients of experts are the sums over the ranks. Real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.experts import BOUNDS, E, K, build_experts, compute, difference
from support.workers import WorkerGroup

ROUTINGS = ("all experts", "one rank's", "one expert", "its own", "no tokens")


def route(routing: str, rank: int) -> torch.Tensor:
    """Return [N, K], the experts of a rank's tokens, of which each rank has another number."""
    torch.manual_seed(rank)
    num_tokens, half = 24 + 8 * rank, E // 2
    if routing == "no tokens" and rank == 1:
        return torch.zeros(0, K, dtype=torch.int64)
    if routing == "one expert":  # the others get no token, and a rank no row
        return torch.full((num_tokens, K), 3)
    if routing in ("one rank's", "its own"):
        return torch.rand(num_tokens, half).topk(K).indices + half * rank * (routing == "its own")
    return torch.rand(num_tokens, E).topk(K).indices


def compare_on_rank(model_type: str, routing: str) -> float:
    """Return the largest relative difference between whole and divided experts, in fp64."""
    from models.experts.grouped import GROUPED
    from models.parallel.shard import ExpertParallel
    from models.sharding.expert_parallel import divide_experts

    parallel = ExpertParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    index = route(routing, parallel.rank)
    whole, divided = (build_experts(model_type, torch.float64) for _ in range(2))
    divide_experts(divided, parallel)
    specs = divided.expert_specs
    assert list(specs) == [name for name, _ in whole.named_parameters()]
    expected, found = compute(whole, GROUPED, index), compute(divided, GROUPED, index)
    for number, spec in enumerate(specs.values(), start=len(expected) - len(specs)):
        dist.all_reduce(expected[number])
        expected[number] = spec.take(expected[number], parallel)
    zeros = [number for number, each in enumerate(expected) if not each.any()]  # of experts without a row
    assert not any(found[number].any() for number in zeros)
    others = [number for number in range(len(expected)) if number not in zeros]
    return difference([found[number] for number in others], [expected[number] for number in others])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_divided_experts_compute_what_whole_ones_do(
    workers: Callable[[int], WorkerGroup], model_type: str, routing: str
) -> None:
    for found in workers(2).run(compare_on_rank, model_type, routing):
        assert found < BOUNDS[torch.float64]


class CountExchanges:
    """An observer of exchanges."""

    number = 0

    def start_exchange(self) -> None:
        self.number += 1

    def finish_exchange(self) -> None: ...


def count_exchanges() -> list[int]:
    """Return the exchanges of a forward and a backward pass: kept, recomputed, and recomputed selectively."""
    from models.experts.grouped import GROUPED
    from models.parallel.shard import ExpertParallel
    from models.sharding.expert_parallel import divide_experts
    from training.config.schema import CheckpointMode
    from training.pipeline.activation_checkpoint import ActivationCheckpointing

    parallel = ExpertParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    experts, index = build_experts("qwen3_moe"), route("all experts", parallel.rank)
    divide_experts(experts, parallel)
    counts = []
    for mode in (None, CheckpointMode.grouped, CheckpointMode.selective):
        parallel.exchanges.observer = observer = CountExchanges()
        run = None if mode is None else partial(ActivationCheckpointing(1, mode).build_function(), experts)
        compute(experts, GROUPED, index, run)
        counts.append(observer.number)
    return counts


def test_selective_checkpointing_sends_nothing_twice(workers: Callable[[int], WorkerGroup]) -> None:
    """Counts, rows, weights and results; their gradients but for the counts; and what is recomputed."""
    for found in workers(2).run(count_exchanges):
        assert found == [4 + 3, 4 + 4 + 3, 4 + 3]
