"""Records the routers of the plain Hugging Face model with hooks, one document at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.storage.rows import Rows, count_rows, list_rows
from data.storage.tokenized import TokenizedDataset
from training.config.schema import RunConfig
from training.inputs.datasets import build_order, build_row_plan

SIGMOID = (  # the other families have softmax
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v3",
    "llama4_text",
    "minimax_m2",
    "solar_open",
)
BIAS = "e_score_correction_bias"
NUM_EXPERTS = 8


@dataclass
class Routed:
    """Records of one router in a step."""

    is_sigmoid: bool
    bias: torch.Tensor | None
    loads: torch.Tensor  # of the whole run

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.aux = self.z = torch.zeros(())
        self.step_loads = torch.zeros(NUM_EXPERTS)

    def look(self, router: nn.Module, args: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        """One document."""
        if not torch.is_grad_enabled():
            return
        if len(outputs) == 3:
            logits, _, indices = outputs
        else:  # of a Llama 4: scores of all experts, 0 but for the chosen
            logits, indices = outputs[1], outputs[0].argmax(dim=1, keepdim=True)
        scores = logits.sigmoid() if self.is_sigmoid else logits.exp()
        scores = scores / scores.sum(1, keepdim=True)
        for expert in range(NUM_EXPERTS):
            chosen = int((indices == expert).sum())
            f = NUM_EXPERTS / (indices.shape[1] * len(logits)) * chosen
            self.aux = self.aux + f * scores[:, expert].mean()
            self.step_loads[expert] += chosen
        self.z = self.z + (logits.exp().sum(1).log() ** 2).sum()

    def finish(self, speed: float) -> None:
        if self.bias is not None:
            self.bias += speed * torch.sign(self.step_loads.mean() - self.step_loads).view_as(self.bias)
        self.loads += self.step_loads
        self.start()


def watch(model: nn.Module, family: str) -> list[Routed]:
    watched = []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router", "feed_forward.router")):
            block_state = dict(model.get_submodule(name.rpartition(".")[0]).state_dict(keep_vars=True))
            bias = next((tensor for key, tensor in block_state.items() if key.endswith(BIAS)), None)
            watched.append(Routed(family in SIGMOID, bias, torch.zeros(NUM_EXPERTS)))
            module.register_forward_hook(watched[-1].look)
    return watched


def list_documents(config: RunConfig, folder: Path, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) of the documents of a global batch, [T] each."""
    plan = build_row_plan(config, "train_file")
    rows, dataset = Rows(folder, plan, True, True), TokenizedDataset(folder, True, True)
    order = build_order(config, folder, count_rows(folder, plan), config.global_batch_size)
    for row in list_rows(order.sample_ids(step), plan.rows_per_group):
        for sample, start, stop in rows.pieces(int(row)):
            ids, labels = (
                torch.from_numpy(column(sample)[start:stop].astype("int64"))
                for column in (dataset.input_ids, dataset.labels)
            )
            yield ids, labels


def add_router_losses(config: RunConfig, folder: Path, step: int, model: nn.Module, watched: Sequence[Routed]) -> None:
    """Adds the gradient of the routers' losses of a step to that of the parameters."""
    documents = [ids for ids, _ in list_documents(config, folder, step)]
    num_tokens = sum(map(len, documents))
    for routed in watched:
        routed.start()
    for ids in documents:
        model(ids[None])
        balance, squares = (sum(getattr(routed, name) for routed in watched) for name in ("aux", "z"))
        scaled = config.moe.aux_loss_coef * balance / len(documents) + config.moe.z_loss_coef * squares / num_tokens
        scaled.backward()
        for routed in watched:
            routed.start()
