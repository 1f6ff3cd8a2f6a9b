"""The evaluation of a run: each of its evaluation files through the pipeline, and one record of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from errors import UserError
from training.distributed.ranks import raise_together
from training.engine.engine import Engine
from training.engine.steps import evaluate
from training.inputs.step_budget import EvalSize
from training.objectives.objective import Metrics
from training.observability.metrics import Record
from training.scoring.first_pass import RunFirstPass


def check_metric(metric: str, found: Record, is_main: bool) -> None:
    """Raise UserError, together on all ranks, for a metric that is not in the record. All ranks call it."""
    error = None
    if metric not in found and is_main:
        error = UserError(
            f"metric_for_best_model: '{metric}' is not reported by this run's evaluations; give one of "
            f"{', '.join(key for key in found if not key.endswith('_tokens'))}"
        )
    if metric not in found:
        raise_together(error)


class Evaluations:
    """The evaluations of a run; the same on all ranks, which run them together."""

    def __init__(
        self,
        engine: Engine,
        loaders: Mapping[str, Any],
        sizes: Mapping[str, EvalSize],
        metrics: Metrics,
        first_pass: RunFirstPass | None = None,
    ) -> None:
        """loaders, sizes: by the names of the evaluation files; the name of a single file is empty. metrics: what the
        objective reports in addition to the loss. first_pass: what its loss needs before each file."""
        self._engine, self._loaders, self._sizes, self._metrics = engine, loaders, sizes, metrics
        self._first_pass = first_pass

    def __bool__(self) -> bool:
        return bool(self._loaders)

    def run(self, check: Callable[[], None] = lambda: None) -> Record:
        """Evaluate, and return `eval_loss`, the objective's metrics and `eval_tokens`, the same on every rank.

        check: called by all ranks now and then, to end the evaluation by an exception.
        Several files have separate fields (`eval_NAME_loss`, ...), and `eval_loss` is the mean over the targets, or the
        pairs, of all files, as if they were one.
        """
        found = {name: self._evaluate(name, check) for name in self._loaders}
        if list(found) == [""]:
            return found[""]
        terms = {name: self._sizes[name].terms for name in found}
        loss = sum(record["eval_loss"] * terms[name] for name, record in found.items()) / sum(terms.values())
        named = {
            f"eval_{name}_{key.removeprefix('eval_')}": value
            for name, record in found.items()
            for key, value in record.items()
        }
        return {"eval_loss": loss, **named, "eval_tokens": sum(size.targets for size in self._sizes.values())}

    def _evaluate(self, name: str, check: Callable[[], None]) -> Record:
        loader, size = self._loaders[name], self._sizes[name]
        check()
        found: dict[str, float] = {}
        if self._first_pass is not None and self._first_pass.concludes:
            self._first_pass.evaluate(loader.iterate(), len(loader), check)
        else:
            found["eval_loss"] = evaluate(
                self._engine, loader.iterate(), len(loader), size.terms, bounds=size.documents, check=check,
                prepare=self._prepare(loader, size, check),
            )  # fmt: skip
        return {**found, **self._metrics.finish_evaluation(), "eval_tokens": size.targets}

    def _prepare(self, loader: Any, size: EvalSize, check: Callable[[], None]) -> Callable[[int], None]:
        """Run the first pass over a file that is due before all of it. Return the function that runs one that is due
        before each group of its micro-batches, given their number."""
        first = self._first_pass
        if first is not None and first.by_group:
            micro_batches = loader.first.iterate()
            return lambda in_group: first.prepare(micro_batches, in_group, size.terms)
        if first is not None:
            first.prepare(loader.first.iterate(), len(loader.first), size.terms, check)
        return lambda in_group: None
