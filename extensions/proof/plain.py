"""The same step by plain transformers: the model of a folder in one process, sample by sample.

Each document is run alone, so there is no padding, no packing, no micro-batch and no order to agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from data.sample import IGNORE_INDEX
from data.storage.rows import Rows, list_rows
from errors import UserError
from training.config.incompatible import write_value
from training.config.schema import RunConfig
from training.inputs.datasets import build_order, build_row_plan
from training.objectives.registry import get_objective

DPO = "dpo"  # the objective
MODIFIERS = ("label_smoothing",)  # the keys that change a loss and are in its plain counterpart


@dataclass(frozen=True)
class PlainStep:
    """A step of a plain model. gradients: by the model's own names, or those of a peft folder."""

    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Document:
    """A sample, or the part of one that a row holds. input_ids: int64 [T]. labels: int64 [T], -100 where a token is not
    a target; not shifted, and -100 at the first token."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


def check_provable(config: RunConfig) -> None:
    """Raise UserError for an objective, or a key that changes its loss, that plain transformers is not compared with
    here. What the run's other keys exclude is in `refusals.py`."""
    objective = get_objective(config)
    if objective.name not in LOSSES:
        raise UserError(
            f"proof=true: there is no plain loss of task={objective.name} to compare with, only of "
            f"{', '.join(LOSSES)}; to prove the layout alone give data=sft"
        )
    if objective.name == DPO:
        _check_dpo(getattr(config, DPO))
    for modifier in objective.list_active(config):
        if modifier.key not in MODIFIERS:
            raise UserError(
                f"proof=true: there is no plain loss with {modifier.key}={write_value(modifier.read(config))} to "
                f"compare with; give {modifier.key}={modifier.off} to prove the rest"
            )


def _check_dpo(keys: Any) -> None:
    """Raise UserError for a variant of the loss. keys: the group `dpo`."""
    plain = type(keys)(beta=keys.beta)
    for each in fields(keys):
        if getattr(keys, each.name) != getattr(plain, each.name):
            raise UserError(
                f"proof=true: there is no plain loss with dpo.{each.name}={write_value(getattr(keys, each.name))} to "
                f"compare with; give dpo.{each.name}={write_value(getattr(plain, each.name))} to prove the rest"
            )


def compute_step(config: RunConfig, folder: Path, global_batch_size: int, device: torch.device) -> PlainStep:
    """Return loss and gradients of the first step of the small run.

    config: the small run's. folder: of model, adapter and tokens. global_batch_size: in rows, or groups of rows.
    """
    model = load_model(folder).to(device)
    documents = list(read_documents(config, folder / "tokens", global_batch_size, device))
    loss = 0.0
    for term in LOSSES[get_objective(config).name](model, documents, config):
        term.backward()
        loss += term.item()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    if (folder / "adapter").is_dir():
        gradients = {rename_for_peft(name): gradient for name, gradient in gradients.items()}
    return PlainStep(loss, gradients)


def load_model(folder: Path) -> nn.Module:
    """Return the plain model of a proof, with the adapter if there is one. Its experts are computed one by one."""
    place = folder / "model"
    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    config._experts_implementation = "eager"
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        place, config=config, dtype=torch.float32, trust_remote_code=False
    )
    if (folder / "adapter").is_dir():
        from peft import PeftModel  # it takes seconds

        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    return model.train()


def read_documents(config: RunConfig, tokens: Path, global_batch_size: int, device: torch.device) -> Iterator[Document]:
    """Yield the documents of the first step's global batch."""
    plan = build_row_plan(config, "train_file")
    rows = Rows(tokens, plan, True, True)
    order = build_order(config, tokens, len(rows) // plan.rows_per_group, global_batch_size)
    for row in list_rows(order.sample_ids(0), plan.rows_per_group).tolist():
        lengths = [stop - start for _, start, stop in rows.pieces(row)]
        columns = (
            torch.from_numpy(column.astype("int64")).to(device).split(lengths)
            for column in (rows.input_ids(row), rows.labels(row))
        )
        yield from (Document(*parts) for parts in zip(*columns, strict=True))


def score_tokens(model: nn.Module, document: Document, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross entropy of a document's targets, summed: a scalar, fp32."""
    logits = model(input_ids=document.input_ids[None], use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, document.labels[1:], reduction="sum", label_smoothing=label_smoothing)


def yield_next_token(model: nn.Module, documents: Sequence[Document], config: RunConfig) -> Iterator[torch.Tensor]:
    """Yield terms whose sum is the mean cross entropy of all targets."""
    num_targets = sum(document.num_targets for document in documents)
    for document in documents:
        if document.num_targets:
            yield score_tokens(model, document, config.label_smoothing) / num_targets


def yield_dpo(model: nn.Module, documents: Sequence[Document], config: RunConfig) -> Iterator[torch.Tensor]:
    """Yield terms whose sum is the DPO loss (2305.18290, equation 7); documents 2 i and 2 i + 1 are the chosen and the
    rejected answer of a pair. The reference is the model as it is, without its adapter."""
    beta, num_pairs = getattr(config, DPO).beta, len(documents) // 2
    for pair in zip(documents[::2], documents[1::2], strict=True):
        with torch.no_grad(), getattr(model, "disable_adapter", nullcontext)():
            references = [score_tokens(model, document) for document in pair]
        chosen, rejected = (reference - score_tokens(model, document) for document, reference in zip(pair, references))
        yield -F.logsigmoid(beta * (chosen - rejected)) / num_pairs


# Objective -> what yields the terms of its loss, one after the other, so that the graph of one is freed before the next
LOSSES: dict[str, Callable[[nn.Module, Sequence[Document], RunConfig], Iterator[torch.Tensor]]] = {
    "sft": yield_next_token,
    "pretrain": yield_next_token,
    DPO: yield_dpo,
}


def rename_for_peft(name: str) -> str:
    """Return the name that a parameter of a peft model has in the adapter's files."""
    name = name.replace("_vector.default.weight", "_vector")
    return name.replace(".default", "").replace(".modules_to_save", "")
