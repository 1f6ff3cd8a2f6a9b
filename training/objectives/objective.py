"""The contract of objectives: what a sample is, which columns travel with it, the loss and what it is a mean over, and
what is reported besides.

An objective is one file in this folder and one line in the table of `registry.py`. Checks, loaders, the planner, the
loop and the evaluation use this contract, never an objective's name. What changes the loss of some objectives, such as
`label_smoothing`, is a `Modifier` (`modifiers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from batch import Column, Targets
from data.loading.columns import ReadColumn
from data.options import MeanOver, RowTargets
from data.storage.scores import Scores
from errors import UserError
from models.heads.head import Head, Labels
from models.losses.cross_entropy import Loss
from models.losses.metric_sums import MetricSums
from models.parallel.shard import NO_CP, NO_TP, ContextParallel, TensorParallel
from training.config.incompatible import write_value
from training.config.schema import DataConfig, RunConfig


@dataclass(frozen=True)
class LastStage:
    """The stage that computes the loss."""

    architecture: PretrainedConfig
    parallel: TensorParallel = NO_TP  # the ranks that share the head
    sequence_part: ContextParallel = NO_CP  # the ranks that share each sequence
    auxiliary: Any = None  # what the loss reads of a frozen model that is in memory next to this one


class Metrics:
    """The metrics that are reported besides the loss: means over the terms of all ranks. A mean over no terms is
    omitted.

    Every rank has one; only ranks with the loss add terms.
    """

    def __init__(
        self,
        sums: Sequence[MetricSums],
        device: torch.device,
        finish_evaluation: Callable[[torch.device], dict[str, float]] = lambda device: {},
    ) -> None:
        """sums: the sums of the loss. finish_evaluation: returns the metrics of a whole evaluation that are not means,
        name (without "eval_") -> value; all ranks call it."""
        self._sums, self._device, self._finish_evaluation = sums, device, finish_evaluation
        self._names = [name for each in sums for name in each.names]
        self._interval = self._zeros(len(self._names))

    def add_step(self, counts: bool) -> None:
        """Add the last step to the interval, or discard it."""
        totals = self._take()
        if counts and totals is not None:
            self._interval += totals

    def finish_interval(self) -> dict[str, float]:
        """Return name -> mean over the steps since the last call. All ranks call it."""
        totals, self._interval = self._interval, self._zeros(len(self._names))
        return self._compute_means(totals)

    def finish_evaluation(self) -> dict[str, float]:
        """Return name (`eval_...`) -> value over the evaluation since the last step. All ranks call it."""
        totals = self._take()
        means = self._compute_means(self._zeros(len(self._names)) if totals is None else totals)
        return {f"eval_{name}": value for name, value in (means | self._finish_evaluation(self._device)).items()}

    def _take(self) -> torch.Tensor | None:
        """Return the sums and numbers of terms since the last call, float64 [2, K]; None without any."""
        taken = [each.take() for each in self._sums]
        if all(totals is None for totals in taken):
            return None
        filled = (self._zeros(len(each.names)) if totals is None else totals for each, totals in zip(self._sums, taken))
        return torch.cat([*filled], dim=1)

    def _compute_means(self, totals: torch.Tensor) -> dict[str, float]:
        if not self._names:
            return {}
        dist.all_reduce(totals)
        sums, counts = totals.tolist()
        return {name: total / count for name, total, count in zip(self._names, sums, counts, strict=True) if count}

    def _zeros(self, num_metrics: int) -> torch.Tensor:
        return torch.zeros(2, num_metrics, dtype=torch.float64, device=self._device)


class PassOver(Enum):
    """The samples of the forward pass before a step."""

    samples = "samples"  # the samples of the step
    companions = "companions"  # one of the objective's own making for each of them (`Objective.companion`)
    # The samples of the step, by a frozen model in memory (`auxiliary.py`), whose stages read and measure them
    auxiliary = "auxiliary"


@dataclass(frozen=True)
class FirstPass:
    """The forward pass before a step or an evaluation.

    measure: computes a tensor per micro-batch, in place of the loss. receive: is called before the step on the ranks
    that hold the loss, with the tensors of this rank's micro-batches, the number of samples of the whole step, and the
    group of ranks that hold the same stage for other samples. conclude: is called in its place for an evaluation;
    None where that then runs as a step does, after `receive`. Otherwise there is no other pass, and the objective's
    metrics include `eval_loss`. by_group: an evaluation runs the pass before each group of its micro-batches, since
    what they leave is needed by them alone.
    """

    measure: Loss
    receive: Callable[[Sequence[torch.Tensor], int, ProcessGroup], None]
    conclude: Callable[[Sequence[torch.Tensor], ProcessGroup], None] | None = None
    by_group: bool = False


@dataclass(frozen=True)
class Scorer:
    """How a model scores data before training, and what messages say of it."""

    what: str  # begins messages, before the key of the data
    unit: str  # the rows that progress counts
    # Computes the values of each column for a micro-batch, [n, ...], in place of a loss
    measure: Callable[[tuple[torch.Tensor, torch.Tensor], Targets], tuple[torch.Tensor, ...]]
    # Returns the error for a value that is not finite, of a key of the data, by its number
    refuse: Callable[[str, int, np.ndarray], UserError]
    # Returns in words what is in a whole folder
    describe: Callable[[Scores], str]
    # Returns what is noted of the columns when they are complete, JSON values
    note: Callable[[Sequence[np.ndarray]], dict[str, Any]] = lambda values: {}
    columns: tuple[ReadColumn, ...] = ()  # what `measure` reads besides tokens and targets
    # Returns in words what a pass over a whole folder leaves, printed before it; empty for nothing
    begin: Callable[[Scores], str] = lambda scores: ""
    values: str = "the scores"  # what messages call all of them
    fewer: str = ""  # begins the advice where a disk has no room, with a comma


class ModelFiles(Protocol):
    """The files of an objective next to a model's weights, whose names are `Extension.model_files`."""

    def save(self, folder: Path) -> None:
        """Write them into the folder."""

    def check(self, folder: Path) -> None:
        """Raise UserError where those of the model that a run begins with, in its folder, ask for something else."""


