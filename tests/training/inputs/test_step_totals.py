"""Step totals on every rank, from the one that reads inputs."""

from __future__ import annotations

from collections.abc import Callable

from support.workers import WorkerGroup

from data.loading.loader import PlaceholderLoader
from data.loading.step_totals import StepTotals

LAST_STEP = 40


class Loader:
    """A loader whose steps all have different totals."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def step_totals(self, step: int) -> StepTotals:
        self.asked.append(step)
        return StepTotals(*range(2**40 * step, 2**40 * step + 6))


def read_totals(first_step: int) -> tuple[list[StepTotals], list[int]]:
    """On a rank: the totals of the steps of a run, and the steps that this rank's loader computed."""
    import torch.distributed as dist

    from training.inputs.step_totals import SharedTotals

    loader = Loader() if dist.get_rank() == 0 else PlaceholderLoader(LAST_STEP)
    totals = SharedTotals(loader, LAST_STEP)
    return [totals.get(step) for step in range(first_step, LAST_STEP)], getattr(loader, "asked", [])


def test_a_rank_without_data_has_the_totals_too(workers: Callable[[int], WorkerGroup]) -> None:
    (first, asked), (other, none) = workers(2).run(read_totals, 3)
    assert other == first == [Loader().step_totals(step) for step in range(3, LAST_STEP)]
    assert asked == list(range(3, LAST_STEP)) and none == []  # each once, and none after the last
