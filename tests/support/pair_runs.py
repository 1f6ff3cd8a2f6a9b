"""Preference objectives in tests: the papers' formulas on the plain Hugging Face model, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support import objective_runs
from support.cases import Case
from support.objective_runs import Summarize, compute_log_probability, find_dataset

from data.storage.tokenized import TokenizedDataset
from training.config.incompatible import write_value
from training.config.schema import RunConfig

REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")


def read_answer(model: torch.nn.Module, dataset: TokenizedDataset, sample: int) -> tuple[torch.Tensor, int]:
    """log p(answer | prompt), and the number of the answer's tokens."""
    input_ids, labels = (
        torch.from_numpy(column(sample).astype("int64")) for column in (dataset.input_ids, dataset.labels)
    )
    return compute_log_probability(model, input_ids, labels != -100), int((labels[1:] != -100).sum())


@dataclass(frozen=True)
class Answer:
    """log_p: by the policy, summed. log_r: by the reference; 0 where there is none."""

    log_p: torch.Tensor
    log_r: float
    length: int


PairResult = tuple[torch.Tensor, float, float, dict[str, float]]  # loss, both rewards, what else is reported


def compute_dpo(config: RunConfig, chosen: Answer, rejected: Answer) -> PairResult:
    """2305.18290 (equation 7), 2309.06657 (hinge), 2403.00409 (robust), 2310.12036 (equation 17, of mean
    log-probabilities)."""
    beta, smoothing, loss_type = config.dpo.beta, config.dpo.label_smoothing, write_value(config.dpo.loss_type)
    ratios = [
        (answer.log_p - answer.log_r) / (answer.length if loss_type == "ipo" else 1) for answer in (chosen, rejected)
    ]
    h = ratios[0] - ratios[1]
    likelihood = 1 / (1 + torch.exp(-beta * h))  # of the preference
    loss = {
        "sigmoid": -(1 - smoothing) * torch.log(likelihood) - smoothing * torch.log(1 - likelihood),
        "robust": (-(1 - smoothing) * torch.log(likelihood) + smoothing * torch.log(1 - likelihood))
        / (1 - 2 * smoothing),
        "hinge": (1 - beta * h).clamp(min=0),
        "ipo": (h - 1 / (2 * beta)) ** 2,
    }[loss_type]
    return add_nll(config.dpo.sft_coef, chosen, (loss, beta * ratios[0].item(), beta * ratios[1].item(), {}))


def compute_orpo(config: RunConfig, chosen: Answer, rejected: Answer) -> PairResult:
    """2403.07691, equations 3 to 7."""
    beta = config.orpo.beta
    means = [answer.log_p / answer.length for answer in (chosen, rejected)]
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
    ratio_loss = -torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    reported = {"log_odds_ratio": torch.log(odds[0] / odds[1]).item(), "odds_ratio_loss": ratio_loss.item()}
    return add_nll(1.0, chosen, (beta * ratio_loss, beta * means[0].item(), beta * means[1].item(), reported))


def compute_simpo(config: RunConfig, chosen: Answer, rejected: Answer) -> PairResult:
    """2405.14734, equation 6."""
    simpo = config.simpo
    rewards = [simpo.beta / answer.length * answer.log_p for answer in (chosen, rejected)]
    loss = -torch.log(torch.sigmoid(rewards[0] - rewards[1] - simpo.gamma))
    return add_nll(simpo.sft_coef, chosen, (loss, rewards[0].item(), rewards[1].item(), {}))


def compute_cpo(config: RunConfig, chosen: Answer, rejected: Answer) -> PairResult:
    """2401.08417, equation 3 and its negative log-likelihood."""
    cpo = config.cpo
    rewards = [cpo.beta * answer.log_p for answer in (chosen, rejected)]
    loss = -torch.log(torch.sigmoid(rewards[0] - rewards[1]))
    per_token = write_value(cpo.nll_reduction) == "mean"
    return add_nll(cpo.alpha, chosen, (loss, rewards[0].item(), rewards[1].item(), {}), per_token)


def add_nll(coefficient: float, chosen: Answer, pair_result: PairResult, per_token: bool = True) -> PairResult:
    loss, *rewards, reported = pair_result
    if not coefficient:
        return pair_result
    nll = -chosen.log_p / (chosen.length if per_token else 1)
    return loss + coefficient * nll, *rewards, {**reported, "nll_loss": nll.item()}


FORMULAS = {"dpo": compute_dpo, "orpo": compute_orpo, "simpo": compute_simpo, "cpo": compute_cpo}


def compute_pair(
    config: RunConfig,
    policy: torch.nn.Module,
    reference: torch.nn.Module | None,
    dataset: TokenizedDataset,
    pair: int,
) -> PairResult:
    """reference: None where the objective has none."""
    answers = []
    for sample in (2 * pair, 2 * pair + 1):
        log_p, length = read_answer(policy, dataset, sample)
        with torch.no_grad():
            log_r = 0.0 if reference is None else read_answer(reference, dataset, sample)[0].item()
        answers.append(Answer(log_p, log_r, length))
    return FORMULAS[config.task or "dpo"](config, answers[0], answers[1])


def summarize(pairs: list[PairResult]) -> dict[str, float]:
    """The means of all metrics."""
    chosen, rejected = np.array([rewards for _, *rewards, _ in pairs]).T
    means = dict(zip(REWARDS, (chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).mean())))
    return means | {name: float(np.mean([reported[name] for *_, reported in pairs])) for name in pairs[0][-1]}


def train_oracle(case: Case, policy: torch.nn.Module, reference: torch.nn.Module | None = None) -> dict[str, Any]:
    """The same steps of SGD, pair by pair."""
    config, dataset = case.config(), find_dataset(case.workdir)

    def compute_step(ids: list[int]) -> tuple[Iterator[tuple[torch.Tensor, PairResult]], Summarize]:
        pairs = (compute_pair(config, policy, reference, dataset, pair) for pair in ids)
        return ((pair[0], pair) for pair in pairs), summarize

    return objective_runs.train_oracle(case, policy, compute_step)


def evaluate_oracle(
    config: RunConfig,
    num_pairs: int,
    dataset: TokenizedDataset,
    policy: torch.nn.Module,
    reference: torch.nn.Module | None = None,
) -> dict[str, float]:
    with torch.no_grad():
        pairs = [compute_pair(config, policy, reference, dataset, pair) for pair in range(num_pairs)]
    means = {f"eval_{name}": mean for name, mean in summarize(pairs).items()}
    return {"eval_loss": float(np.mean([loss.item() for loss, *_ in pairs])), **means}
