"""One step of the small run, by the run's own parts, and the gradients that it took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.storage.rows import count_rows
from models.adapters.folder import to_peft_name
from models.layers.layer import Layer
from models.weights.pipeline_checkpoint import layer_file
from models.weights.vocabulary import open_tokenizer
from training.build import build_engine, build_loaders
from training.checkpoint.share import plan_share
from training.distributed.process import make_host_group
from training.engine.engine import Engine
from training.inputs.datasets import build_row_plan
from training.inputs.loaders import RankData
from training.inputs.step_budget import StepBudget
from training.inputs.step_totals import SharedTotals
from training.setup import Run


@dataclass(frozen=True)
class StagedStep:
    """A step over all stages. gradients: of what is trained, by the names in the files of a model or of an adapter; of
    other ranks than the main one empty."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    num_tokens: int
    num_targets: int


def take_step(run: Run, folder: Path) -> StagedStep:
    """Build the small run and take its first step. All ranks call it. folder: of model, adapter and tokens."""
    config, setup, tokens = run.config, run.setup, folder / "tokens"
    engine = build_engine(run)
    data = RankData({"train_file": tokens}, open_tokenizer(str(folder / "model")), setup.layout, run.ranks)
    num_rows = count_rows(tokens, build_row_plan(config, "train_file"))
    loaders = build_loaders(run, engine, data, StepBudget(num_rows, 1, 1))
    totals = SharedTotals(loaders.train, 1).get(0)
    micro_batches = loaders.train.iterate(0, 1)
    group = make_host_group()
    before = gather_weights(engine, setup.layers, group)
    if loaders.first_pass is not None:
        first = loaders.train.first.iterate(0, 1)
        loaders.first_pass.prepare(first, setup.layout.gradient_accumulation_steps, totals.num_samples)
    loss, learning_rate = engine.train_step(micro_batches, 0, 1, totals=totals)
    after = gather_weights(engine, setup.layers, group)
    trained = gather_trained(engine, group)
    gradients = {
        name: (before[name].double() - after[name].double()).float() / learning_rate for name in trained & after.keys()
    }
    norm = float(engine.gradient_norm())
    return StagedStep(loss.item(), norm, gradients, totals.num_tokens, totals.num_targets)


def gather_weights(engine: Engine, layers: list[Layer], group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Return what a checkpoint would hold of the model, on the main rank; nothing on the others, which call it too."""
    by_file = {layer_file(Path(), index).name: layer for index, layer in enumerate(layers)}
    adapts = engine.module.options.adapter is not None
    own = {}
    for share in plan_share(engine, weights_only=True):
        layer = by_file[share.name]
        for name, tensor in share.tensors.items():
            own[to_peft_name(name, layer) if adapts else layer.hf_prefix + name] = tensor.cpu().clone()
    return _merge(own, group)


def gather_trained(engine: Engine, group: dist.ProcessGroup | None) -> set[str]:
    """Return the names of what is trained, as `gather_weights` has them, on the main rank."""
    adapts = engine.module.options.adapter is not None
    own = {}
    for layer in engine.module.local_layers:
        for name, parameter in layer.module.named_parameters():
            if parameter.requires_grad:
                own[to_peft_name(name, layer.spec) if adapts else layer.spec.hf_prefix + name] = True
    return set(_merge(own, group))


def _merge(own: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    gathered: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.gather_object(own, gathered if dist.get_rank() == 0 else None, dst=0, group=group)
    return {name: value for part in gathered if part is not None for name, value in part.items()}
