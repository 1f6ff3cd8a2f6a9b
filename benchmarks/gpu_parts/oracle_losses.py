"""The loss of a step of each task, as its paper writes it, on a plain Hugging Face model.

Each sample is computed alone, so there is no padding, no packing and no order to agree on. A task yields terms whose
sum is the loss of the step, one after the other, so that the graph of one is freed before the next is made. What a
reference model says is computed once, before the first step, by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

BETA = 0.1  # of DPO and KTO: the defaults of conf/base.yaml


@dataclass(frozen=True)
class Sample:
    """input_ids: int64 [1, T]. targets: int64 [T - 1], negative where there is none. desirable: of an answer of KTO."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    desirable: bool = True

    @property
    def prompt_length(self) -> int:
        return int((self.targets >= 0).int().argmax()) + 1

    def with_answer_of(self, other: Sample, most: int) -> Sample:
        """Returns this prompt with the answer of another sample, cut to so many tokens."""
        prompt, answer = self.input_ids[:, : self.prompt_length], other.input_ids[:, other.prompt_length :]
        no_targets = self.targets.new_full((self.prompt_length - 1,), -100)
        return Sample(torch.cat([prompt, answer], 1)[:, :most], torch.cat([no_targets, answer[0]])[: most - 1])


Terms = Callable[[], Iterator[torch.Tensor]]


def build_terms(task: str, model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """Returns the terms of a step over all samples; called once per step."""
    return _TASKS[task](model, samples)


def _sum_log_probabilities(model: nn.Module, sample: Sample) -> torch.Tensor:
    logits = model(input_ids=sample.input_ids, use_cache=False).logits[0, :-1].float()
    return -F.cross_entropy(logits, sample.targets, reduction="sum", ignore_index=-100)


@torch.no_grad()
def _list_references(model: nn.Module, samples: Sequence[Sample]) -> list[float]:
    return [_sum_log_probabilities(model, sample).item() for sample in samples]


def _next_token(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """Cross entropy per target token."""
    num_targets = sum(int((sample.targets >= 0).sum()) for sample in samples)
    return lambda: (-_sum_log_probabilities(model, sample) / num_targets for sample in samples)


def _dpo(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """2305.18290, equation 7; samples 2 i and 2 i + 1 are the chosen and the rejected answer."""
    references = _list_references(model, samples)

    def yield_terms() -> Iterator[torch.Tensor]:
        for pair in range(0, len(samples), 2):
            chosen, rejected = (
                _sum_log_probabilities(model, samples[index]) - references[index] for index in (pair, pair + 1)
            )
            yield -F.logsigmoid(BETA * (chosen - rejected)) / (len(samples) // 2)

    return yield_terms


def _kto(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """2402.01306, equation 8: z0 is estimated from each prompt with the answer to the next one. The longest sample is
    as long as the run allows."""
    most = max(sample.input_ids.shape[1] for sample in samples)
    mismatched = [sample.with_answer_of(other, most) for sample, other in zip(samples, [*samples[1:], samples[0]])]
    references, mismatched_references = _list_references(model, samples), _list_references(model, mismatched)

    def yield_terms() -> Iterator[torch.Tensor]:
        found = _list_references(model, mismatched)
        ratios = [policy - reference for policy, reference in zip(found, mismatched_references)]
        kl = max(0.0, sum(ratios) / len(ratios))
        for sample, reference in zip(samples, references):
            advantage = _sum_log_probabilities(model, sample) - reference - kl
            yield (1 - torch.sigmoid(BETA * advantage * (1 if sample.desirable else -1))) / len(samples)

    return yield_terms


def _reward(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """2009.01325, equation 1; samples as in `_dpo`. model: one for sequence classification with one label."""

    def yield_terms() -> Iterator[torch.Tensor]:
        for pair in range(0, len(samples), 2):
            chosen, rejected = (
                model(input_ids=samples[index].input_ids, use_cache=False).logits[0, 0].float()
                for index in (pair, pair + 1)
            )
            yield -F.logsigmoid(chosen - rejected) / (len(samples) // 2)

    return yield_terms


_TASKS: dict[str, Callable[[nn.Module, Sequence[Sample]], Terms]] = {
    "sft": _next_token, "dpo": _dpo, "kto": _kto, "reward": _reward,
}  # fmt: skip
