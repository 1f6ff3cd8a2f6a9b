"""What a run optimizes: the columns and rows of a sample, the loss and what it is a mean over, what is reported.

An objective is one file in this folder and one line in the table of `registry.py`. Checks, loaders, the planner, the
loop and the evaluation ask it; none of them asks for its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from data.options import MeanOver
from models.losses.cross_entropy import Loss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.incompatible import write_value
from training.config.schema import RunConfig


class Metrics(Protocol):
    """What an objective reports beside the loss. It lives on every rank, and means something where the loss is."""

    def add_step(self, counts: bool) -> None:
        """Takes the last step into the interval, or, where it does not count, discards it."""
        ...

    def finish_interval(self) -> dict[str, float]:
        """Name -> value over the steps since the last call; empty when there were none. All ranks call it."""
        ...

    def finish_evaluation(self) -> dict[str, float]:
        """Name (`eval_...`) -> value over what was evaluated since the last step. All ranks call it."""
        ...


@dataclass(frozen=True)
class FirstPass:
    """measure: instead of the loss, what is summed over the micro-batches of a forward pass, a float64 scalar of each.
    receive: gets its mean over the samples of the global batch, or of the evaluation that comes next."""

    measure: Loss
    receive: Callable[[torch.Tensor], None]


class Objective:
    """One objective; its defaults are those of next-token cross entropy.

    name: what `task` calls it, and the group of its own keys where it has any.
    data_kinds: kinds of data that it can be trained on beside those that name it as theirs (`data/encoders/kinds.py`).
    unit: what messages call its samples.
    rows_per_sample: rows of a micro-batch that a sample fills; they stay together.
    mean_over: what the loss of a global batch is a mean over, and so the denominator that travels with the targets.
    needs_reference: a model that is not trained has to score each row before training; its log-probability travels
        with the targets as one more column (`reference_logprobs.py`).
    smooths_labels: its loss reads `label_smoothing`.
    remakes_logits: the backward pass computes the logits again, since the gradient of a token is not known when they
        are made.
    needs_first_pass: the loss needs a mean over all samples of a step, or of an evaluation, before the first of them: a
        forward pass without gradients, over mismatched answers (`data/storage/mismatched.py`), comes first
        (`first_pass.py`, `plan_first_pass`). Whether an answer is desirable travels with the targets.
    scores_rows: the head makes one number of each row (`models/layers/score_head.py`), and no logits.
    """

    name: str
    data_kinds: tuple[str, ...] = ()
    unit = "samples"
    rows_per_sample = 1
    mean_over = MeanOver.targets
    needs_reference = False
    remakes_logits = False
    smooths_labels = False
    needs_first_pass = False
    scores_rows = False

    def check(self, config: RunConfig) -> None:
        """Raises UserError for keys of its own that are out of range."""

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises UserError for one that it cannot be trained with."""

    def describe(self, config: RunConfig) -> dict[str, str]:
        """What a run must keep to continue with the same loss: name -> value."""
        return {}

    def describe_keys(self, config: RunConfig) -> dict[str, str]:
        """All of its own keys, for `describe`."""
        group = getattr(config, self.name)
        values = {f"{self.name}.{each.name}": getattr(group, each.name) for each in fields(group)}
        return {key: f"{value:g}" if isinstance(value, float) else write_value(value) for key, value in values.items()}

    def build_loss(
        self,
        config: RunConfig,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss | None:
        """The loss of the last stage; None for next-token cross entropy, in place of which a run may bring its own.

        parallel: the ranks that share the head. sequence_part: those that share each sequence.
        """
        return None

    def plan_first_pass(self, loss: Loss) -> FirstPass:
        """What is measured before a step, and who needs it; of one that needs a first pass. loss: what `build_loss`
        built."""
        raise NotImplementedError

    def list_metrics(self, config: RunConfig) -> tuple[str, ...] | None:
        """What evaluations report beside the loss, without "eval_"; None where that is not known before the first."""
        return () if type(self).build_metrics is Objective.build_metrics else None

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics | None:
        """None where the loss is all there is to report. loss: what `build_loss` built."""
        return None
