"""Whole runs on a device that is not the CPU (`tests/support/strict_device.py`): no tensor of the host meets one of the
device, no collective of the device's groups carries one, and the host does not wait for the device within a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.cases import Case, train_case, train_run
from tests.support.families import save_family
from tests.support.strict_device import Collective, Record, Wait
from tests.support.workers import WorkerGroup

PASSES = ("ForwardPass", "BackwardPass")
STEPS = 3

CASES = [
    pytest.param(("precision=bf16", "max_grad_norm=0.05", "activation_checkpoint_interval=1"), id="bf16-clipped"),
    pytest.param(
        ("precision=bf16", "adapter=lora", "adapter.r=4", "data.packing=true", "learning_rate=0.1"), id="lora-packed"
    ),
    pytest.param(
        (
            "num_stages=1", "context_parallel_size=2", "context_parallel_mode=ring", "data.packing=true",
            "max_seq_length=256",
        ),
        id="packed-ring",
        marks=pytest.mark.full,
    ),
    pytest.param(
        ("schedule=interleaved", "partition_method=uniform", "max_grad_norm=0.05"),
        id="fp32-interleaved",
        marks=pytest.mark.full,
    ),
    pytest.param(
        (
            "model_name_or_path={folder}/experts", "tokenizer_name_or_path={folder}/model",
            "activation_checkpoint_interval=1", "data.packing=true", "max_seq_length=160", "moe.aux_loss_coef=0.1",
            "moe.z_loss_coef=0.01", "moe.update_router_bias=0.01",
        ),
        id="experts",
        marks=pytest.mark.full,
    ),
    pytest.param(
        (
            "model_name_or_path={folder}/hybrid", "tokenizer_name_or_path={folder}/model",
            "activation_checkpoint_interval=1", "data.packing=true", "max_seq_length=160",
        ),
        id="hybrid",
        marks=pytest.mark.full,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    tiny.save_llama(folder / "model", num_hidden_layers=2)
    tiny.save_tokenizer(folder / "model")
    tiny.save_records(folder / "train.jsonl", 40)
    tiny.save_records(folder / "eval.jsonl", 6, seed=1)
    save_family(folder / "experts", "deepseek_v3")
    save_family(folder / "hybrid", "qwen3_5_text")
    return folder


@pytest.fixture(scope="module")
def strict_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Separate processes: those with the strict device are of no use to other tests."""
    group = WorkerGroup(2, tmp_path_factory.mktemp("strict"))
    yield group
    group.close()


@pytest.mark.parametrize("overrides", CASES)
def test_a_step_waits_twice_and_computes_the_same(
    folder: Path, overrides: tuple[str, ...], strict_workers: WorkerGroup, workers: Callable[[int], WorkerGroup]
) -> None:
    case = make_case(folder, *overrides)
    expected = workers(2).run(train_case, case)
    for (found, waits), wanted in zip(strict_workers.run(train_on_device, case), expected, strict=True):
        bound = 1e-3 if "precision=bf16" in overrides else 1e-5  # the CPU has an attention kernel of its own
        assert found["losses"] == pytest.approx(wanted["losses"], rel=bound)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=100 * bound)
        assert [wait for wait in waits if wait.unit in PASSES] == []
        assert len(waits) <= 1, waits  # one more when the run reads whether the loss is finite


