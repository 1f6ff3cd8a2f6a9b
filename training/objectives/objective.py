"""The interface of objectives: the columns and rows of a sample, the loss and what it is a mean over, the metrics.

An objective is one file in this folder and one line in the table of `registry.py`. Checks, loaders, the planner, the
loop and the evaluation use this interface, never an objective's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from data.options import MeanOver, RowTargets
from errors import UserError
from models.heads.head import Head, Labels
from models.heads.sentence_transformers import SentenceModel
from models.losses.cross_entropy import Loss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.incompatible import write_value
from training.config.schema import DataConfig, DistillConfig


@dataclass(frozen=True)
class ObjectiveOptions:
    """The keys of a run that its objective reads (`registry.build_objective_options` builds it).

    keys: the group of the objective's name, such as a DPOConfig; None where it has none. is_user_loss: a user-defined
    loss replaces next-token cross entropy. rows_per_sample: as `Objective.count_rows` says. distill: None
    without a teacher.
    """

    keys: Any = None
    label_smoothing: float = 0.0
    eval_token_accuracy: bool = False
    is_user_loss: bool = False
    rows_per_sample: int = 1
    mtp_loss_coef: float = 0.0
    distill: DistillConfig | None = None


class Metrics(Protocol):
    """The metrics of an objective in addition to the loss. Every rank has one; only ranks with the loss add values."""

    def add_step(self, counts: bool) -> None:
        """Add the last step to the interval, or discard it where it does not count."""
        ...

    def finish_interval(self) -> dict[str, float]:
        """Return name -> value over the steps since the last call; empty without steps. All ranks call it."""
        ...

    def finish_evaluation(self) -> dict[str, float]:
        """Return name (`eval_...`) -> value over the evaluation since the last step. All ranks call it."""
        ...


class TotalsLoss(Protocol):
    """A loss that also sums its metrics."""

    metrics: tuple[str, ...]

    def take_totals(self) -> torch.Tensor | None:
        """Return the sums of `metrics` since the last call, and the number of terms in each: float64 [2, K]; None
        without terms.
        """
        ...


class ReportedMeans:
    """Means over the ranks that hold the loss, returned on every rank. A mean over no terms is omitted."""

    def __init__(self, loss: TotalsLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def add_step(self, counts: bool) -> None:
        """Add the last step's totals to the interval, or discard them."""
        totals = self._loss.take_totals()
        if counts and totals is not None:
            self._interval += totals

    def finish_interval(self) -> dict[str, float]:
        """Return the means over the steps since the last call; empty without steps. All ranks call it."""
        totals, self._interval = self._interval, self._zeros()
        return self._compute_means(totals)

    def finish_evaluation(self) -> dict[str, float]:
        """Return the means over the evaluation since the last step. All ranks call it."""
        totals = self._loss.take_totals()
        means = self._compute_means(self._zeros() if totals is None else totals)
        return {f"eval_{name}": mean for name, mean in means.items()}

    def _compute_means(self, totals: torch.Tensor) -> dict[str, float]:
        dist.all_reduce(totals)
        sums, counts = totals.tolist()
        return {
            name: total / count for name, total, count in zip(self._loss.metrics, sums, counts, strict=True) if count
        }

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(2, len(self._loss.metrics), dtype=torch.float64, device=self._device)


@dataclass(frozen=True)
class FirstPass:
    """The forward pass before a step or an evaluation.

    measure: computes a tensor per micro-batch, in place of the loss. receive: is called before the step on the ranks
    that hold the loss, with the tensors of this rank's micro-batches, the number of samples of the whole step, and the
    group of ranks that hold the same stage for other samples. conclude: is called in its place for an evaluation;
    None where that then runs as a step does, after `receive`. Otherwise there is no other pass, and the objective's
    metrics include `eval_loss`.
    """

    measure: Loss
    receive: Callable[[Sequence[torch.Tensor], int, ProcessGroup], None]
    conclude: Callable[[Sequence[torch.Tensor], ProcessGroup], None] | None = None


