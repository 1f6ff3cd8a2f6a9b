"""Runs that go back to an earlier step, or start where there is nothing left to do: each ends in one line of steps and
the right export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.launching import run_supervised
from support.pages import load_page
from support.runs import export_of, read_metrics
from support.workers import WorkerError

from models.architecture.lookup import build_layers
from models.weights.sources import open_weights

KEYS = ("lr_scheduler_type=constant", "warmup_ratio=0", "eval_file=null", "save_steps=2", "max_steps=6")
SLOW, FAST = "learning_rate=1e-3", "learning_rate=3e-3"  # of the first line of steps, and of the second
FAILING = "callbacks=[{_target_: support.callbacks.Failing, rank: 0, step: 3}]"


@pytest.fixture
def begun(run: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """begun(*keys): a run that has finished with steps 2, 4 and 6, and its export."""
    return lambda *keys: run("out", 1, 1, *KEYS, SLOW, *keys)


@pytest.fixture
def expected(run: Callable[..., Path]) -> Callable[..., dict[str, torch.Tensor]]:
    """expected(*keys): the export of a run that was trained like the second line from the start, in a folder of its
    own."""

    def train(*keys: str) -> dict[str, torch.Tensor]:
        run("alone", 1, 1, *KEYS, SLOW, "stop_after_steps=2", "save_steps=null")
        return export_of(run("alone", 1, 1, *KEYS, FAST, "resume=latest", *keys))

    return train


def go_back(run: Callable[..., Path], out: Path, *keys: str, step: int = 2) -> Path:
    return run("out", 1, 1, *KEYS, FAST, f"resume={out}/checkpoints/global_step{step}", *keys)


def list_steps(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step")) for path in checkpoints.glob("global_step*"))


def read_completed(out: Path) -> dict[str, Any]:
    return json.loads((out / "completed.json").read_text())


def read_weights(step_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint under their Hugging Face names."""
    source = open_weights(str(step_dir))
    layers = list(enumerate(build_layers(source.config)))
    return {layer.hf_prefix + name: each for i, layer in layers for name, each in source.read_layer(i, layer).items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.full
def test_a_run_goes_back_and_sets_the_later_steps_aside_at_once(
    run: Callable[..., Path], begun: Callable[..., Path], expected: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """After a crash before its first save nothing of the old steps comes back."""
    out = begun("export_steps=[2,4]")
    old = export_of(out)
    with pytest.raises(WorkerError, match="Failing.on_step has failed at step 3"):
        go_back(run, out, "export_steps=[2,4]", FAILING)
    aside = out / "checkpoints" / "abandoned" / "1"
    assert list_steps(out / "checkpoints") == [2] and list_steps(aside) == [4, 6]
    assert (out / "checkpoints" / "latest").read_text() == "global_step2"
    assert not (out / "hf").exists() and not (out / "completed.json").exists() and not (out / "hf-step4").exists()
    assert equal(load_file(aside / "hf" / "model.safetensors"), old)
    (event,) = (event for event in load_page(out / "report.html")["runs"][0]["events"] if event["kind"] == "abandoned")
    names = "global_step6, global_step4, hf-step4, hf"
    assert event["text"] == f"set aside in {aside}: {names}, since the run starts from step 2" and event["step"] == 2
    run("out", 1, 1, *KEYS, FAST, "resume=auto", "export_steps=[2,4]")
    new = expected()
    assert equal(export_of(out), new) and not equal(new, old)
    assert list_steps(out / "checkpoints") == [2, 4, 6] and read_completed(out)["step"] == 6
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert not equal(load_file(out / "hf-step4" / "model.safetensors"), load_file(aside / "hf-step4/model.safetensors"))
    source = open_weights(str(aside))
    assert source.path == aside, "it can be read as any folder of checkpoints"


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "steps", "exported"),
    [
        ((), [2, 4, 6], 6),
        (("async_save=false",), [2, 4, 6], 6),
        (("save_final=false", "save_steps=null"), [2], None),
        (("keep_last=1",), [6], 6),
        (("max_steps=2",), [2], 2),
        (("stop_after_steps=2",), [2, 4], 4),
        (("stop_after_steps=2", "save_final=false", "save_steps=null", "export_steps=[3]"), [2, 3], None),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple | list) else str(value),
)
def test_the_second_line_is_the_only_one(
    run: Callable[..., Path], begun: Callable[..., Path], keys: tuple[str, ...], steps: list[int], exported: int | None
) -> None:
    out = begun()
    old = export_of(out)
    go_back(run, out, *keys)
    assert list_steps(out / "checkpoints") == steps and list_steps(out / "checkpoints/abandoned/1") == [4, 6]
    assert (out / "checkpoints" / "latest").read_text() == f"global_step{steps[-1]}"
    assert (out / "hf").exists() is (exported is not None)
    if exported is not None:
        assert read_completed(out)["step"] == exported and not equal(export_of(out), old)
        assert equal(export_of(out), read_weights(out / "checkpoints" / f"global_step{exported}"))


