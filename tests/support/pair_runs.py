"""Preference objectives in tests: what a rank does, and the papers' formulas on the plain Hugging Face model, pair by
pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import BOUND, Case, build_engine, hf_weights
from transformers import AutoModelForCausalLM

from data.order import GlobalOrder
from data.storage.tokenized import TokenizedDataset
from training.config.incompatible import write_value
from training.config.schema import RunConfig

REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")


def train_pairs(case: Case) -> dict[str, Any]:
    """Losses, gradient norms, metrics and final weights of a run on this rank."""
    from training.engine.steps import train_step
    from training.objectives.registry import get_objective

    engine, loader, config, *_ = build_engine(case)
    micro_batches = loader.iterate(0, case.steps)
    metrics = get_objective(config).build_metrics(engine.module.loss_fn, engine.device)
    assert metrics is not None
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        result["losses"].append(train_step(engine, micro_batches, config, step, case.steps)[0].item())
        result["norms"].append(float(engine.gradient_norm()))
        metrics.add_step(counts=True)
        result["metrics"].append(metrics.finish_interval())
    return result | {"weights": hf_weights(engine)}


def find_dataset(case: Case) -> TokenizedDataset:
    return TokenizedDataset(next(path for path in (case.workdir / "cache").iterdir() if path.is_dir()), True, True)


def compute_log_probability(model: torch.nn.Module, dataset: TokenizedDataset, sample: int) -> tuple[torch.Tensor, int]:
    """log p(answer | prompt), and the number of the answer's tokens."""
    input_ids, labels = (
        torch.from_numpy(column(sample).astype("int64")) for column in (dataset.input_ids, dataset.labels)
    )
    log_probabilities = model(input_ids[None]).logits[0, :-1].double().log_softmax(-1)
    answer = labels[1:] != -100
    return log_probabilities[torch.arange(len(answer)), input_ids[1:]][answer].sum(), int(answer.sum())


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
    of_ratio = -torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    reported = {"log_odds_ratio": torch.log(odds[0] / odds[1]).item(), "odds_ratio_loss": of_ratio.item()}
    return add_nll(1.0, chosen, (beta * of_ratio, beta * means[0].item(), beta * means[1].item(), reported))


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


def add_nll(coefficient: float, chosen: Answer, of_pair: PairResult, per_token: bool = True) -> PairResult:
    loss, *rewards, reported = of_pair
    if not coefficient:
        return of_pair
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
        log_p, length = compute_log_probability(policy, dataset, sample)
        with torch.no_grad():
            log_r = 0.0 if reference is None else compute_log_probability(reference, dataset, sample)[0].item()
        answers.append(Answer(log_p, log_r, length))
    return FORMULAS[config.task or "dpo"](config, answers[0], answers[1])


def summarize(pairs: list[PairResult]) -> dict[str, float]:
    """The means of all metrics."""
    chosen, rejected = np.array([rewards for _, *rewards, _ in pairs]).T
    means = dict(zip(REWARDS, (chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).mean())))
    return means | {name: float(np.mean([reported[name] for *_, reported in pairs])) for name in pairs[0][-1]}


def train_oracle(
    case: Case, num_pairs: int, policy: torch.nn.Module, reference: torch.nn.Module | None = None
) -> dict[str, Any]:
    """The same steps of SGD, pair by pair."""
    config = case.config()
    dataset = find_dataset(case)
    order = GlobalOrder(num_pairs, config.global_batch_size, config.seed)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        ids, loss, pairs = order.sample_ids(step).tolist(), 0.0, []
        for pair in ids:
            result_of_pair = compute_pair(config, policy, reference, dataset, pair)
            (result_of_pair[0] / len(ids)).backward()
            loss += result_of_pair[0].item() / len(ids)
            pairs.append(result_of_pair)
        result["losses"].append(loss)
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        result["metrics"].append(summarize(pairs))
        optimizer.step()
    return result | {"weights": {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}}


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


def load_model(folder: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_equal(result: Mapping[str, Any], oracle: Mapping[str, Any], first_metrics: int = 0) -> None:
    """first_metrics: the step from which on rewards are compared: in the first those of a policy that is its reference
    are all 0."""
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for found, expected in zip(result["metrics"][first_metrics:], oracle["metrics"][first_metrics:], strict=True):
        assert found.keys() == expected.keys()
        assert found["rewards_accuracy"] == pytest.approx(expected["rewards_accuracy"])
        scale = max(abs(value) for value in expected.values())
        assert all(found[name] == pytest.approx(expected[name], abs=BOUND * scale) for name in expected), (
            found,
            expected,
        )