@pytest.mark.full
@pytest.mark.parametrize(("mode", "repeats"), [("grouped", 1), ("selective", 0)])
def test_divided_experts_wait_once_for_each_layer_and_pass(
    folder: Path, strict_workers: WorkerGroup, workers: Callable[[int], WorkerGroup], mode: str, repeats: int
) -> None:
    """For the numbers of rows; so do layers that are recomputed, but under `selective`, which keeps them."""
    keys = (
        "num_stages=1", "model_name_or_path={folder}/experts", "tokenizer_name_or_path={folder}/model",
        "expert_parallel_size=2", "activation_checkpoint_interval=1", f"activation_checkpoint_mode={mode}",
    )  # fmt: skip
    case = make_case(folder, *keys)
    expected = workers(2).run(train_case, case)
    for (found, waits), wanted in zip(strict_workers.run(train_on_device, case), expected, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        in_passes = [wait for wait in waits if wait.unit in PASSES]
        assert all("exchange_counts" in wait.place for wait in in_passes), in_passes
        counts = Counter(wait.unit for wait in in_passes)
        once = 2 * 3  # micro-batches of a replica, layers with experts
        assert [counts[unit] for unit in PASSES] == [once, repeats * once]
        assert len(waits) - len(in_passes) <= 1, waits


def test_a_run_on_a_device(folder: Path, tmp_path: Path, strict_workers: WorkerGroup) -> None:
    """Training, evaluation, saving, export."""
    case = make_case(folder, "precision=bf16", "eval_steps=3", f"eval_file={folder}/eval.jsonl", workdir=tmp_path)
    for waits, collectives in strict_workers.run(run_on_device, case):
        assert len(waits) <= 2, waits
        assert [each for each in collectives if each.carries_host_tensor and not each.on_host_group] == []
        assert len(collectives) > 20
    assert (tmp_path / "out/hf/model.safetensors").exists()


@pytest.mark.parametrize("use", ["mix", "wait", "collective"])
def test_the_device_is_strict(use: str, strict_workers: WorkerGroup) -> None:
    """The checks above can fail."""
    for mixed, record in strict_workers.run(do_what_a_gpu_would_not, use):
        assert mixed == (use == "mix")
        assert len(record.waits) == (2 if use == "wait" else 0)
        assert [each.carries_host_tensor for each in record.collectives] == ([True, False] * (use == "collective"))


def make_case(folder: Path, *overrides: str, workdir: Path | None = None) -> Case:
    files = folder / "model", folder / "train.jsonl", workdir or folder / "work"
    given = ("micro_batch_size=1", "global_batch_size=4", *(each.format(folder=folder) for each in overrides))
    return Case(*files, num_stages=2, world_size=2, steps=STEPS, overrides=given)


def train_on_device(case: Case) -> tuple[dict[str, Any], list[Wait]]:
    """The run, and the waits of the last step."""
    record = start_recording()
    from training.engine import pipeline_engine

    train_step, waits = pipeline_engine.PipelineStage.train_step, list[Wait]()

    def recorded(*args: Any, **named: Any) -> Any:
        record.waits.clear()
        loss = train_step(*args, **named)
        waits[:] = record.waits
        return loss

    pipeline_engine.PipelineStage.train_step = recorded
    try:
        return train_case(case), waits
    finally:
        pipeline_engine.PipelineStage.train_step = train_step


def run_on_device(case: Case) -> tuple[list[Wait], list[Collective]]:
    """The waits of its second step, in which nothing is due, and the collectives of the whole run."""
    record = start_recording()
    from training.loop import TrainingLoop

    take, finish, waits = TrainingLoop._take_step, TrainingLoop._finish_step, list[Wait]()

    def recorded_take(loop: TrainingLoop, *args: Any) -> Any:
        record.waits.clear()
        return take(loop, *args)

    def recorded_finish(loop: TrainingLoop, *args: Any) -> None:
        finish(loop, *args)
        if loop.state.step == 2:
            waits[:] = record.waits

    TrainingLoop._take_step, TrainingLoop._finish_step = recorded_take, recorded_finish
    try:
        train_run(case)
    finally:
        TrainingLoop._take_step, TrainingLoop._finish_step = take, finish
    return waits, record.collectives


def do_what_a_gpu_would_not(use: str) -> tuple[bool, Record]:
    record = start_recording()
    import torch
    import torch.distributed as dist

    ours = torch.ones(2, device="strict")
    record.waits.clear()
    try:
        if use == "mix":
            ours + torch.ones(2)
        elif use == "wait":
            ours.nonzero(), torch.ones(2).to("strict")
        else:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(ours)
    except RuntimeError as error:
        assert "host tensor [2]" in str(error)
        return True, record
    return False, record


def start_recording() -> Record:
    from tests.support import strict_device

    return strict_device.start_recording()
