"""The forward pass that comes before a step, or an evaluation, of an objective whose loss needs something of all of its
samples (`Objective.pass_over`). It may be that of a frozen model that is in memory next to the one that is trained
(`PassOver.auxiliary`).

It is an engine's evaluation: in eval mode, so without dropout, with the adapter on. What it finds stays on the
devices, so the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data.options import Packing
from models.layers.documents import DocumentBounds
from training.config.schema import RunConfig
from training.engine.engine import Engine
from training.engine.steps import forward_in_groups
from training.objectives.objective import FirstPass
from training.objectives.registry import choose_packing, count_rows, get_objective


class RunFirstPass:
    """The first pass of the steps and evaluations of a run; all ranks call it together."""

    def __init__(self, engine: Engine, plan: FirstPass, bounds: DocumentBounds | None) -> None:
        """engine: of the model that is trained, or of an auxiliary one. bounds: those of any micro-batch's
        documents; None if unknown."""
        self._engine, self._plan, self._bounds = engine, plan, bounds

    @property
    def concludes(self) -> bool:
        """Whether an evaluation is this pass alone."""
        return self._plan.conclude is not None

    @property
    def by_group(self) -> bool:
        """Whether an evaluation runs this pass before each group of its micro-batches."""
        return self._plan.by_group

    def prepare(
        self,
        micro_batches: Iterator[Any] | None,
        num_micro_batches: int,
        num_samples: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the pass before a step, or before an evaluation of the same form or a group of it.

        micro_batches: of a loader's `first`. num_micro_batches: of one pipeline. num_samples: of all pipelines; of a
        group of an evaluation it is not known. check: as in `forward_in_groups`.
        """
        found = self._measure(micro_batches, num_micro_batches, check)
        if self._engine.module.has_loss:
            self._plan.receive(found, num_samples, self._engine.replicas)

    def evaluate(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Run an evaluation that is this pass alone; see `prepare`."""
        found = self._measure(micro_batches, num_micro_batches, check)
        if self._engine.module.has_loss:
            assert self._plan.conclude is not None
            self._plan.conclude(found, self._engine.replicas)

    def _measure(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, check: Callable[[], None]
    ) -> list[Any]:
        self._engine.module.expect_documents(self._bounds)
        return list(forward_in_groups(self._engine, micro_batches, num_micro_batches, self._plan.measure, check=check))


@dataclass(frozen=True)
class Resident:
    """A frozen model that is in memory next to the one that is trained, on the ranks of the same stages."""

    engine: Engine
    head: Any  # what the loss reads of it (`AuxiliaryModel.build_head`)


def build_first_pass(engine: Engine, config: RunConfig, auxiliary: Resident | None = None) -> RunFirstPass | None:
    """Build the first pass of the run's objective; None where there is none. auxiliary: what runs it, if
    any."""
    objective = get_objective(config)
    if objective.pass_over(config) is None:
        return None
    # The documents that a user-defined collator makes of rows are unknown; those of packed rows are read from them.
    is_known = config.data.collator is None and choose_packing(config) is Packing.NONE
    rows = engine.layout.micro_batch_size * count_rows(config)
    bounds = DocumentBounds(rows, config.max_seq_length) if is_known else None
    plan = objective.before_step(config, engine.module.loss_fn)
    return RunFirstPass(engine if auxiliary is None else auxiliary.engine, plan, bounds)
