"""Whole runs, as the launcher starts them, on groups of worker processes: resume, evaluation, export, precision."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, mean_loss, relative_difference, train_run
from support.runs import eval_dataset, export_of, read_metrics
from support.workers import WorkerError
from transformers import AutoModelForCausalLM

from training.checkpoint.resume import choose_resume
from training.checkpoint.run_folder import RunFolder

FROM_SCRATCH = (
    "init=random",
    "+model.model_type=llama",
    "+model.vocab_size=320",
    "+model.hidden_size=48",
    "+model.intermediate_size=80",
    "+model.num_hidden_layers=4",
    "+model.num_attention_heads=4",
    "+model.num_key_value_heads=2",
    "max_steps=2",
    "eval_file=null",
)


def test_a_model_from_scratch_is_the_same_at_every_layout(run: Callable[..., Path], root: Path) -> None:
    given = (*FROM_SCRATCH, f"tokenizer_name_or_path={root}/tiedFalse")
    one, two = run("one", 1, 1, *given), run("two", 2, 2, *given, "model_name_or_path=/nothing/there")
    for mine, theirs in zip(read_metrics(one), read_metrics(two), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and mine["grad_norm"] == pytest.approx(
            theirs["grad_norm"], rel=1e-5
        )
    assert read_metrics(one)[0]["loss"] == pytest.approx(math.log(320), rel=0.05)  # an untrained model
    assert AutoModelForCausalLM.from_pretrained(two / "hf").config.hidden_size == 48


def test_evaluate_only_gives_the_loss_of_the_run_at_any_layout(run: Callable[..., Path]) -> None:
    out = run("whole", 2, 2, "precision=bf16")
    trained = read_metrics(out)[-1]
    before = sorted(out.rglob("*"))
    run("whole", 2, 2, "precision=bf16", "evaluate_only=true", "resume=latest")
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["eval_loss"], found["eval_tokens"]) == (trained["eval_loss"], trained["eval_tokens"])
    assert sorted(out.rglob("*")) == sorted([*before, out / "evaluation.json"])  # and nothing else

    other = run(
        "other", 1, 1, "precision=bf16", "evaluate_only=true", f"model_name_or_path={out}/hf", "logger=tensorboard"
    )
    found = json.loads((other / "evaluation.json").read_text())
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    events = EventAccumulator(str(other / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval_loss")] == [
        (0, pytest.approx(found["eval_loss"], rel=1e-6))
    ]


SHARED_BF16 = ("precision=bf16", "activation_checkpoint_interval=1")


def test_a_run_from_another_ones_checkpoint_ends_with_the_same_bits(run) -> None:
    whole = run("whole", 2, 4, *SHARED_BF16, "save_steps=2", tied=True)
    rest = run("rest", 2, 4, *SHARED_BF16, f"resume={whole}/checkpoints/global_step2", tied=True)
    assert read_metrics(rest) == [record for record in read_metrics(whole) if record["step"] > 2]
    expected = export_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in export_of(rest).items())


@pytest.mark.full
@pytest.mark.parametrize(
    "num_stages, world_size, tied, overrides",
    [
        (2, 2, False, ()),
        (2, 4, True, SHARED_BF16),
        (1, 1, False, ("num_workers=1", "data.pad_to=max_seq_length", "data.packing=true")),
    ],
    ids=["pp2", "pp2xdp2-tied-bf16-checkpointed", "pp1-workers-packed"],
)
def test_resume_continues_exactly(
    run, finished, num_stages: int, world_size: int, tied: bool, overrides: tuple[str, ...]
) -> None:
    whole = finished(num_stages, world_size, *overrides, tied=tied)
    run("halves", num_stages, world_size, *overrides, "stop_after_steps=2", tied=tied)
    halves = run("halves", num_stages, world_size, *overrides, "resume=latest", tied=tied)

    resumed = [record for record in read_metrics(halves) if not (record["step"] == 2 and "eval_loss" in record)]
    assert resumed == read_metrics(whole)
    assert [record["step"] for record in resumed if "loss" in record] == [1, 2, 3, 4]
    expected = export_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in export_of(halves).items())


def test_a_run_that_died_in_its_export_is_finished(run, finished, tmp_path: Path) -> None:
    output_dir = shutil.copytree(finished(2, 2), tmp_path / "run")
    expected, steps = export_of(output_dir), read_metrics(output_dir)
    shutil.rmtree(output_dir / "hf")
    (output_dir / "completed.json").unlink()
    run("run", 2, 2, "resume=latest")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in export_of(output_dir).items())
    assert json.loads((output_dir / "completed.json").read_text())["step"] == 4 and read_metrics(output_dir) == steps


def test_a_finished_run_is_unchanged_and_can_be_trained_further(run, finished, tmp_path: Path) -> None:
    output_dir = shutil.copytree(finished(2, 2), tmp_path / "run")
    before = {file: file.read_bytes() for file in output_dir.rglob("*") if file.is_file()}
    confirmed = (output_dir / "completed.json").stat().st_mtime_ns
    run("run", 2, 2, "resume=auto")
    assert {file: file.read_bytes() for file in output_dir.rglob("*") if file.is_file()} == before
    assert (output_dir / "completed.json").stat().st_mtime_ns > confirmed, "which is what a supervisor waits for"
    run("run", 2, 2, "resume=latest", "max_steps=5", "eval_file=null")
    assert json.loads((output_dir / "completed.json").read_text())["step"] == 5
    with pytest.raises(WorkerError, match="is at step 5 of 4, no step is left; raise max_steps"):
        run("run", 2, 2, f"resume={output_dir}/checkpoints/global_step5")
    assert choose_resume("auto", RunFolder(output_dir)) == "latest", "not the start that was refused"


@pytest.mark.parametrize(
    "num_stages, world_size",
    [pytest.param(1, 1, marks=pytest.mark.full), (2, 2), (2, 4)],
    ids=["pp1", "pp2", "pp2xdp2"],
)
def test_export_gives_the_reported_eval_loss_in_plain_transformers(
    finished, root: Path, num_stages: int, world_size: int
) -> None:
    output_dir = finished(num_stages, world_size)
    reported = read_metrics(output_dir)[-1]

    loss, num_targets = mean_loss(AutoModelForCausalLM.from_pretrained(output_dir / "hf"), eval_dataset(root))
    assert reported["eval_tokens"] == num_targets
    assert abs(loss - reported["eval_loss"]) < 1e-4


def read_masters(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the fp32 weights in a checkpoint of this layout."""
    files = sorted((output_dir / "checkpoints" / f"global_step{step}").glob("optimizer-*.safetensors"))
    masters = {name: tensor for file in files for name, tensor in load_file(file).items() if name.startswith("weight/")}
    assert masters
    return masters