@pytest.mark.full
@pytest.mark.parametrize("keep", ["load_best_model_at_end=true", "keep_best=1"])
def test_the_best_is_one_of_the_second_line(
    run: Callable[..., Path], begun: Callable[..., Path], root: Path, keep: str
) -> None:
    """The first line's best, at step 6, is better than any of the second."""
    evaluating = (f"eval_file={root}/eval.jsonl", "eval_steps=2", "eval_on_start=false", "keep_last=1", keep)
    out = run("out", 1, 1, *KEYS, SLOW, *evaluating[:-2])
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(out) if "eval_loss" in line}
    assert min(losses, key=losses.get) == 6
    go_back(run, out, *evaluating, "learning_rate=1")
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(out) if "eval_loss" in line}
    assert sorted(losses) == [2, 4, 6] and min(losses, key=losses.get) == 2
    assert list_steps(out / "checkpoints") == [2, 6]
    if keep.startswith("load_best"):
        assert read_completed(out)["best_step"] == 2
        assert equal(export_of(out), read_weights(out / "checkpoints" / "global_step2"))


@pytest.mark.full
def test_a_start_from_another_folder_ends_in_steps_of_its_own(
    run: Callable[..., Path], begun: Callable[..., Path], root: Path
) -> None:
    """Also where nothing is left to train, and where the start itself is the best."""
    other = begun()
    for name, keys in {
        "nothing left": ("max_steps=6",),
        "the best": ("max_steps=8", f"eval_file={root}/eval.jsonl", "eval_steps=2", "eval_on_start=false",
                     "load_best_model_at_end=true", "learning_rate=1"),
    }.items():  # fmt: skip
        start = f"resume={other}/checkpoints/global_step6"
        out = run(name.replace(" ", "_"), 1, 1, *KEYS, FAST, start, *keys)
        assert 6 in list_steps(out / "checkpoints") and (out / "checkpoints" / "latest").exists()
        assert equal(export_of(out), export_of(other)), name
    assert list_steps(other / "checkpoints") == [2, 4, 6], "and leave that folder as it was"


@pytest.mark.full
def test_a_start_from_another_folder_is_repeated_after_a_crash_before_the_first_save(
    run: Callable[..., Path], begun: Callable[..., Path], tmp_path: Path
) -> None:
    """The error says "continue with resume=auto", which is what a scheduler gives too."""
    start = f"resume={begun('stop_after_steps=2')}/checkpoints/global_step2"
    with pytest.raises(WorkerError, match="Failing.on_step has failed at step 3.*continue with resume=auto"):
        run("other", 1, 1, *KEYS, SLOW, start, FAILING)
    out = run("other", 1, 1, *KEYS, SLOW, "resume=auto")
    assert list_steps(out / "checkpoints") == [4, 6] and [line["step"] for line in read_metrics(out)] == [3, 4, 5, 6]


@pytest.mark.full
def test_no_step_of_a_folder_is_mixed_with_those_of_another_folders_start(
    run: Callable[..., Path], begun: Callable[..., Path], tmp_path: Path
) -> None:
    begun()
    other = run("other", 1, 1, *KEYS, FAST, "max_steps=4")
    out = go_back(run, other, "max_steps=8", "keep_last=2", step=4)
    assert list_steps(out / "checkpoints") == [6, 8] and list_steps(out / "checkpoints/abandoned/1") == [2, 4, 6]
    assert [line["step"] for line in read_metrics(out)] == [5, 6, 7, 8]


