"""User-defined callbacks in whole runs: when they are called, their requests and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.configs import build_config
from support.launching import run_deepspeed
from support.runs import read_metrics
from support.tiny import save_llama, save_records, save_tokenizer

from errors import UserError
from models.storage.manifest import find_wrong_size
from training.inputs.custom import build_callbacks


def read_diary(out: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (out / f"diary_{rank}.jsonl").read_text().splitlines()]


def test_a_run_calls_them_on_every_rank_and_handles_the_request_of_the_last(run: Callable[..., Path]) -> None:
    diary = "callbacks=[{_target_: support.callbacks.Diary, save_at: 2, stop_at: 3}]"
    out = run("called", 2, 2, diary, "eval_steps=2", "max_steps=8", "async_save=false")
    main, other = read_diary(out, 0), read_diary(out, 1)
    lines = read_metrics(out)
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    tokens = {line["step"]: line["num_tokens"] for line in lines if "loss" in line}
    assert list(losses) == [2, 3] and list(tokens) == [1, 2, 3], "ends as at the last step"
    assert main == [
        ["step", tokens[1], 1, 1],
        ["step", tokens[2], 2, 2],
        ["evaluate", losses[2], 2],
        ["save", "global_step2", True, 3],  # no rank waits for it: it is known to be complete at the next step
        ["step", tokens[3], 3, 3],
        ["evaluate", losses[3], 3],
        ["save", "global_step3", True, 3],
        ["end", "a callback", 3],
    ]
    assert other == [[entry[0], entry[1], None, entry[3]] if entry[0] == "step" else entry for entry in main]
    assert json.loads((out / "completed.json").read_text())["ended_by"] == "a callback"


@pytest.mark.full
def test_a_save_in_the_background_is_announced_when_complete(run: Callable[..., Path]) -> None:
    diary = "callbacks=[{_target_: support.callbacks.Diary}]"
    for world_size in (2, 4):
        out = run(f"background{world_size}", 2, world_size, diary, "save_steps=1", "max_steps=6", "eval_file=null")
        for rank in range(world_size):
            saves = [entry for entry in read_diary(out, rank) if entry[0] == "save"]
            assert [name for _, name, _, _ in saves] == [f"global_step{step}" for step in range(1, 7)]
            assert all(whole for _, _, whole, _ in saves) and saves == [e for e in read_diary(out, 0) if e[0] == "save"]


def test_an_object_that_is_not_a_callback_is_refused() -> None:
    with pytest.raises(UserError, match="callbacks, entry 1=a.B: give a mapping, such as {_target_: my_callbacks"):
        build_callbacks(build_config("callbacks=[a.B]").callbacks)
    other = "callbacks=[{_target_: support.callbacks.Diary},{_target_: support.callbacks.FromAnotherTrainer}]"
    with pytest.raises(
        UserError,
        match=r"callbacks, entry 2: support.callbacks.FromAnotherTrainer must be a class with .*on_end, and no",
    ):
        build_callbacks(build_config(other).callbacks)
    with pytest.raises(UserError, match="support.callbacks.Diary does not take these fields: .*'stop'"):
        build_callbacks(build_config("callbacks=[{_target_: support.callbacks.Diary, stop: 3}]").callbacks)


@pytest.mark.full
def test_an_error_on_one_rank_ends_all_of_them_and_loses_no_save(tmp_path: Path) -> None:
    """Through the real launcher, with a callback in the folder that the run is started in."""
    save_llama(tmp_path / "hf", num_hidden_layers=2)
    save_tokenizer(tmp_path / "hf")
    save_records(tmp_path / "train.jsonl", 24)
    source = Path(__file__).parents[1] / "support" / "callbacks.py"
    (tmp_path / "my_callbacks.py").write_text(source.read_text())
    keys = (
        "-cn", "llama_tiny_pp2", f"model_name_or_path={tmp_path}/hf", f"train_file={tmp_path}/train.jsonl",
        "eval_file=null", f"output_dir={tmp_path}/out", f"data.cache_dir={tmp_path}/cache", "micro_batch_size=2",
        "global_batch_size=8", "max_steps=6", "save_steps=3",
    )  # fmt: skip
    ended = run_deepspeed([*keys, "callbacks=[{_target_: my_callbacks.Failing, rank: 1, step: 4}]"], tmp_path)
    assert ended.code != 0 and ended.left_alive == []
    (line,) = ended.errors()
    assert line.startswith("error (rank 1): callbacks: my_callbacks.Failing.on_step has failed at step 4 (KeyError: ")
    assert "in on_step" in (tmp_path / "out" / "logs" / "rank_1.log").read_text()
    assert ended.seconds_after_error < 30
    assert find_wrong_size(tmp_path / "out" / "checkpoints" / "global_step3") is None
    ended = run_deepspeed([*keys, "resume=latest"], tmp_path)
    assert ended.code == 0 and json.loads((tmp_path / "out" / "completed.json").read_text())["step"] == 6
