"""The means that an objective reports, of the steps that count and of an evaluation."""

from __future__ import annotations

import pytest
import torch

from models.losses.metric_sums import MetricSums
from training.objectives import objective
from training.objectives.objective import Metrics


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> MetricSums:
    monkeypatch.setattr(objective.dist, "all_reduce", lambda totals: None)  # one rank
    return MetricSums("margin", "accuracy")


def add(sums: MetricSums, margin: float, accuracy: float, num_terms: int) -> None:
    sums.add(torch.tensor([margin, accuracy]), torch.tensor([num_terms, 2 * num_terms]))


def test_a_step_that_does_not_count_is_in_no_mean(sums: MetricSums) -> None:
    metrics = Metrics((sums,), torch.device("cpu"))
    add(sums, 3.0, 1.0, 1)
    metrics.add_step(counts=True)
    add(sums, 1000.0, 1000.0, 1)
    metrics.add_step(counts=False)
    add(sums, 1.0, 3.0, 1)
    add(sums, 2.0, 2.0, 2)
    metrics.add_step(counts=True)
    assert metrics.finish_interval() == {"margin": 6 / 4, "accuracy": 6 / 8}
    assert metrics.finish_interval() == {}


def test_an_evaluation_is_apart_from_the_steps_around_it(sums: MetricSums) -> None:
    other = MetricSums("loss")
    metrics = Metrics((sums, other), torch.device("cpu"), lambda device: {"f1": 0.5})
    add(sums, 3.0, 1.0, 1)
    metrics.add_step(counts=True)
    add(sums, 8.0, 4.0, 2)
    assert metrics.finish_evaluation() == {"eval_margin": 4.0, "eval_accuracy": 1.0, "eval_f1": 0.5}
    other.add(torch.tensor([5.0]), 2)
    metrics.add_step(counts=True)
    assert metrics.finish_interval() == {"margin": 3.0, "accuracy": 0.5, "loss": 2.5}
