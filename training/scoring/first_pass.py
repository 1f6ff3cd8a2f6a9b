"""The forward pass that comes before a step, or an evaluation, of an objective whose loss needs a mean over all of its
samples (`Objective.needs_first_pass`).

It is the engine's evaluation: in eval mode, so without dropout, with the adapter on. The mean stays on the devices, so
the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from models.layers.documents import DocumentBounds
from training.config.schema import RunConfig
from training.engine.engine import Engine
from training.engine.steps import forward_in_groups
from training.objectives.objective import FirstPass
from training.objectives.registry import get_objective


class RunFirstPass(Protocol):
    """The first pass of a step or an evaluation; all ranks call it before that."""

    def __call__(
        self,
        micro_batches: Iterator[Any] | None,
        num_micro_batches: int,
        num_samples: int,
        check: Callable[[], None] = ...,
    ) -> None:
        """micro_batches: of a loader's `first`. num_micro_batches: of one pipeline. num_samples: of all pipelines.
        check: as in `forward_in_groups`."""


def build_first_pass(engine: Engine, config: RunConfig) -> RunFirstPass | None:
    """Build the first pass of the run's objective; None where it does not need one."""
    objective = get_objective(config)
    if not objective.needs_first_pass:
        return None
    plan = objective.plan_first_pass(engine.module.loss_fn)
    # The documents that a user-defined collator makes of rows are unknown.
    is_known = config.data.collator is None
    bounds = DocumentBounds(engine.layout.micro_batch_size, config.max_seq_length) if is_known else None
    return partial(_run_first_pass, engine, plan, bounds)


def _run_first_pass(
    engine: Engine,
    plan: FirstPass,
    bounds: DocumentBounds | None,
    micro_batches: Iterator[Any] | None,
    num_micro_batches: int,
    num_samples: int,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Pass the mean over `num_samples` samples to the loss of each rank. bounds: those of any micro-batch's documents;
    None if unknown.
    """
    engine.module.expect_documents(bounds)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for output in forward_in_groups(engine, micro_batches, num_micro_batches, plan.measure, check=check):
        if engine.module.reports_loss:
            total += output
    dist.all_reduce(total)
    plan.receive(total / num_samples)
