"""The gates of a mixture in a run in bf16: in fp32 from the first pass to the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, build_engine, train_run
from support.families import save_family
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup

MIXTURE, GATE = "ernie4_5_moe", "gate.weight"  # its gates stay in fp32 in each release of transformers
STEPS = 4


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    """case(name, num_stages, world_size, *overrides): a run of a mixture whose gates no number of 16 bits holds."""
    save_family(tmp_path / "hf", MIXTURE, num_hidden_layers=2)
    save_tokenizer(tmp_path / "hf")
    records = save_records(tmp_path / "train.jsonl", 40)

    def build(name: str, num_stages: int, world_size: int, *overrides: str) -> Case:
        keys = ("precision=bf16", "optimizer=adamw", "learning_rate=1e-3", f"output_dir={tmp_path}/{name}", *overrides)
        return Case(tmp_path / "hf", records, tmp_path, num_stages, world_size, STEPS, keys)

    return build


def train_and_compare(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights before the first step, and after the steps dtypes, and whether all of a weight differs from
    its master weights by no more than its dtype rounds."""
    from training.checkpoint.optimizer_state import WEIGHT, collect_state

    engine, loader, *_ = build_engine(case)
    named = {name: each for name, each, _ in engine.module.named_hf_parameters()}
    before = {name: each.detach().clone() for name, each in named.items() if name.endswith(GATE)}
    micro_batches = loader.iterate(0, case.steps)
    for step in range(case.steps):
        engine.train_step(micro_batches, step, case.steps)
    found = {}
    for key, master in collect_state(engine).items():
        kind, _, label = key.partition("/")
        if kind == WEIGHT:
            weight = named[label.partition("@")[0]].detach()
            found[label] = weight.dtype, torch.equal(weight.flatten(), master.to(weight.dtype).flatten())
    return before, found


@pytest.mark.parametrize(
    "keys",
    [(), pytest.param(("zero_stage=2", "offload_optimizer=cpu"), marks=pytest.mark.full)],
    ids=["stage1", "offloaded"],
)
def test_gates_are_trained_in_fp32(
    workers: Callable[[int], WorkerGroup], case: Callable[..., Case], tmp_path: Path, keys: tuple[str, ...]
) -> None:
    [(before, found)] = workers(1).run(train_and_compare, case("out", 1, 1, *keys))
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert before and all(torch.equal(each, stored[name]) for name, each in before.items())
    assert all(is_master for _, is_master in found.values())
    dtypes = {label.partition("@")[0]: dtype for label, (dtype, _) in found.items()}
    assert dtypes.keys() > before.keys()
    for name, dtype in dtypes.items():
        assert dtype is (torch.float32 if name in before else torch.bfloat16), name


@pytest.mark.parametrize(
    ("num_stages", "world_size"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.full), pytest.param(1, 2, marks=pytest.mark.full)],
)
def test_a_resumed_run_exports_the_same_gates(
    workers: Callable[[int], WorkerGroup], case: Callable[..., Case], tmp_path: Path, num_stages: int, world_size: int
) -> None:
    train = workers(world_size).run
    train(train_run, case("whole", num_stages, world_size, "save_steps=null"))
    train(train_run, case("halves", num_stages, world_size, "save_steps=2", "stop_after_steps=2"))
    train(train_run, case("halves", num_stages, world_size, "save_steps=2", "resume=latest"))
    expected, found = (load_file(tmp_path / name / "hf/model.safetensors") for name in ("whole", "halves"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())
    gates = {name for name in found if name.endswith(GATE)}
    assert gates and all(found[name].dtype is torch.float32 for name in gates)
    assert found["model.embed_tokens.weight"].dtype is torch.bfloat16
    assert json.loads((tmp_path / "halves/hf/config.json").read_text())["dtype"] == "bfloat16"
