"""Sweeps: the runs of a command line, and their report. One test uses the real launcher (full)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from support.configs import CONF, build_config

from errors import UserError
from extensions.sweep.sweep import SweptRun, plan_sweep, run, run_sweep
from training.cli.command_line import clean_arguments, find_flag
from training.config.schema import register_schema


def plan(line: str) -> tuple[list[SweptRun], int]:
    register_schema()
    return plan_sweep(clean_arguments(["trainer_base_ds_mp.py", *shlex.split(line)])[1:], CONF, "llama_tiny_pp2")


def test_each_combination_is_a_run_with_its_own_folder() -> None:
    jobs, num_gpus = plan(
        "--multirun num_gpus=2 -cn llama_tiny_pp2 learning_rate=1e-4,3e-4 seed=range(1,3) max_steps=7 output_dir=out"
    )
    assert num_gpus == 2
    assert [job.name for job in jobs] == [
        f"learning_rate={rate} seed={seed}" for rate in ("0.0001", "0.0003") for seed in (1, 2)
    ]
    folders = [re.fullmatch(r"out/(.*)-[0-9a-f]{8}", str(job.output_dir)) for job in jobs]
    assert [match and match[1] for match in folders] == [job.name.replace(" ", "__").replace("=", "-") for job in jobs]
    configs = [build_config(*[word for word in job.arguments if "=" in word]) for job in jobs]
    assert [(config.learning_rate, config.seed, config.max_steps) for config in configs] == [
        (1e-4, 1, 7),
        (1e-4, 2, 7),
        (3e-4, 1, 7),
        (3e-4, 2, 7),
    ]
    assert [Path(config.output_dir) for config in configs] == [job.output_dir for job in jobs]
    assert all(job.arguments[:2] == ("-cn", "llama_tiny_pp2") for job in jobs)


def test_it_is_refused_inside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="^--multirun starts a launcher for each run, so start it without one: python "):
        run(CONF.parent / "trainer_base_ds_mp.py", ["-m", "seed=1,2"], "base")


@pytest.mark.parametrize("flag", ["-m", "--multirun", "--multi"])
def test_its_runs_are_not_asked_for_several(flag: str) -> None:
    for job in plan(f"{flag} num_gpus=2 -cn llama_tiny_pp2 output_dir=out seed=1,2")[0]:
        assert find_flag(job.arguments) is None
    assert find_flag([flag, "seed=1,2"]) == "extensions.sweep.sweep:run"


def test_values_that_read_the_same_have_their_own_folders() -> None:
    """Also those that differ after the first hundreds of characters; and the same values have the same folder again."""
    long = "x" * 300
    line = f"-m num_gpus=2 output_dir=out train_file={long}/a/b.jsonl,{long}/a_b.jsonl,a/b,a_b"
    folders = [job.output_dir for job in plan(line)[0]]
    assert len(set(folders)) == 4 and all(len(folder.name) < 200 for folder in folders)
    assert [job.output_dir for job in plan(line + " max_steps=3")[0]] == folders


AUTOMATIC = "activation_checkpoint_interval=auto"


def finish(job: SweptRun) -> None:
    """Leaves what the run of a job leaves."""
    job.output_dir.mkdir(parents=True)
    config = build_config(*[word for word in job.arguments if "=" in word and not word.startswith("train_file")])
    OmegaConf.save(OmegaConf.structured(config), job.output_dir / "config.yaml")
    (job.output_dir / "completed.json").write_text(json.dumps({"step": 5, "eval_loss": 1.5}))


def test_a_finished_run_is_skipped_only_when_its_config_is_the_same(tmp_path: Path) -> None:
    line = f"-m num_gpus=2 -cn base model_name_or_path=model train_file=train.jsonl output_dir={tmp_path} seed=1,2"
    for job in plan(line)[0]:
        finish(job)
    started: list[Sequence[str]] = []

    def launch(arguments: Sequence[str]) -> int:
        started.append(arguments)
        return 1

    for same in (line, f"{line} resume=auto", f"{line} overwrite_output_dir=true"):
        assert run_sweep(plan(same)[0], 2, launch) == 0 and started == []

    with pytest.raises(UserError) as caught:
        plan(f"{line} learning_rate=0.125")
    assert f"{tmp_path}/seed-1-" in str(caught.value)
    assert "a finished run of another config (learning_rate was " in str(caught.value)
    for how in ("resume=auto", "overwrite_output_dir=true"):
        assert run_sweep(plan(f"{line} learning_rate=0.125 {how}")[0], 2, launch) == 1  # and old results are not shown
        assert len(started) == 2
        started.clear()


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("activation_checkpoint_interval=auto", ("activation_checkpoint_interval=2",)),
        (
            "activation_checkpoint_interval=auto",
            ("activation_checkpoint_mode=selective", "activation_checkpoint_interval=1"),
        ),
        ("data=classification", ("data=classification", "data.labels=[spam,ham]")),
    ],
)
def test_what_a_run_chooses_itself_is_no_other_config(tmp_path: Path, word: str, filled: tuple[str, ...]) -> None:
    line = (
        f"-m num_gpus=2 -cn base model_name_or_path=model train_file=train.jsonl output_dir={tmp_path} {word} seed=1,2"
    )
    for job in plan(line)[0]:
        finish(replace(job, arguments=(*(each for each in job.arguments if each != word), *filled)))
    assert run_sweep(plan(line)[0], 2, lambda arguments: pytest.fail("a finished run was started")) == 0
    with pytest.raises(UserError, match="learning_rate was"):
        plan(f"{line} learning_rate=0.125")


def change_records(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("new")
    return folder / "train.jsonl"


def change_tensor(folder: Path) -> Path:
    """One in the middle of a file, of the same size."""
    file = folder / "model/model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"b": 2 * tensors["b"]}, file)
    return file


def change_template(folder: Path) -> Path:
    (folder / "own.jinja").write_text("other")
    return folder / "own.jinja"


def change_code(folder: Path) -> Path:
    (folder / "mine_swept.py").write_text("def keep(record): return False")
    return folder / "mine_swept.py"


def change_corpus(folder: Path) -> Path:
    (folder / "corpus.bin").write_bytes(b"12")
    return folder / "corpus.bin"


def test_a_finished_run_is_not_reported_for_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.jsonl").write_text("old")
    (tmp_path / "own.jinja").write_text("old")
    (tmp_path / "mine_swept.py").write_text("def keep(record): return True")
    (tmp_path / "corpus.bin").write_bytes(b"11")
    (tmp_path / "model").mkdir()
    save_file({name: torch.ones(2**22) for name in "abc"}, tmp_path / "model/model.safetensors")
    keys = (
        f"model_name_or_path={tmp_path}/model train_file='{tmp_path}/*.jsonl' output_dir={tmp_path}/out seed=1,2 "
        f"data.filter={{_target_:mine_swept.keep}} data.chat_template={tmp_path}/own.jinja eval_file={tmp_path}/corpus"
    )
    line = f"-m num_gpus=2 -cn base {keys}"
    (job, _), _ = plan(line)

    def launch(arguments: Sequence[str]) -> int:
        job.output_dir.mkdir(parents=True)
        OmegaConf.save(OmegaConf.create(job.config), job.output_dir / "config.yaml")
        (job.output_dir / "completed.json").write_text(json.dumps({"step": 5}))
        return 0

    assert run_sweep([job], 2, launch) == 0
    inputs = [*tmp_path.glob("*.*"), *tmp_path.glob("model/*")]
    before = {file: file.read_bytes() for file in inputs}
    for change in (change_records, change_tensor, change_template, change_code, change_corpus):
        changed = change(tmp_path)
        with pytest.raises(UserError, match=rf"holds a finished run of another config \({changed} has changed\)"):
            plan(line)
        changed.write_bytes(before[changed])
    assert plan(line)[0][0].read_completed() == {"step": 5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-m num_gpus=2 seed=1,2,1", "--multirun: seed=1 is given twice; give each value once"),
        ("-m seed=1,2", "give the number of ranks with num_gpus=N"),
        ("-m num_gpus=two seed=1,2", "give the number of ranks with num_gpus=N"),
        ("-m num_gpus=2 learning_rte=1,2", "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        ("-m num_gpus=2 seed=1,x", "seed=x: must be a whole number"),
        ("-m num_gpus=2 optimizer=adamw,adam", "optimizer=adam: there is no conf/optimizer/adam.yaml"),
    ],
)
def test_a_mistake_in_any_run_is_reported_before_the_first_starts(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(line)
    assert message in str(caught.value)


def test_the_runs_start_in_order_and_end_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [SweptRun((f"seed={seed}",), (f"seed={seed}",), tmp_path / str(seed)) for seed in (1, 2, 3)]
    started: list[str] = []

    def launch(arguments: Sequence[str]) -> int:
        started.append(arguments[0])
        (job,) = (job for job in jobs if job.arguments == arguments)
        if "seed=2" in arguments:
            return 1
        job.output_dir.mkdir()
        (job.output_dir / "completed.json").write_text(
            json.dumps({"step": 9, "eval_loss": 2.0 - 0.1 * int(arguments[0][-1])})
        )
        return 0

    assert run_sweep(jobs, 2, launch) == 1
    assert started == ["seed=1", "seed=2", "seed=3"]
    assert [line.split() for line in capsys.readouterr().out.strip().splitlines()] == [
        ["run", "step", "eval_loss", "folder"],
        ["seed=1", "9", "1.9000", f"{tmp_path}/1"],
        ["seed=2", "failed", "-", f"{tmp_path}/2"],
        ["seed=3", "9", "1.7000", "*", f"{tmp_path}/3"],
    ]

    started.clear()
    run_sweep(jobs, 2, launch)
    assert started == ["seed=2"]  # the others had finished


# In place of DeepSpeed's launcher: ends at once when it gets a signal, and starts a rank that saves then.
LAUNCHER = '''
import os, subprocess, sys
rank = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open("saved", "a").write("1"), sys.exit(143)))
open("starts", "a").write("1")
time.sleep(300)
"""
sys.exit(subprocess.run([sys.executable, "-c", rank], env={**os.environ, "RANK": "0", "LOCAL_RANK": "0"}).returncode)
'''


def test_a_signal_lets_the_run_that_is_under_way_save_and_starts_no_other(tmp_path: Path) -> None:
    launcher = tmp_path / "deepspeed" / "launcher"
    launcher.mkdir(parents=True)
    for folder in (launcher, launcher.parent):
        (folder / "__init__.py").touch()
    (launcher / "runner.py").write_text(LAUNCHER)
    words = ("num_gpus=1", "-cn", "base", "model_name_or_path=m", "train_file=t", "output_dir=out", "seed=1,2")
    command = [sys.executable, str(CONF.parent / "trainer_base_ds_mp.py"), "--multirun", *words]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    sweep = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "starts").exists():
        assert sweep.poll() is None
        time.sleep(0.05)
    sweep.send_signal(signal.SIGTERM)
    output, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 143 and "seed=2  failed" in output
    assert (tmp_path / "starts").read_text() == (tmp_path / "saved").read_text() == "1"
