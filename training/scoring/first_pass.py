"""The forward pass that comes before a step, or an evaluation: of an objective whose loss needs something of all of its
samples (`Objective.pass_over`), or of a teacher that is in memory next to its student (`distill.online`).

It is an engine's evaluation: in eval mode, so without dropout, with the adapter on. What it finds stays on the
devices, so the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data.encoders.kinds import find_kind
from data.options import Packing
from models.layers.documents import DocumentBounds
from models.losses.distill_loss import OnlineTeacherTerm, TeacherHead
from models.losses.token_loss import TokenLoss
from training.config.schema import RunConfig
from training.engine.engine import Engine
from training.engine.steps import forward_in_groups
from training.objectives.objective import FirstPass
from training.objectives.registry import get_objective


class RunFirstPass:
    """The first pass of the steps and evaluations of a run; all ranks call it together."""

    def __init__(self, engine: Engine, plan: FirstPass, bounds: DocumentBounds | None) -> None:
        """engine: of the student, or of its teacher. bounds: those of any micro-batch's documents; None if unknown."""
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
class OnlineTeacher:
    """A teacher that is in memory next to its student, on the ranks of the same stages."""

    engine: Engine
    head: TeacherHead

    def plan_pass(self, loss: TokenLoss) -> FirstPass:
        """Return the pass before a step of the student. loss: of its last stage."""
        (term,) = (each for each in loss.terms if isinstance(each, OnlineTeacherTerm))
        return FirstPass(
            self.head.take, lambda states, num_samples, replicas: term.take_states(self.head, states), by_group=True
        )


def build_first_pass(engine: Engine, config: RunConfig, teacher: OnlineTeacher | None = None) -> RunFirstPass | None:
    """Build the first pass of the run's objective, or of its teacher; None where there is none."""
    objective = get_objective(config)
    # The documents that a user-defined collator makes of rows are unknown; those of packed rows are read from them.
    is_packed = find_kind(config.data.name).choose_packing(config.data.packing) is not Packing.NONE
    is_known = config.data.collator is None and not is_packed
    rows = engine.layout.micro_batch_size * objective.group_size(config.data)
    bounds = DocumentBounds(rows, config.max_seq_length) if is_known else None
    if teacher is not None:
        return RunFirstPass(teacher.engine, teacher.plan_pass(engine.module.loss_fn), bounds)
    if objective.pass_over is None:
        return None
    return RunFirstPass(engine, objective.before_step(engine.module.loss_fn), bounds)
