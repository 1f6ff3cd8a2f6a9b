"""Checkpoints by need: weights alone, exports at chosen steps, no save at the end, and their sizes in advance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.cases import BOUND
from support.configs import build_config, set_keys
from support.pages import load_page
from transformers import AutoModelForCausalLM

from training.checkpoint.optimizer_state import FILE_PATTERN
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.config.schema import RunConfig
from training.disk_space import CheckpointSize, count_disk_bytes
from training.inputs.step_budget import find_finished

KEYS = ("max_steps=4", "eval_file=null", "logging_steps=1", "lr_scheduler_type=constant")


def measure(step_dir: Path) -> tuple[int, int]:
    """Return the bytes of the weights, and of the optimizer state."""
    states = sum(file.stat().st_size for file in step_dir.glob(FILE_PATTERN))
    return sum(file.stat().st_size for file in step_dir.glob("layer_*")), states


def list_names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name.startswith("hf"))


def test_weights_alone_and_exports_at_chosen_steps(run: Callable[..., Path]) -> None:
    out = run("weights", 2, 2, *KEYS, "save_weights_only=true", "save_steps=2", "keep_last=1", "export_steps=[1,3]")
    assert [path.name for path in (out / "checkpoints").glob("global_step*")] == ["global_step4"]
    assert list_names(out) == ["hf", "hf-step1", "hf-step3"]
    models = [AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32) for name in list_names(out)]
    heads = [model.lm_head.weight.detach() for model in models]
    assert len({float(weight.sum()) for weight in heads}) == 3, "three different steps"
    assert measure(out / "checkpoints" / "global_step4")[1] == 0
    with pytest.raises(Exception, match="holds weights alone .* start a new one with model_name_or_path="):
        run("weights", 2, 2, *KEYS, "max_steps=6", "save_weights_only=true", "resume=latest")


def test_the_best_is_of_the_same_evaluation_files(run: Callable[..., Path], root: Path) -> None:
    """Results on files that are easier, or harder, would decide which model is exported."""
    keys = (*KEYS[2:], "eval_steps=1", "save_steps=1", "load_best_model_at_end=true", "eval_on_start=false")
    same, other = f"eval_file={root}/eval.jsonl", f"eval_file={root}/train.jsonl"

    pages = []

    def continue_to(step: int, *given: str) -> tuple[dict[str, Any], list[int]]:
        out = run("best", 2, 2, *keys, f"max_steps={step}", *given, "resume=auto", "resume_allow_changes=true")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        pages.append(load_page(out / "report.html")["runs"][0])
        state = json.loads((out / f"checkpoints/global_step{step}/trainer_state.json").read_text())
        return state, [line["step"] for line in lines if "eval_loss" in line]

    first, _ = continue_to(1, same)
    second, evaluated = continue_to(2, same)
    assert first["evaluated_on"] == second["evaluated_on"] != "" and evaluated == [1, 2]
    assert second["best"]["step"] in (1, 2) and second["best"]["evaluations_since"] == 2 - second["best"]["step"]
    third, evaluated = continue_to(3, other)  # step 2 again, on this file
    assert third["evaluated_on"] != second["evaluated_on"] and evaluated == [1, 2, 2, 3]
    assert third["best"]["step"] in (2, 3)
    fourth, _ = continue_to(
        4, "eval_file={name: " + f"{root}/train.jsonl" + "}", "metric_for_best_model=eval_name_loss"
    )
    assert fourth["evaluated_on"] not in (second["evaluated_on"], third["evaluated_on"])
    check_page(pages[-1])


def check_page(page: dict[str, Any]) -> None:
    """The page of a run that was resumed three times is that of the whole run."""
    assert page["curves"]["loss"]["step"] == [1, 2, 3, 4] == page["curves"]["eval_loss"]["step"][-4:]
    saves = [(event["step"], event["kind"]) for event in page["events"] if event["kind"] in ("save", "resumed")]
    assert [event for event in saves if event[1] == "resumed"] == [(step, "resumed") for step in (1, 2, 3)]
    assert [step for step, kind in saves if kind == "save"] == [1, 2, 3, 4]
    assert page["facts"]["config"]["save_steps"] == 1 and page["completed"]["step"] == 4


@pytest.mark.full
def test_an_export_is_of_its_step(run: Callable[..., Path]) -> None:
    """Resumed from the checkpoint of the step before, the run exports the same again."""
    keys = (*KEYS, "save_steps=1", "export_steps=[2]", "optimizer=sgd")
    out = run("once", 2, 2, *keys)
    other = run("twice", 1, 2, *keys, "stop_after_steps=1")
    run("twice", 2, 2, *keys, "resume=latest")
    for name, weight in AutoModelForCausalLM.from_pretrained(out / "hf-step2", dtype=torch.float32).named_parameters():
        again = AutoModelForCausalLM.from_pretrained(other / "hf-step2", dtype=torch.float32).get_parameter(name)
        assert ((weight - again).abs().max() / weight.abs().max()) < BOUND, name


@pytest.mark.full
def test_nothing_is_saved_at_the_end(run: Callable[..., Path]) -> None:
    out = run("none", 2, 2, *KEYS, "save_final=false", "save_steps=3")
    assert [path.name for path in (out / "checkpoints").glob("global_step*")] == ["global_step3"]
    assert list_names(out) == []
    completed = json.loads((out / "completed.json").read_text())
    assert (completed["step"], completed["ended_by"]) == (4, "the last step")


@pytest.mark.full
@pytest.mark.parametrize("saves", [("save_steps=3",), ()], ids=["saved before", "never saved"])
def test_a_run_that_saved_nothing_at_its_end_is_not_trained_again(run: Callable[..., Path], saves: list[str]) -> None:
    """As a requeued job. A named checkpoint is trained further, and so is a run with more steps."""
    keys = (*KEYS, "save_final=false", *saves)
    out = run("again", 2, 2, *keys, "resume=auto")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file() and file.parent.name != "logs"}
    confirmed = (out / "completed.json").stat().st_mtime_ns
    run("again", 2, 2, *keys, "resume=auto")
    assert {file: file.read_bytes() for file in before} == before
    assert (out / "completed.json").stat().st_mtime_ns > confirmed, "which is what a supervisor waits for"
    trained = read_steps(out)
    run("again", 2, 2, *keys, *([f"resume={out}/checkpoints/global_step3"] if saves else []))
    assert read_steps(out) == pytest.approx(trained) and len(trained) == 4
    run("again", 2, 2, *keys, "max_steps=5", "resume=auto")
    assert len(read_steps(out)) == json.loads((out / "completed.json").read_text())["step"] == 5


def read_steps(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("record", "keys", "message"),
    [
        ({"step": 9, "ended_by": "the last step"}, ("resume=auto",), "has finished: step 9 of 9, not saved"),
        ({"step": 9, "ended_by": "the last step"}, ("resume=latest",), "has finished: step 9 of 9, not saved"),
        ({"step": 9, "ended_by": "the last step"}, ("resume=somewhere",), ""),
        ({"step": 9, "ended_by": "the last step"}, ("resume=null",), ""),
        ({"step": 9, "ended_by": "the last step"}, ("resume=auto", "save_final=true"), ""),  # it has left nothing
        ({"step": 7, "ended_by": "STOP"}, ("resume=auto",), ""),
        (
            {"step": 7, "ended_by": "early stopping"},
            ("resume=auto", "early_stopping_patience=2"),
            "has finished: step 7",
        ),
        ({"step": 7, "ended_by": "early stopping"}, ("resume=auto",), ""),
    ],
)
@pytest.mark.parametrize(("step", "again"), [(0, "omit resume"), (3, "global_step3")])
def test_whether_a_run_has_finished_is_read_from_its_record(
    tmp_path: Path, base: RunConfig, record: dict[str, Any], keys: tuple[str, ...], message: str, step: int, again: str
) -> None:
    RunFolder(tmp_path).write_completed(record)
    config = set_keys(base, f"output_dir={tmp_path}", "save_final=false", *keys)
    start = TrainerState(
        step=step, num_tokens=0, num_stages=1, dp_size=1, global_batch_size=4, micro_batch_size=4, num_samples=40,
        total_steps=9, seed=0,
    )  # fmt: skip
    found = find_finished(config, start)
    assert found.startswith(f"{tmp_path} {message}") and found.endswith(again) if message else found == ""


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return build_config()


@pytest.mark.full
def test_adapters_are_exported_at_chosen_steps(run: Callable[..., Path]) -> None:
    out = run("lora", 2, 2, *KEYS, "adapter=lora", "export_steps=[2]", "save_weights_only=true")
    assert list_names(out) == ["hf", "hf-step2"]
    assert (out / "hf-step2" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "keys",
    [
        ("precision=fp32",),
        pytest.param(("precision=bf16",), marks=pytest.mark.full),
        pytest.param(("precision=fp32", "optimizer=sgd"), marks=pytest.mark.full),
        pytest.param(("precision=bf16", "optimizer.state_dtype=bf16"), marks=pytest.mark.full),
        pytest.param(("precision=bf16", "adapter=lora", "adapter.r=64"), marks=pytest.mark.full),
        pytest.param(("precision=fp32", "save_weights_only=true"), marks=pytest.mark.full),
    ],
    ids=lambda keys: "-".join(key.rpartition("=")[2] for key in keys),
)
def test_sizes_are_predicted(run: Callable[..., Path], root: Path, keys: tuple[str, ...]) -> None:
    """In fp32 the master weights are the weights, and no file stores them twice."""
    optimizer = () if any(key.startswith("optimizer") for key in keys) else ("optimizer=adamw",)
    out = run("sizes", 2, 2, *KEYS, *keys, *optimizer, "stop_after_steps=1", "export_steps=[1]")
    text = (out / "plan.txt").read_text()
    weights, states = measure(out / "checkpoints" / "global_step1")
    (line,) = (line for line in text.splitlines() if line.startswith("on disk: "))
    predicted = read_bytes(line.removeprefix("on disk: ").partition(" a checkpoint")[0])
    assert predicted == pytest.approx(weights + states, rel=0.05)
    exported = sum(file.stat().st_size for file in (out / "hf-step1").glob("*.safetensors"))
    assert read_bytes(line.partition(", ")[2].partition(" an export")[0]) == pytest.approx(exported, rel=0.05)
    if "precision=fp32" in keys:
        for file in (out / "checkpoints" / "global_step1").glob(FILE_PATTERN):
            with safe_open(file, framework="pt") as saved:
                assert not [key for key in saved.keys() if key.startswith("weight/")]


@pytest.mark.parametrize(
    ("keys", "checkpoints", "exports"),
    [
        ((), 1, 1),
        (("save_steps=2",), None, 1),
        (("save_steps=2", "keep_last=3", "keep_best=1", "load_best_model_at_end=true", "eval_file=a"), 6, 1),
        (("save_steps=2", "keep_last=1", "export_steps=[1,2,3]"), 2, 4),
    ],
)
def test_the_space_that_a_whole_run_takes(keys: tuple[str, ...], checkpoints: int | None, exports: int) -> None:
    """It counts the checkpoints that are kept and the one that is being written."""
    config, size = build_config(*keys), CheckpointSize(weights=10, optimizer=60)
    assert count_disk_bytes(config, size) == (None if checkpoints is None else 70 * checkpoints + 10 * exports)


def read_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
