"""Queries and documents in tests: what transformers' own classes make of a global batch in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from support.cases import Case
from support.head_runs import read_text
from support.objective_runs import find_dataset, list_groups, train_plainly

from data.storage.tokenized import TokenizedDataset
from extensions.retrieval.keys import DataKeys, EmbeddingConfig, RerankConfig
from training.config.schema import RunConfig

NUM_QUERIES = 21  # no multiple of a batch

Outcome = tuple[torch.Tensor, list[int]]  # the losses of some queries, [Q], and the rank of the own document of each
Compare = Callable[[RunConfig, torch.nn.Module, TokenizedDataset, list[int]], Outcome]


def compare_vectors(config: RunConfig, model: torch.nn.Module, dataset: TokenizedDataset, ids: list[int]) -> Outcome:
    """Each text alone, and each query with all documents, one by one, but those of its copies."""
    keys, group = config.read_group(EmbeddingConfig), 2 + config.read_group(DataKeys).num_negatives

    def embed(number: int) -> torch.Tensor:
        hidden_states = model(read_text(dataset, number), use_cache=False).last_hidden_state[0].float()
        return hidden_states.mean(dim=0) if keys.pooling.value == "mean" else hidden_states[-1]

    vectors = [[embed(group * query + text) for text in range(group)] for query in ids]
    losses, ranks = [], []
    for number, (query, *_) in enumerate(vectors):
        others = [place for place, each in enumerate(ids) if place == number or each != ids[number]]
        documents = [document for place in others for document in vectors[place][1:]]
        own, per_size = others.index(number) * (group - 1), []
        for size in (len(query), *(keys.matryoshka_dims or ())):
            cosines = torch.stack(
                [torch.cosine_similarity(query[:size], document[:size], dim=0) for document in documents]
            )
            if size == len(query):
                ranks.append(int((cosines >= cosines[own]).sum()))
            margin = torch.tensor([keys.margin if place == own else 0.0 for place in range(len(documents))])
            likelihood = ((cosines - margin) / keys.temperature).softmax(dim=0)
            per_size.append(-likelihood[own].log())
        losses.append(sum(per_size) / len(per_size))
    return torch.stack(losses), ranks


def compare_scores(config: RunConfig, model: torch.nn.Module, dataset: TokenizedDataset, ids: list[int]) -> Outcome:
    """Each document alone."""
    group = 1 + config.read_group(DataKeys).num_negatives
    losses, ranks = [], []
    for query in ids:
        scores = torch.cat(
            [
                model(read_text(dataset, group * query + place), use_cache=False).logits[0].float()
                for place in range(group)
            ]
        )
        if config.read_group(RerankConfig).loss_type.value == "softmax":
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

    def compute_step(ids: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
        losses, ranks = compare(config, model, dataset, ids)
        return losses.mean(), summarize(ranks)

    return train_plainly(case, model, compute_step)


def evaluate_oracle(case: Case, model: torch.nn.Module, compare: Compare, folder: Path) -> dict[str, float]:
    """Evaluate on all queries. folder: of the run, which has tokenized them."""
    with torch.no_grad():
        losses, ranks = compare(case.config(), model.eval(), find_dataset(folder), list(range(NUM_QUERIES)))
    return {"eval_loss": losses.mean().item(), **{f"eval_{name}": value for name, value in summarize(ranks).items()}}


def compute_queries(
    config: RunConfig, folder: Path, step: int, policy: torch.nn.Module, reference: torch.nn.Module
) -> Iterable[float]:
    """The loss of a step's queries, its gradient left in the parameters."""
    compare = compare_vectors if config.data.name == "embedding" else compare_scores
    loss = compare(config, policy, TokenizedDataset(folder, True, True), list_groups(config, folder, step))[0].mean()
    loss.backward()
    yield loss.item()
