"""The losses of routers through real stages against the plain Hugging Face model, each document run alone, its router's
scores taken by hooks: gradients, steps, and what is reported of them. And the bias against a plain loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import BOUND, CHECKPOINTED, SELECTIVE, Case, build_engine, hf_weights, merge, worst_difference
from support.families import save_family
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from data.order import GlobalOrder
from data.storage.rows import Rows
from data.storage.tokenized import TokenizedDataset
from training.inputs.datasets import build_row_plan

AUX, Z, SPEED = 0.5, 0.02, 0.01
LOSSES = (f"moe.aux_loss_coef={AUX}", f"moe.z_loss_coef={Z}")
PACKED = ("data.packing=true", "max_seq_length=160")
STEPS = 3
LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "dp2": (1, 2), "tp2": (1, 2)}  # num_stages, ranks


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(layout, *overrides): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("routers")
    records = save_records(root / "train.jsonl", 60)
    save_tokenizer(root / "tokenizer")

    def case(layout: str, *overrides: str, family: str = "deepseek_v3") -> Case:
        folder = root / family
        if not folder.exists():
            save_family(folder, family)
        num_stages, world_size = LAYOUTS[layout]
        given = (f"tokenizer_name_or_path={root}/tokenizer", "learning_rate=0.05", *overrides)
        given += ("tensor_parallel_size=2",) if layout == "tp2" else ()
        return Case(folder, records, root, num_stages, world_size, STEPS, given)

    return case


def train_with_routers(case: Case) -> dict[str, Any]:
    """As `train_case`, and what the routers report of all steps."""
    from training.engine.steps import train_step
    from training.inputs.step_totals import SharedTotals

    engine, loader, config, _, _ = build_engine(case)
    micro_batches, totals = loader.iterate(0, case.steps), SharedTotals(loader, case.steps)
    losses, norms = [], []
    for step in range(case.steps):
        known = totals.of_step(step)
        losses.append(train_step(engine, micro_batches, config, step, case.steps, totals=known)[0].item())
        norms.append(float(engine.gradient_norm()))
    routed = engine.module.routers.finish_interval()
    return {"losses": losses, "norms": norms, "weights": hf_weights(engine), "routed": routed}


@dataclass
class Routed:
    """What the hooks have seen of one layer: sums of a step, and tokens of each expert of all steps."""

    name: str
    bias: torch.Tensor
    aux: Any = 0.0
    z: Any = 0.0
    step_loads: torch.Tensor = field(default_factory=lambda: torch.zeros(8))
    loads: torch.Tensor = field(default_factory=lambda: torch.zeros(8))


def watch(model: nn.Module) -> list[Routed]:
    watched = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            routed = Routed(name, module.e_score_correction_bias)
            module.register_forward_hook(lambda _, args, outputs, routed=routed: look(routed, outputs))
            watched.append(routed)
    return watched


def look(routed: Routed, outputs: tuple[torch.Tensor, ...]) -> None:
    """One document."""
    logits, _, indices = outputs
    num_tokens, num_experts = logits.shape
    scores = logits.sigmoid()
    scores = scores / scores.sum(1, keepdim=True)
    for expert in range(num_experts):
        chosen = int((indices == expert).sum())
        f = num_experts / (indices.shape[1] * num_tokens) * chosen
        routed.aux = routed.aux + f * scores[:, expert].mean()
        routed.step_loads[expert] += chosen
    routed.z = routed.z + (logits.exp().sum(1).log() ** 2).sum()


def train_oracle(case: Case, aux: float, z: float, speed: float = 0.0) -> dict[str, Any]:
    config = case.config()
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).train()
    watched = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    folder = next(path for path in (case.workdir / "cache").iterdir() if path.is_dir())
    rows, dataset = Rows(folder, build_row_plan(config, "train_file"), True, True), TokenizedDataset(folder, True, True)
    order = GlobalOrder(len(rows), config.global_batch_size, config.seed)
    losses, norms, reported = [], [], torch.zeros(2)
    num_documents = num_tokens = 0
    for step in range(case.steps):
        documents = [
            [torch.from_numpy(column(sample)[start:stop].astype("int64")) for column in (dataset.input_ids, dataset.labels)]
            for row in order.sample_ids(step)
            for sample, start, stop in rows.pieces(int(row))
        ]
        num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        tokens = sum(len(ids) for ids, _ in documents)
        loss = torch.zeros(())
        for ids, labels in documents:
            loss = loss + F.cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum") / num_targets
        balance, squares = (sum(getattr(routed, name) for routed in watched) for name in ("aux", "z"))
        optimizer.zero_grad()
        (loss + aux * balance / len(documents) + z * squares / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        losses.append(loss.item())
        optimizer.step()
        reported += torch.stack([balance, squares]).detach() / len(watched)
        num_documents, num_tokens = num_documents + len(documents), num_tokens + tokens
        for routed in watched:
            routed.bias += speed * torch.sign(routed.step_loads.mean() - routed.step_loads)
            routed.loads += routed.step_loads
            routed.step_loads, routed.aux, routed.z = torch.zeros(8), 0.0, 0.0
    loads = torch.stack([routed.loads / routed.loads.mean() for routed in watched])
    routed = {"router_aux_loss": (reported[0] / num_documents).item(), "router_z_loss": (reported[1] / num_tokens).item()}
    routed |= {"expert_load_max": loads.max().item(), "expert_load_min": loads.min().item()}
    weights = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "routed": routed}


find_oracle = cache(train_oracle)


def compare(
    workers: Callable[[int], WorkerGroup], case: Case, speed: float = 0.0, found: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    results = found or workers(case.world_size).run(train_with_routers, case)
    result = merge(results)
    plain = [key for key in case.overrides if key.startswith(("data", "max_seq", "tokenizer", "learning"))]
    oracle = find_oracle(replace(case, num_stages=1, world_size=1, overrides=tuple(plain)), AUX, Z, speed)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for result in results:
        assert result["routed"] == pytest.approx(oracle["routed"], rel=BOUND)
    return oracle


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("pp1", ()),
        ("pp2", (CHECKPOINTED, *PACKED)),
        ("dp2", SELECTIVE),
        ("tp2", ()),
    ],
)
def test_gradients_with_both_losses_are_those_of_each_document_alone(workers, material, layout, overrides) -> None:
    compare(workers, material(layout, *LOSSES, *overrides))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("recompute", [(), (CHECKPOINTED,), SELECTIVE], ids=["kept", "checkpointed", "selective"])
def test_compiled_layers(workers, material, recompute: tuple[str, ...]) -> None:
    """Two kinds of layers, each one piece of code for the first lengths, and one for all others."""
    case = material("pp1", "compile=true", *LOSSES, *recompute)
    (compiled,) = workers(1).run(train_compiled, case)
    print(compiled["num_graphs"], compiled["breaks"])
    compare(workers, case, found=[compiled])


def train_compiled(case: Case) -> dict[str, Any]:
    """As `train_with_routers`, with the number of pieces of code that were compiled for it."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    from training import setup

    reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(setup, "choose_experts", lambda *_: "batched_mm")
        result = train_with_routers(case)
    return {**result, "num_graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
