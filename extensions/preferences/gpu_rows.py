"""The rows of `make gpu` that train on preferences: their records, and their losses on a plain model.

What a reference model says is computed once, before the first step, by the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu_parts.tasks import Draw, Sample, Task, Terms, sum_log_probabilities

BETA = 0.1  # of DPO and KTO: the defaults of their keys


def make_pair(number: int, length: int, draw: Draw) -> dict[str, object]:
    """Returns a pair of short answers: their gradient grows with the sum over their tokens. length: of the chosen one's
    sample."""
    answer = _count_answer(length)
    return {"prompt": draw(length - 1 - answer), "chosen": draw(answer), "rejected": draw(answer // 2)}


def make_judged(number: int, length: int, draw: Draw) -> dict[str, object]:
    """Returns a short answer, two of three of which were liked."""
    answer = _count_answer(length)
    return {"prompt": draw(length - 1 - answer), "completion": draw(answer), "label": number % 3 != 1}


def _count_answer(length: int) -> int:
    return max(2, length // 16)


@torch.no_grad()
def _list_references(model: nn.Module, samples: Sequence[Sample]) -> list[float]:
    return [sum_log_probabilities(model, sample).item() for sample in samples]


def _dpo(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """2305.18290, equation 7; samples 2 i and 2 i + 1 are the chosen and the rejected answer."""
    references = _list_references(model, samples)

    def yield_terms() -> Iterator[torch.Tensor]:
        for pair in range(0, len(samples), 2):
            chosen, rejected = (
                sum_log_probabilities(model, samples[index]) - references[index] for index in (pair, pair + 1)
            )
            yield -F.logsigmoid(BETA * (chosen - rejected)) / (len(samples) // 2)

    return yield_terms


def _kto(model: nn.Module, samples: Sequence[Sample]) -> Terms:
    """2402.01306, equation 8: z0 is estimated from each prompt with the answer to the next one. The longest sample is
    as long as the run allows."""
    most = max(sample.input_ids.shape[1] for sample in samples)
    mismatched = [_give_answer_of(other, sample, most) for sample, other in zip(samples, [*samples[1:], samples[0]])]
    references, mismatched_references = _list_references(model, samples), _list_references(model, mismatched)

    def yield_terms() -> Iterator[torch.Tensor]:
        found = _list_references(model, mismatched)
        ratios = [policy - reference for policy, reference in zip(found, mismatched_references)]
        kl = max(0.0, sum(ratios) / len(ratios))
        for sample, reference in zip(samples, references):
            advantage = sum_log_probabilities(model, sample) - reference - kl
            yield (1 - torch.sigmoid(BETA * advantage * (1 if sample.label else -1))) / len(samples)

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


def _find_answer(sample: Sample) -> int:
    """Returns the number of tokens before the answer."""
    return int((sample.targets >= 0).int().argmax()) + 1


def _give_answer_of(other: Sample, sample: Sample, most: int) -> Sample:
    """Returns the prompt of a sample with the answer of another one, cut to so many tokens."""
    start = _find_answer(sample)
    answer = other.input_ids[:, _find_answer(other) :]
    no_targets = sample.targets.new_full((start - 1,), -100)
    input_ids, targets = torch.cat([sample.input_ids[:, :start], answer], 1), torch.cat([no_targets, answer[0]])
    return Sample(input_ids[:, :most], targets[: most - 1])


TASKS = (
    Task("dpo", "preference", _dpo, make_pair, question="Do steps end that have forward passes before them?"),
    Task("kto", "unpaired_preference", _kto, make_judged),
    # With the learning rate of the others the norm of its gradient grows from step to step
    Task("reward", "preference", _reward, make_pair, model="classifier", learning_rate=0.05),
)