@pytest.mark.full
def test_going_back_twice_sets_both_lines_aside(run: Callable[..., Path], begun: Callable[..., Path]) -> None:
    out = begun()
    go_back(run, out)
    go_back(run, out, "learning_rate=1e-2", step=4)
    aside = out / "checkpoints" / "abandoned"
    assert list_steps(aside / "1") == [4, 6] and list_steps(aside / "2") == [6]
    assert list_steps(out / "checkpoints") == [2, 4, 6] and read_completed(out)["step"] == 6
    run("again", 1, 1, *KEYS, SLOW, f"resume={aside}/1")  # the first line, which has nothing left to train
    assert equal(export_of(out.parent / "again"), load_file(aside / "1" / "hf" / "model.safetensors"))


@pytest.mark.full
def test_an_export_that_was_cut_off_is_made_up(run: Callable[..., Path], begun: Callable[..., Path]) -> None:
    out = begun("export_steps=[2,3,4]", "stop_after_steps=4")
    whole = {step: load_file(out / f"hf-step{step}" / "model.safetensors") for step in (2, 3, 4)}
    for name in ("hf-step2", "hf-step4", "hf-step3", "checkpoints/global_step3"):
        shutil.rmtree(out / name)
    run("out", 1, 1, *KEYS, SLOW, "export_steps=[2,3,4]", "resume=latest", "keep_last=1")
    for step in (2, 4):
        assert equal(load_file(out / f"hf-step{step}" / "model.safetensors"), whole[step])
    assert not (out / "hf-step3").exists() and list_steps(out / "checkpoints") == [6]


@pytest.mark.full
def test_a_finished_run_whose_checkpoints_were_removed_is_not_trained_over(
    run: Callable[..., Path], begun: Callable[..., Path]
) -> None:
    out = begun()
    shutil.rmtree(out / "checkpoints")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    confirmed = (out / "completed.json").stat().st_mtime_ns
    run("out", 1, 1, *KEYS, SLOW, "resume=auto")
    with pytest.raises(WorkerError, match="holds the export of a finished run, whose checkpoints are not there"):
        run("out", 1, 1, *KEYS, SLOW)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert (out / "completed.json").stat().st_mtime_ns > confirmed, "which is what a supervisor waits for"
    run("out", 1, 1, *KEYS, SLOW, "resume=auto", "max_steps=7")
    assert read_completed(out)["step"] == 7 and (out / "checkpoints/abandoned/1/hf").is_dir()


@pytest.mark.full
def test_a_supervised_run_goes_back_once(begun: Callable[..., Path], root: Path, tmp_path: Path) -> None:
    """It fails before it has saved anything, and is started again by the script; finished, again by a scheduler."""
    out = begun()
    (tmp_path / "first_start.py").write_text(FIRST_START)
    keys = (
        "-cn", "base", f"model_name_or_path={root}/tiedFalse", f"train_file={root}/train.jsonl", *KEYS, FAST,
        f"output_dir={out}", f"data.cache_dir={root}/cache", "num_stages=1", "micro_batch_size=2",
        "global_batch_size=8", "max_seq_length=256", "precision=fp32", "optimizer=adamw", "max_grad_norm=1.0",
        "logging_steps=1", "stop_after_steps=3", f"resume={out}/checkpoints/global_step2",
        "callbacks=[{_target_: first_start.Failing}]",
    )  # fmt: skip
    ended = run_supervised(out, keys, tmp_path)
    assert ended.code == 0 and "start 2 of 4" in ended.output, ended.output
    aside = out / "checkpoints" / "abandoned"
    assert list_steps(aside / "1") == [4, 6] and [path.name for path in aside.iterdir()] == ["1"]
    assert list_steps(out / "checkpoints") == [2, 4, 5], "three steps from the start that was asked for"
    assert "ended by stop_after_steps at step 5 of 6" in ended.output
    trained = read_completed(out)
    ended = run_supervised(out, [*keys, "stop_after_steps=null"], tmp_path)
    assert ended.code == 0 and read_completed(out)["step"] == 6 and trained["step"] == 5
    assert [path.name for path in aside.iterdir()] == ["1"] and list_steps(out / "checkpoints") == [2, 4, 5, 6]


FIRST_START = """
from pathlib import Path

class Failing:
    def on_step(self, run):
        mark = run.output_dir / "failed_once"
        if run.step == 3 and run.is_main and not mark.exists():
            mark.touch()
            raise KeyError("as if the host had gone")
"""