@pytest.mark.full
@pytest.mark.parametrize("optimizer, tied", [("sgd", True), ("adamw", False)])
def test_an_offloaded_optimizer_in_bf16_equals_one_on_the_device(run, optimizer: str, tied: bool) -> None:
    overrides = (
        "precision=bf16",
        "save_steps=1",
        f"optimizer={optimizer}",
        "learning_rate=" + {"sgd": "0.5", "adamw": "1e-3"}[optimizer],
    )
    plain = run("plain", 2, 2, *overrides, tied=tied)
    offloaded = run("offloaded", 2, 2, *overrides, "offload_optimizer=cpu", tied=tied)
    for a, b in zip(read_metrics(offloaded), read_metrics(plain), strict=True):
        key = "eval_loss" if "eval_loss" in a else "loss"
        assert a[key] == pytest.approx(b[key], rel=2e-3)
        assert "loss" not in a or a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    if optimizer == "sgd":  # Adam turns the last bit of a gradient into a full step
        expected = read_masters(plain, 1)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in read_masters(offloaded, 1).items())
        expected = export_of(plain)
        for name, tensor in export_of(offloaded).items():
            # bf16 keeps 8 significant bits: a weight's neighbours are up to 2**-7 of it away
            assert relative_difference(tensor.float(), expected[name].float()) <= 2**-7, name


@pytest.mark.full  # the logger itself: tests/training/observability/test_loggers.py
def test_weights_and_biases_offline_writes_a_run_folder(run) -> None:
    output_dir = run("run", 1, 1, "logger=wandb", "logger.mode=offline", "max_steps=1")
    written = list((output_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 1 and written[0].stat().st_size > 0


@pytest.mark.full
def test_records_that_are_skipped_are_listed_in_an_overwritten_folder_and_an_evaluation_keeps_the_list(
    run: Callable[..., Path], root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text((root / "train.jsonl").read_text() + "{}\n")
    keys = (f"train_file={file}", "data.on_bad_record=skip", "max_steps=1", "lr_scheduler_type=constant")
    run("out", 1, 1, *keys)
    out = run("out", 1, 1, *keys, "overwrite_output_dir=true")
    listed = (out / "skipped.txt").read_text()
    assert listed.startswith(f"train_file: {file}:") and listed.count("\n") == 1
    run("out", 1, 1, *keys, "evaluate_only=true", "resume=latest")
    assert (out / "skipped.txt").read_text() == listed


def train_with_broken_logger(case: Case) -> list[str]:
    """On a rank: a run whose logger loses its network. Returns what was called, and whether the export was there."""
    from unittest.mock import patch

    from training.trackers.tensorboard import TensorBoardTracker

    calls = []
    exported = Path(case.config().output_dir) / "hf" / "config.json"

    def lose(self: Any, figures: Any, step: int) -> None:
        calls.append("report")
        raise ConnectionError("no route to host")

    def close(self: Any) -> None:
        calls.append(f"close, exported: {exported.is_file()}")

    for name, method in (("log_metrics", lose), ("close", close)):
        with patch.object(TensorBoardTracker, name, method):
            train_run(replace(case, overrides=(*case.overrides, "overwrite_output_dir=true")))
    return calls


def test_a_logger_neither_ends_a_run_nor_delays_its_export(workers, root: Path, tmp_path: Path) -> None:
    keys = (f"output_dir={tmp_path}/out", "logger=tensorboard", "logging_steps=1")
    (calls,) = workers(1).run(
        train_with_broken_logger, Case(root / "tiedFalse", root / "train.jsonl", root, 1, 1, 2, keys)
    )
    assert calls == ["report", "close, exported: True"]
