"""The oracle of runs whose routers have losses: the plain Hugging Face model, each document run alone, its routers'
scores taken by hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.cases import Case
from support.pair_runs import compute_pair
from support.routers import list_documents, watch
from support.tiny import find_tokenized
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from data.order import GlobalOrder
from data.storage.tokenized import TokenizedDataset
from training.config.schema import RunConfig


def train_router_oracle(
    case: Case, family: str, *, aux: float = 0.0, z: float = 0.0, speed: float = 0.0, policy: nn.Module | None = None
) -> dict[str, Any]:
    """The same steps of SGD. policy: the model with an adapter."""
    config = case.config()
    reference = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).eval()
    model = policy or AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    watched = watch(model.train(), family)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    folder = find_tokenized(case.workdir)[0]
    losses, norms, sums = [], [], torch.zeros(2)
    num_documents = num_tokens = 0
    for step in range(case.steps):
        documents = list(list_documents(config, folder, step))
        tokens = sum(len(ids) for ids, _ in documents)
        optimizer.zero_grad()
        compute = compute_preferences if config.data.name == "preference" else compute_cross_entropy
        loss = compute(config, folder, step, model, reference)
        balance, squares = (sum(getattr(routed, name) for routed in watched) for name in ("aux", "z"))
        (loss + aux * balance / len(documents) + z * squares / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, float("inf"))))
        losses.append(loss.item())
        optimizer.step()
        sums += torch.stack([balance, squares]).detach() / len(watched)
        num_documents, num_tokens = num_documents + len(documents), num_tokens + tokens
        with torch.no_grad():
            for routed in watched:
                routed.finish(speed)
    loads = torch.stack([routed.loads / routed.loads.mean() for routed in watched])
    reported = {"expert_load_max": loads.max().item(), "expert_load_min": loads.min().item()}
    reported |= {"router_aux_loss": (sums[0] / num_documents).item()} if aux else {}
    reported |= {"router_z_loss": (sums[1] / num_tokens).item()} if z else {}
    weights = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "routed": reported}


def compute_cross_entropy(
    config: RunConfig, folder: Path, step: int, model: nn.Module, reference: nn.Module
) -> torch.Tensor:
    documents = list(list_documents(config, folder, step))
    num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    logits = [model(ids[None]).logits[0, :-1] for ids, _ in documents]
    terms = [
        F.cross_entropy(each, labels[1:], reduction="sum") for each, (_, labels) in zip(logits, documents, strict=True)
    ]
    return torch.stack(terms).sum() / num_targets


def compute_preferences(
    config: RunConfig, folder: Path, step: int, model: nn.Module, reference: nn.Module
) -> torch.Tensor:
    """Returns the loss of the run's objective."""
    dataset = TokenizedDataset(folder, True, True)
    pairs = GlobalOrder(len(dataset) // 2, config.global_batch_size, config.seed).sample_ids(step).tolist()
    terms = [compute_pair(config, model, reference, dataset, pair)[0] for pair in pairs]
    return torch.stack(terms).mean()
