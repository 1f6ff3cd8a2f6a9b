"""The tasks that rows train: their data, and the loss of a step on a plain Hugging Face model, as its paper writes it.

Each sample is computed alone, so there is no padding, no packing and no order to agree on. A task yields terms whose
sum is the loss of the step, one after the other, so that the graph of one is freed before the next is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sample:
    """input_ids: int64 [1, T]. targets: int64 [T - 1], negative where there is none. label: of the whole sample, of
    data that has some."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    label: float = 0


Terms = Callable[[], Iterator[torch.Tensor]]  # yields those of a step over all samples; called once per step
Draw = Callable[[int], str]  # returns so many words, which are as many tokens


@dataclass(frozen=True)
class Task:
    """A value of `task`, with the data of its rows and its oracle."""

    name: str
    data: str  # the kind
    build_terms: Callable[[nn.Module, Sequence[Sample]], Terms]  # of a plain model, which is called before any step
    # Returns a record. It takes its number and the tokens of its sample, the end among them. None: a prompt and its
    # completion
    make_record: Callable[[int, int, Draw], dict[str, object]] | None = None
    model: str = "llama"  # a key of `material.MODELS`
    learning_rate: float | None = None  # None: that of the optimizer
    question: str = ""  # what a first look at a GPU learns of its row; empty for a row that can wait


def sum_log_probabilities(model: nn.Module, sample: Sample) -> torch.Tensor:
    """Returns the log-probability of the targets of a sample, fp32."""
    logits = model(input_ids=sample.input_ids, use_cache=False).logits[0, :-1].float()
    return -F.cross_entropy(logits, sample.targets, reduction="sum", ignore_index=-100)


def build_next_token(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """Cross entropy per target token."""
    num_targets = sum(int((sample.targets >= 0).sum()) for sample in samples)
    return lambda: (-sum_log_probabilities(model, sample) / num_targets for sample in samples)
