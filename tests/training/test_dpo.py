"""Preference optimization through real pipeline stages against the paper's formulas on the plain Hugging Face model in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, build_engine, hf_weights, merge, train_run, worst_difference
from distributed import WorkerError, WorkerGroup
from test_lora import make_adapter, to_peft_weights
from test_parity import BOUND, CHECKPOINTED, CLIPPED, LAYOUTS
from tiny import save_llama, save_pairs, save_tokenizer
from transformers import AutoModelForCausalLM

from data.order import GlobalOrder
from data.tokenized import TokenizedDataset
from training.horizon import Horizon

NUM_PAIRS = 20
DPO = ("data=preference", "task=dpo", "dpo.beta=0.3")
SMOOTHED, IPO = "dpo.label_smoothing=0.2", "dpo.loss_type=ipo"
REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dpo")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_pairs(root / "train.jsonl", NUM_PAIRS)
    save_pairs(root / "eval.jsonl", 5, seed=1)  # no multiple of any batch
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    num_stages, world_size = LAYOUTS[layout]
    if IPO in overrides:  # the steeper loss
        overrides = (*overrides, "learning_rate=0.02")
    return Case(root / f"tied{tied}", root / "train.jsonl", workdir, num_stages, world_size, overrides=(*DPO, "micro_batch_size=1", *overrides))


def train_pairs(case: Case) -> dict[str, Any]:
    """Losses, gradient norms, rewards and final weights of a run on this rank."""
    from training.engine import train_step
    from training.preferences import Rewards

    engine, loader, config, *_ = build_engine(case)
    micro_batches = loader.iterate(0, case.steps)
    rewards = Rewards(engine.module.loss_fn, engine.device)
    result: dict[str, Any] = {"losses": [], "norms": [], "rewards": []}
    for step in range(case.steps):
        result["losses"].append(train_step(engine, micro_batches, config, step, case.steps)[0].item())
        result["norms"].append(float(engine.get_global_grad_norm()))
        rewards.add_step(counts=True)
        result["rewards"].append(rewards.finish_interval())
    return result | {"weights": hf_weights(engine)}


def find_dataset(case: Case, num_pairs: int = NUM_PAIRS) -> TokenizedDataset:
    datasets = [TokenizedDataset(path, True, True) for path in (case.workdir / "cache").iterdir() if path.is_dir()]
    return next(dataset for dataset in datasets if len(dataset) == 2 * num_pairs)


def compute_log_probability(model: torch.nn.Module, dataset: TokenizedDataset, sample: int) -> tuple[torch.Tensor, int]:
    """log p(answer | prompt), and the number of the answer's tokens."""
    input_ids, labels = (torch.from_numpy(column(sample).astype("int64")) for column in (dataset.input_ids, dataset.labels))
    log_probabilities = model(input_ids[None]).logits[0, :-1].double().log_softmax(-1)
    answer = labels[1:] != -100
    return log_probabilities[torch.arange(len(answer)), input_ids[1:]][answer].sum(), int(answer.sum())


def compute_pair(
    policy: torch.nn.Module, reference: torch.nn.Module, dataset: TokenizedDataset, pair: int, beta: float, smoothing: float, ipo: bool
) -> tuple[torch.Tensor, float, float]:
    """Loss and both rewards of one pair, by 2305.18290 (equation 7) and 2310.12036 (equation 17, of mean log-probabilities)."""
    ratios = []
    for sample in (2 * pair, 2 * pair + 1):
        log_p, length = compute_log_probability(policy, dataset, sample)
        with torch.no_grad():
            log_r, _ = compute_log_probability(reference, dataset, sample)
        ratios.append((log_p - log_r) / (length if ipo else 1))
    h = ratios[0] - ratios[1]
    likelihood = 1 / (1 + torch.exp(-beta * h))  # of the preference
    loss = (h - 1 / (2 * beta)) ** 2 if ipo else -(1 - smoothing) * torch.log(likelihood) - smoothing * torch.log(1 - likelihood)
    return loss, beta * ratios[0].item(), beta * ratios[1].item()


def summarize(pairs: list[tuple[float, float]]) -> dict[str, float]:
    chosen, rejected = np.array(pairs).T
    return dict(zip(REWARDS, (chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).mean())))


def train_oracle(case: Case, policy: torch.nn.Module, reference: torch.nn.Module) -> dict[str, Any]:
    """The same steps of SGD, pair by pair."""
    config = case.config()
    dataset = find_dataset(case)
    order = GlobalOrder(NUM_PAIRS, config.global_batch_size, config.seed)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    result: dict[str, Any] = {"losses": [], "norms": [], "rewards": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        ids, loss, rewards = order.sample_ids(step).tolist(), 0.0, []
        for pair in ids:
            of_pair, *both = compute_pair(policy, reference, dataset, pair, config.dpo.beta, config.dpo.label_smoothing, IPO in case.overrides)
            (of_pair / len(ids)).backward()
            loss += of_pair.item() / len(ids)
            rewards.append(both)
        result["losses"].append(loss)
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        result["rewards"].append(summarize(rewards))
        optimizer.step()
    return result | {"weights": {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}}


def load_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_equal(result: dict[str, Any], oracle: dict[str, Any]) -> None:
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for found, expected in zip(result["rewards"][1:], oracle["rewards"][1:], strict=True):
        assert found.keys() == expected.keys()
        assert found["rewards_accuracy"] == pytest.approx(expected["rewards_accuracy"])
        scale = max(abs(value) for value in expected.values())
        assert all(found[name] == pytest.approx(expected[name], abs=BOUND * scale) for name in expected), (found, expected)


@pytest.mark.parametrize(
    "layout, tied, overrides",
    [
        ("pp2", False, (SMOOTHED, CLIPPED)),
        ("pp2xdp2", True, (IPO, CHECKPOINTED)),
        *(
            pytest.param(layout, tied, overrides, marks=pytest.mark.full)
            for layout in LAYOUTS
            for tied, overrides in ((False, ()), (True, (SMOOTHED, CHECKPOINTED, "micro_batch_size=2")), (False, (IPO, CLIPPED, "data.pad_to=max_seq_length")))
        ),
    ],
)  # fmt: skip
def test_five_sgd_steps_equal_the_paper(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str, tied: bool, overrides: tuple[str, ...]
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    result = merge(workers(case.world_size).run(train_pairs, case))
    policy = load_model(case.model)
    oracle = train_oracle(case, policy, copy.deepcopy(policy))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved
