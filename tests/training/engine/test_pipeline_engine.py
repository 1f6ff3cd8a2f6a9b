"""A step of the engine around a stage and a runner that only record: what it sets before the passes and after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import build_config

from data.loading.step_totals import StepTotals
from models.layers.documents import DocumentBounds
from training.distributed.topology import Layout, Topology
from training.engine.deepspeed_backed import choose_seed
from training.engine.pipeline_engine import PipelineStage
from training.optim.parameter_groups import LR_RATIO

CONFIG = build_config("learning_rate=1", "lr_scheduler_type=linear", "warmup_ratio=0", "min_lr_ratio=0")


class Recorded(PipelineStage):
    """A stage of one, whose second step is skipped."""

    def __init__(self) -> None:
        self._config, self.layout, self.rank, self.device = CONFIG, Layout(Topology.of(1), 2, 4), 0, torch.device("cpu")
        self.seen: list[tuple[str, Any]] = []
        note: Any = lambda name: lambda value: self.seen.append((name, value))  # noqa: E731
        routers = SimpleNamespace(
            start_step=lambda *given, compares: self.seen.append(("routers", (*given, compares))),
            finish_step=lambda was_taken: self.seen.append(("taken", was_taken)),
        )
        self.module: Any = SimpleNamespace(
            expect_documents=note("documents"), seed_noise=note("noise"), routers=routers
        )
        self.groups = [{LR_RATIO: 1.0}, {LR_RATIO: 0.5}]
        self.wrapped = SimpleNamespace(optimizer=SimpleNamespace(param_groups=self.groups, overflow=False))
        self._transfers: Any = SimpleNamespace(forget_shapes=lambda: None)
        self._runner: Any = SimpleNamespace(start_step=lambda: "a step", run=self.run, update=lambda: None)

    def run(self, program: Any, batches: Any) -> list[torch.Tensor]:
        self.seen.append((program, torch.rand(()).item()))
        return [torch.tensor(2.0)]

    def _average(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return losses[0]


@pytest.mark.parametrize("was_skipped", [False, True])
def test_a_step_sets_what_follows_from_its_number_and_its_batch(was_skipped: bool) -> None:
    engine, totals = Recorded(), StepTotals(100, 10, 1, 1, most_documents=7, longest_document=20)
    engine.wrapped.optimizer.overflow = was_skipped
    loss, learning_rate = engine.train_step(iter(()), 1, 3, totals)
    assert (loss.item(), learning_rate) == (2.0, 0.5)
    assert [group["lr"] for group in engine.groups] == [0.5, 0.25]
    torch.manual_seed(choose_seed(CONFIG, engine.layout.topology, 0, 1))
    assert engine.seen == [
        ("documents", DocumentBounds(7, 20)),
        ("noise", hash((CONFIG.seed, 1))),
        ("routers", (totals, 1.0, False)),
        ("a step", torch.rand(()).item()),
        ("taken", not was_skipped),
    ]


def test_routers_compare_their_choices_at_logged_steps_and_at_the_last() -> None:
    engine, totals = Recorded(), StepTotals(100, 10, 1, 1)
    every = CONFIG.logging_steps
    assert every > 1
    for step, is_last in ((every - 1, False), (every, False), (every, True)):
        engine.train_step(iter(()), step, 2 * every, totals, is_last)
    assert [value[-1] for name, value in engine.seen if name == "routers"] == [True, False, True]


def test_documents_that_the_host_does_not_know_are_read_from_each_micro_batch() -> None:
    engine = Recorded()
    engine.train_step(iter(()), 0, 4, None)
    engine.train_step(iter(()), 1, 4, StepTotals(100, 10, 1, 1))
    assert [value for name, value in engine.seen if name == "documents"] == [None, None]