class Objective:
    """One objective; its defaults are those of next-token cross entropy.

    name: its value of `task`, and the group of its own keys where it has any.
    data_kinds: kinds of data that it can be trained on, in addition to those whose default it is
        (`data/encoders/kinds.py`).
    unit: what messages call its samples.
    mean_over: the terms that the loss of a global batch is a mean over; their number is the denominator that travels
    with
        the targets.
    needs_reference: the reference model scores each row before training; its log-probability travels with the targets
        as one more column (`reference_logprobs.py`).
    smooths_labels: its loss reads `label_smoothing`.
    predicts_further: its loss may include that of further tokens (`mtp.loss_coef`).
    distills: its loss reads `distill`.
    remakes_logits: the backward pass computes the logits again, since the gradient of a token is not known in the
        forward pass.
    needs_first_pass: the loss needs something of all samples of a step, or of an evaluation, before the first of them:
        a forward pass without gradients comes first (`first_pass.py`, `plan_first_pass`).
    needs_mismatched: the first pass is over mismatched answers (`data/storage/mismatched.py`) instead of the samples
        themselves. Whether an answer is desirable travels with the targets.
    head: what takes the place of the LM head (`models/heads/`); None where nothing does. `name_labels` says how many
        outputs it has.
    row_targets: the positions of a row that the loss is computed from.
    reads_sample_labels: each document has labels, which travel with the targets.
    """

    name: str
    data_kinds: tuple[str, ...] = ()
    unit = "samples"
    mean_over = MeanOver.targets
    needs_reference = False
    remakes_logits = False
    smooths_labels = False
    predicts_further = False
    distills = False
    needs_first_pass = False
    needs_mismatched = False
    head: Head | None = None
    row_targets = RowTargets.next_tokens
    reads_sample_labels = False

    def count_rows(self, data: DataConfig) -> int:
        """Return the rows of a micro-batch that a sample fills; they stay together."""
        return 1

    def count_batch_bytes(self, options: ObjectiveOptions, global_batch_size: int, hidden_size: int) -> int:
        """Return the bytes that the loss of an objective with a head takes for all of a global batch."""
        return 0

    def name_labels(self, data: DataConfig) -> Labels:
        """Return the outputs of its head, of an objective that has one."""
        raise NotImplementedError

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError for a tokenizer that it cannot be trained with."""

    def describe_vectors(
        self, options: ObjectiveOptions, data: DataConfig, hidden_size: int, max_seq_length: int
    ) -> SentenceModel | None:
        """Return how its exports make vectors of texts; None where they make none."""
        return None

    def describe(self, options: ObjectiveOptions) -> dict[str, str]:
        """Return what a run must keep to continue with the same loss: name -> value."""
        return {}

    def describe_keys(self, options: ObjectiveOptions) -> dict[str, str]:
        """Return all of its own keys, for `describe`."""
        keys = options.keys
        values = {f"{self.name}.{each.name}": getattr(keys, each.name) for each in fields(keys)}
        return {key: f"{value:g}" if isinstance(value, float) else write_value(value) for key, value in values.items()}

    def build_loss(
        self,
        options: ObjectiveOptions,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss | None:
        """Build the loss of the last stage; None for next-token cross entropy, which a user-defined loss may replace.

        parallel: the ranks that share the head. sequence_part: those that share each sequence.
        """
        return None

    def plan_first_pass(self, loss: Loss) -> FirstPass:
        """Return the first pass of an objective that needs one. loss: what `build_loss` built."""
        raise NotImplementedError

    def list_metrics(self, options: ObjectiveOptions) -> tuple[str, ...] | None:
        """Return the metrics of evaluations besides the loss, without "eval_"; None if unknown before the first."""
        return () if type(self).build_metrics is Objective.build_metrics else None

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics | None:
        """Build the metrics; None where only the loss is reported. loss: what `build_loss` built."""
        return None


def check_pad_token(tokenizer: PreTrainedTokenizerBase, task: str) -> None:
    """Raise UserError for a tokenizer whose pad token is missing or is also its end token: `transformers` scores the
    last token that is not the pad token, which would be the one before the end token.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        which = "none" if tokenizer.pad_token_id is None else f"its end token, '{tokenizer.eos_token}'"
        raise UserError(
            f"task={task}: the tokenizer's pad token is {which}; transformers scores the last token that is not "
            "padding, so the pad token must differ from it: convert2ckpt.py --pad_token '<pad>' adds it"
        )
