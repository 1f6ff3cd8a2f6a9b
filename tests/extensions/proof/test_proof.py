"""`proof=true`: a small model at a run's layout against plain transformers, in real ranks; and that it fails where a
gradient is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.configs import build_config
from support.workers import WorkerError, WorkerGroup

from data.loading import loader
from errors import UserError
from extension import collect_facts
from extensions.proof.certificate import FILE
from extensions.proof.run import check_provable, check_run, prove_small
from extensions.proof.small_run import shrink_model
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import RunConfig
from training.distributed.ranks import Ranks
from training.planner.run import describe_model

BATCH = ("micro_batch_size=2", "global_batch_size=16", "max_seq_length=256")


def compose(folder: Path, *overrides: str) -> RunConfig:
    """A run without weights, of a model that conf/model describes."""
    keys = ("model=llama_tiny", f"model_name_or_path={folder}/none", f"train_file={folder}/none.jsonl", *BATCH)
    return build_config(*keys, f"output_dir={folder}/out", f"data.cache_dir={folder}/cache", "proof=true", *overrides)


def prove(config: RunConfig, wrong: float = 1.0) -> dict[str, Any]:
    """Proves a run on this rank, and returns what the main one has written. wrong: the factor of its denominators."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ranks, collate = Ranks(rank, world_size, rank, world_size), loader._collate

    def collate_wrong(*arguments: Any, denominators: list[float], **options: Any) -> Any:
        return collate(*arguments, denominators=[wrong * each for each in denominators], **options)

    run = check_run(config, ranks, ())
    with patch.object(loader, "_collate", collate_wrong):
        prove_small(run.config, describe_model(config).config, shrink_model(run), ranks)
    return json.loads((Path(config.output_dir) / FILE).read_text())


PP2, DP2 = ("num_stages=2",), ("num_stages=1",)
CASES = {  # ranks, keys
    "pp2": (2, PP2),
    "pp1": (1, ("num_stages=1",)),
    "pp2xdp2": (4, (*PP2, "activation_checkpoint_interval=1", "label_smoothing=0.1")),
    "interleaved": (2, (*PP2, "schedule=interleaved")),
    "zero-bubble": (2, (*PP2, "schedule=zero_bubble")),
    "packed": (2, (*PP2, "data.packing=true")),
    "pretrain": (2, (*PP2, "data=pretrain")),
    "tp2": (2, (*DP2, "tensor_parallel_size=2", "sequence_parallel=true")),
    "cp2": (2, (*DP2, "context_parallel_size=2")),
    "zero3": (2, (*DP2, "zero_stage=3")),
    "mixtral-ep2": (2, (*DP2, "model=mixtral_8x7b", "expert_parallel_size=2")),
    "qwen3": (2, (*PP2, "model=qwen3_30b_a3b")),
    "deepseek-v3": (2, (*PP2, "model=deepseek_v3")),
    "lora": (2, (*PP2, "adapter=lora")),
    "lora-on-experts": (2, (*PP2, "model=mixtral_8x7b", "adapter=lora")),
    "frozen": (2, (*PP2, "freeze=[embed_tokens]")),
    "dpo": (2, (*PP2, "data=preference")),
    "packed-dpo-lora": (2, (*PP2, "data=preference", "data.packing=true", "adapter=lora")),
    "65b": (2, (*PP2, "model=llama_65b")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "pp2" else pytest.mark.full) for name in CASES]
)
def test_a_layout_has_the_gradients_of_transformers(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, name: str
) -> None:
    num_ranks, keys = CASES[name]
    found, *_ = workers(num_ranks).run(prove, compose(tmp_path, *keys))
    assert found["passed"] and found["worst_gradient_distance"] < 1e-5 and found["tensors"] > 20, found


def test_a_wrong_denominator_is_found(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    config = compose(tmp_path, "num_stages=1")
    with pytest.raises(WorkerError, match="the step is not that of transformers: the loss differs by 1.0e-03"):
        workers(1).run(prove, config, wrong=1 / 1.001)
    found = json.loads((tmp_path / "out" / FILE).read_text())
    assert not found["passed"] and found["worst_gradient_distance"] > 9e-4
    assert collect_facts(config, ["here"]) == {}
