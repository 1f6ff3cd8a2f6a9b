"""Queries and documents in tests: real text, and what transformers' own classes make of a global batch in one
process."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import BOUND, ROOT, Case
from support.objective_runs import find_dataset

from data.order import GlobalOrder
from data.storage.tokenized import TokenizedDataset
from training.config.schema import RunConfig

NUM_QUERIES = 21  # no multiple of a batch

Outcome = tuple[torch.Tensor, list[int]]  # the losses of some queries, [Q], and the rank of the own document of each
Compare = Callable[[RunConfig, torch.nn.Module, TokenizedDataset, list[int]], Outcome]


def save_queries(file: Path, count: int, seed: int = 0) -> Path:
    """Real text of very different lengths: some words of a text as the query, the text, and texts from elsewhere."""
    words = inspect.getsource(json).split()
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def cut() -> list[str]:
        start = draw(0, len(words) - 60)
        return words[start : start + draw(4, 30)]

    with open(file, "w") as handle:
        for _ in range(count):
            text = cut()
            record = {
                "query": " ".join(text[: draw(2, len(text))]),
                "positive": " ".join(text),
                "negatives": [" ".join(cut()) for _ in range(3)],
            }
            handle.write(json.dumps(record) + "\n")
    return file


def read_text(dataset: TokenizedDataset, number: int) -> torch.Tensor:
    """Return the tokens of a sample, [1, T]."""
    return torch.from_numpy(dataset.input_ids(number).astype("int64"))[None]


def compare_vectors(config: RunConfig, model: torch.nn.Module, dataset: TokenizedDataset, ids: list[int]) -> Outcome:
    """Each text alone, and each query with all documents, one by one."""
    keys, group = config.embedding, 2 + config.data.num_negatives

    def embed(number: int) -> torch.Tensor:
        hidden_states = model(read_text(dataset, number), use_cache=False).last_hidden_state[0].float()
        return hidden_states.mean(dim=0) if keys.pooling.value == "mean" else hidden_states[-1]

    vectors = [[embed(group * query + text) for text in range(group)] for query in ids]
    documents = [document for _, *own in vectors for document in own]
    losses, ranks = [], []
    for number, (query, *_) in enumerate(vectors):
        own, per_size = number * (group - 1), []
        for size in (len(query), *(keys.matryoshka_dims or ())):
            cosines = torch.stack(
                [torch.cosine_similarity(query[:size], document[:size], dim=0) for document in documents]
            )
            if size == len(query):
                ranks.append(int((cosines >= cosines[own]).sum()))
            margin = torch.tensor([keys.margin if number == own else 0.0 for number in range(len(documents))])
            likelihood = ((cosines - margin) / keys.temperature).softmax(dim=0)
            per_size.append(-likelihood[own].log())
        losses.append(sum(per_size) / len(per_size))
    return torch.stack(losses), ranks


def compare_scores(config: RunConfig, model: torch.nn.Module, dataset: TokenizedDataset, ids: list[int]) -> Outcome:
    """Each document alone."""
    group = 1 + config.data.num_negatives
    losses, ranks = [], []
    for query in ids:
        scores = torch.cat(
            [
                model(read_text(dataset, group * query + place), use_cache=False).logits[0].float()
                for place in range(group)
            ]
        )
        if config.rerank.loss_type.value == "softmax":
            losses.append(-torch.log(scores.exp()[0] / scores.exp().sum()))
        else:
            answers = torch.sigmoid(scores)
            losses.append(-torch.cat([answers[:1].log(), (1 - answers[1:]).log()]).mean())
        ranks.append(int((scores >= scores[0]).sum()))
    return torch.stack(losses), ranks


def summarize(ranks: list[int]) -> dict[str, float]:
    return {
        "recall_at_1": sum(rank == 1 for rank in ranks) / len(ranks),
        "mrr": sum(1 / rank for rank in ranks) / len(ranks),
    }


def train_oracle(case: Case, model: torch.nn.Module, compare: Compare) -> dict[str, Any]:
    """The same steps of SGD: the queries of a global batch at once."""
    config, dataset = case.config(), find_dataset(case.workdir)
    order = GlobalOrder(NUM_QUERIES, config.global_batch_size, config.seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        losses, ranks = compare(config, model, dataset, order.sample_ids(step).tolist())
        losses.mean().backward()
        result["losses"].append(losses.mean().item())
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        result["metrics"].append(summarize(ranks))
        optimizer.step()
    return result | {"weights": {name: tensor.detach().clone() for name, tensor in model.named_parameters()}}


def check_equal(result: dict[str, Any], oracle: dict[str, Any]) -> None:
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for found, expected in zip(result["metrics"], oracle["metrics"], strict=True):
        assert {name: found[name] for name in expected} == pytest.approx(expected)


def check_record(record: dict[str, Any], expected: dict[str, float]) -> None:
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def evaluate_oracle(case: Case, model: torch.nn.Module, compare: Compare, folder: Path) -> dict[str, float]:
    """Evaluate on all queries. folder: of the run, which has tokenized them."""
    with torch.no_grad():
        losses, ranks = compare(case.config(), model.eval(), find_dataset(folder), list(range(NUM_QUERIES)))
    return {"eval_loss": losses.mean().item(), **{f"eval_{name}": value for name, value in summarize(ranks).items()}}


def convert(source: Path, target: Path, *flags: str) -> None:
    command = [sys.executable, "convert2ckpt.py", "--model_name_or_path", str(source), "--output_dir", str(target)]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, capture_output=True)