class Modifier:
    """A key that changes the loss of the objectives that list it in their `modifiers`; others refuse it."""

    key: str
    off = "0"  # the value of the key at which it changes nothing
    metrics: tuple[str, ...] = ()  # those that it reports besides the loss; means over targets

    def read(self, config: RunConfig) -> Any:
        """Return the value of the key; one that is false changes nothing."""
        raise NotImplementedError

    def pass_over(self, config: RunConfig) -> PassOver | None:
        """Return what a forward pass before each step reads; see `before_step`."""
        return None

    def before_step(self, loss: Any) -> FirstPass:
        """Return the forward pass before each step, as `Objective.before_step`."""
        raise NotImplementedError

    def change(self, loss: Any, config: RunConfig, stage: LastStage) -> Loss:
        """Return the changed loss. loss: a `TokenLoss`, or what the modifiers before this one have made of it."""
        raise NotImplementedError

    def check(self, config: RunConfig) -> None:
        """Raise UserError for what its keys cannot be together. It is called where the key is on."""

    def identity(self, config: RunConfig) -> dict[str, str]:
        """Return its part of `Objective.identity`. It is called where the key is on."""
        return {self.key: f"{self.read(config):g}"}

    def list_metrics(self, config: RunConfig) -> tuple[str, ...] | None:
        """Return its part of `Objective.list_metrics`. It is called where the key is on."""
        return self.metrics

    def count_loss_bytes(self, config: RunConfig, num_targets: int, vocabulary: int, on_gpu: bool) -> int:
        """Return the bytes that it adds to the peak of the loss. It is called where the key is on. num_targets: of a
        micro-batch on a rank, every token one. vocabulary: tokens of the rank's share."""
        return 0


class Objective:
    """An objective of training: what `task` names.

    Keys of its own are the group of its name in the schema.
    """

    name: str  # its value of `task`
    # The kinds of data that it can be trained on, in addition to those whose default it is (`data/encoders/kinds.py`)
    data_kinds: tuple[str, ...] = ()
    unit = "samples"  # what messages call its samples
    # The terms that the loss of a global batch is a mean over. Their number is the denominator of the targets.
    mean_over = MeanOver.targets
    row_targets = RowTargets.next_tokens  # the positions of a row that the loss is computed from
    columns: tuple[ReadColumn, ...] = ()  # what travels with a micro-batch besides tokens and targets
    # What the reference model scores once before training (`training/scoring/scored.py`)
    scored: tuple[Column, ...] = ()
    # The folder, in a tokenized one, of samples of its own making: one for each sample of the data, by the same number.
    # They are laid into the same rows (a packed row has room for the longer one of each), the reference model scores
    # them too, and the pass before a step reads them (`PassOver.companions`). Empty for none
    companion = ""
    # How the hub lists its models, and the package that it names as what loads whole ones
    pipeline_tag, made_for = "text-generation", "transformers"
    needs_labels = False  # samples without labels are refused
    # The metrics without "loss" in their names of which lower is better
    errors: tuple[str, ...] = ()
    # The metrics that the lines of progress and of evaluations show besides the loss, each by its name without "eval_",
    # with the text for its value, such as "accuracy {:.1%}"
    shown: tuple[tuple[str, str], ...] = ()
    head: Head | None = None  # what takes the place of the LM head (`models/heads/`)
    modifiers: tuple[Modifier, ...] = ()
    takes_user_loss = False  # a user-defined loss may replace its own
    predicts_tokens = False  # its own loss of an evaluation is the mean cross entropy of tokens, which has a perplexity
    # The logits are computed again in the backward pass: the gradient of a token is not known in the forward pass.
    remakes_logits = False

    def list_active(self, config: RunConfig) -> list[Modifier]:
        """Return the modifiers whose keys are on."""
        return [each for each in self.modifiers if each.read(config)]

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        """Build the loss. Raises UserError for what keys and model cannot be together."""
        raise NotImplementedError

    def group_size(self, data: DataConfig) -> int:
        """Return the number of consecutive documents of a micro-batch that are one sample (2 for pairs)."""
        return 1

    def name_labels(self, data: DataConfig) -> Labels:
        """Return the outputs of its head. It is called if there is one."""
        raise NotImplementedError

    def pass_over(self, config: RunConfig) -> PassOver | None:
        """Return what a forward pass before each step reads; None without one."""
        return None

    def before_step(self, config: RunConfig, loss: Any) -> FirstPass:
        """Return the forward pass before each step. It is called if `pass_over` says that there is one. loss: what
        `loss` has returned."""
        raise NotImplementedError

    def prepare_companion(
        self, config: RunConfig, path: Path, key: str, log: Callable[[str], None] | None, compares_bytes: bool
    ) -> None:
        """Write the samples of `companion`, without rows, unless they are there. It is called if there is one, by each
        process, before the rows of the data are written. path: the tokenized folder of `key`. log: None on a rank that
        prints nothing. compares_bytes: as of `prepare_dataset`. Raises UserError for data that it cannot make them of.
        """
        raise NotImplementedError

    def build_scorer(self, config: RunConfig, stage: LastStage) -> Scorer:
        """Return how the reference model computes `scored`. It is called if that is not empty."""
        raise NotImplementedError

    def metrics(self, loss: Any, device: torch.device) -> Metrics:
        """Build what is reported besides the loss. loss: what `loss` has returned, or a user-defined one."""
        return Metrics(getattr(loss, "sums", ()), device)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...] | None:
        """Return the metrics of evaluations besides the loss, without "eval_"; None if they are not known before the
        first one."""
        return None

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError for a tokenizer that it cannot be trained with."""

    def identity(self, config: RunConfig) -> dict[str, str]:
        """Return what a run has to keep to continue with the same loss, name -> value: all keys of its group, unless
        it says otherwise."""
        keys = getattr(config, self.name, None)
        values = {} if keys is None else {each.name: getattr(keys, each.name) for each in fields(keys)}
        return {
            f"{self.name}.{key}": f"{value:g}" if isinstance(value, float) else write_value(value)
            for key, value in values.items()
        }

    def exports(self, config: RunConfig, hidden_size: int) -> ModelFiles | None:
        """Return the files that are written next to the weights of an exported model; None for none."""
        return None

    def count_batch_bytes(self, config: RunConfig, global_batch_size: int, hidden_size: int) -> int:
        """Return the bytes that the loss of an objective with a head takes for all of a global batch."""
        return 0


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
