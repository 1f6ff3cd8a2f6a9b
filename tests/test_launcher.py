"""A few whole runs through the real launchers, two ranks each: what lies in the folder afterwards, and that nothing
hangs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.hosts import two_hosts, why_not
from support.launching import (
    BIN,
    ROOT,
    Launch,
    list_launcher_words,
    run,
    run_alone,
    run_deepspeed,
    run_forked,
    run_on_hosts,
    run_supervised,
    run_torchrun,
)
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.conversion.convert import convert_to_pipeline
from models.weights.sources import open_weights
from scripts.capture_screen import capture

FIELDS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "tokens_per_second",
    "step_time",
    "mfu",
    "compute_time",
    "communication_time",
    "wait_time",
    "bubble",
    "predicted_bubble",
    "imbalance",
    "predicted_imbalance",
    "peak_memory",
    "predicted_peak_memory",
]

REASON = why_not()  # this machine cannot play two hosts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model, and records."""
    root = tmp_path_factory.mktemp("launcher")
    save_llama(root / "hf", num_hidden_layers=2)
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", 24)
    save_records(root / "eval.jsonl", 5, seed=1)
    convert_to_pipeline(open_weights(str(root / "hf")), root / "checkpoint")  # as convert2ckpt.py does
    return root


def arguments(root: Path, output_dir: Path, *overrides: str) -> list[str]:
    return [
        "-cn",
        "llama_tiny_pp2",
        f"model_name_or_path={root}/checkpoint",
        f"train_file={root}/train.jsonl",
        f"eval_file={root}/eval.jsonl",
        f"output_dir={output_dir}",
        f"data.cache_dir={root}/cache",
        "micro_batch_size=2",
        "global_batch_size=8",
        "max_steps=3",
        "logging_steps=1",
        "eval_on_start=false",
        "eval_steps=null",
        *overrides,
    ]


def read_metrics(output_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def on_one_host(arguments: list[str], folder: Path) -> str:
    """The output of a whole run."""
    ended = run_deepspeed(arguments, folder)
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    return ended.output


def across_two_hosts(arguments: list[str], folder: Path) -> str:
    with two_hosts(folder) as hosts:
        ended = run_on_hosts(hosts, list_launcher_words(hosts, 1, folder), arguments, folder)
        assert [(host.code, host.left_alive, host.errors()) for host in ended] == [(0, [], [])] * 2, ended
        a, b = hosts.names
    crossing = "1 of 1 stage boundaries and the replicas of 0 of 2 stages cross hosts"
    assert f"hosts: {a}: stage 0; {b}: stage 1; {crossing}" in ended[0].output
    return ended[0].output


# One of the two is in the short suite; the next test starts on one host in any case.
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(on_one_host, marks=pytest.mark.full if REASON is None else ()),
        pytest.param(across_two_hosts, marks=pytest.mark.skipif(REASON is not None, reason=str(REASON))),
    ],
)
def test_a_whole_run_through_deepspeed(start: Callable[[list[str], Path], str], root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = start(arguments(root, out), tmp_path)
    assert "pp2 x dp1 = 2 ranks; global batch 8 = micro-batch 2 x accumulation 4 x dp 1" in output
    assert "\nmemory: " in output and "\ndone: 3 steps\n" in output and f"\nexported: {out}/hf" in output
    assert "FITS: stage" in (out / "plan.txt").read_text()

    lines = read_metrics(out)
    assert [list(line) for line in lines[:3]] == [FIELDS] * 3 and [line["step"] for line in lines] == [1, 2, 3, 3]
    assert list(lines[3]) == ["step", "eval_loss", "eval_token_accuracy", "eval_tokens"]
    completed = json.loads((out / "completed.json").read_text())
    assert completed == {
        "step": 3,
        "num_tokens": lines[2]["num_tokens"],
        "eval_loss": lines[3]["eval_loss"],
        "eval_token_accuracy": lines[3]["eval_token_accuracy"],
        "eval_tokens": lines[3]["eval_tokens"],
        "ended_by": "the last step",
    }
    config = OmegaConf.load(out / "config.yaml")
    assert (config.num_stages, config.max_steps, config.precision) == (2, 3, "fp32")
    assert sorted(file.name for file in (out / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert (
        "built successfully" not in (out / "logs" / "rank_1.log").read_text()
    )  # no op is compiled: see training/distributed/process.py
    assert (out / "checkpoints" / "latest").read_text() == "global_step3"

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "hf"), AutoTokenizer.from_pretrained(out / "hf")
    before = AutoModelForCausalLM.from_pretrained(root / "hf")
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)
    with torch.no_grad():
        assert model(torch.tensor([tokenizer("def f")["input_ids"]])).logits.isfinite().all()


@pytest.mark.full
def test_a_run_on_a_terminal_shows_what_is_meant_for_a_person_and_nothing_else(root: Path, tmp_path: Path) -> None:
    command = [
        "deepspeed",
        "-q",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        str(ROOT / "trainer_base_ds_mp.py"),
    ]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    shown = capture(
        [*command, *arguments(root, tmp_path / "out", "eval_steps=2", f"data.cache_dir={tmp_path}/cache")],
        80,
        tmp_path,
        environment,
    )
    assert shown.code == 0, shown.lines
    # without the phases before the first step, each named only where it takes long
    lines = [line for line in shown.lines if line and not line.startswith(" ") and not line.endswith(" ...")]
    firsts = [line.split()[0] for line in lines]
    rule = "\u2500"
    assert [first for first in firsts if not first.isdigit()] == [
        "train_file:",
        "train_file:",
        "eval_file:",
        "eval_file:",
        2 * rule,  # the report on the data
        80 * rule,
        2 * rule,
        80 * rule,
        "step",
        "step",
        "step",
        "measured",
        "stage",
        "step",
        2 * rule,
        80 * rule,
        "llama:",  # the two lines that can be passed on
        "loss",
    ]
    assert not [line for line in shown.lines if len(line) > 80 and str(tmp_path) not in line and str(root) not in line]
    assert "\x1b[A" not in shown.written and all(
        f"{what} " in shown.written for what in ("step 0/3", "evaluating", "saving step 3")
    )


@pytest.mark.full
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_leaves_it_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `make demo` up to the answer of the exported model: a GPU is visible to torch, and no process
    uses it. (The launcher lists it in CUDA_VISIBLE_DEVICES for each rank, whatever that was before.)"""
    log = tmp_path / "gpu.log"
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "with_gpu"))
    monkeypatch.setenv("GPU_LOG", str(log))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ended = run_deepspeed(arguments(root, tmp_path / "out", "precision=bf16", "num_workers=1"), tmp_path)
    assert (ended.code, ended.errors()) == (0, []), ended.output
    asked = ["--model_name_or_path", str(tmp_path / "out" / "hf"), "--prompt", "a", "--max_new_tokens", "2"]
    answered = run([sys.executable, str(ROOT / "scripts" / "generate.py"), *asked], tmp_path)
    assert answered.code == 0, answered.output
    assert not log.exists(), log.read_text()


@pytest.mark.full
def test_torchrun_gives_the_same_and_its_exit_code(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run_torchrun(arguments(root, out, "stop_after_steps=1", "eval_file=null"), tmp_path)
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    (line,) = read_metrics(out)
    assert list(line) == FIELDS and line["step"] == 1
    assert json.loads((out / "completed.json").read_text())["step"] == 1
    assert (out / "hf" / "config.json").is_file() and (out / "logs" / "rank_1.log").is_file()


@pytest.mark.full
def test_a_signal_to_one_rank_saves_and_the_run_goes_on_at_another_layout(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def preempt_rank_1(launch: Launch) -> None:
        launch.wait_for("step 2/")
        os.kill(launch.rank(1), signal.SIGTERM)

    ended = run_deepspeed(arguments(root, out, "max_steps=100000"), tmp_path, while_running=preempt_rank_1)
    assert ended.left_alive == [] and ended.errors() == [], ended.output
    step = read_metrics(out)[-1]["step"]
    assert f"stopped by SIGTERM at step {step}; continue with resume=latest" in ended.output
    assert (out / "checkpoints" / "latest").read_text() == f"global_step{step}" and not (
        out / "completed.json"
    ).exists()

    given = ("max_steps=100000", "stop_after_steps=1", "num_stages=1", "resume=latest")
    ended = run_forked(arguments(root, out, *given), tmp_path)
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    assert json.loads((out / "completed.json").read_text())["step"] == step + 1


@pytest.mark.full
def test_a_supervised_run_outlives_two_killed_ranks(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def kill_twice(launch: Launch) -> None:
        launch.wait_for("step 2/")
        os.kill(launch.rank(1), signal.SIGKILL)
        launch.wait_for("start 2 of 4")
        launch.wait_for("step 30/")
        os.kill(launch.rank(0), signal.SIGKILL)

    ended = run_supervised(
        out, arguments(root, out, "save_steps=1", "max_steps=60"), tmp_path, while_running=kill_twice
    )
    assert (ended.code, ended.left_alive) == (0, []), ended.output
    assert "start 3 of 4" in ended.output and "start 4 of 4" not in ended.output
    assert json.loads((out / "completed.json").read_text())["step"] == 60
    assert [line["step"] for line in read_metrics(out) if "loss" in line] == list(range(1, 61))


@pytest.mark.full
def test_a_sweep_starts_a_launch_for_each_run_and_ends_in_a_table(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run_alone(
        ["--multirun", "num_gpus=2", *arguments(root, out, "stop_after_steps=1", "learning_rate=1e-4,1e-2")], tmp_path
    )
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    header, low, high = (line.split() for line in ended.output.rstrip().splitlines()[-3:])
    assert header == ["run", "step", "eval_loss", "folder"]
    assert (low[0], low[1], high[0], high[1]) == ("learning_rate=0.0001", "1", "learning_rate=0.01", "1")
    for row, name in ((low, "learning_rate-0.0001"), (high, "learning_rate-0.01")):
        (folder,) = out.glob(f"{name}-*")
        assert row[2] == f"{json.loads((folder / 'completed.json').read_text())['eval_loss']:.4f}"
        assert row[-1] == str(folder)
        assert (folder / "hf" / "config.json").is_file()


@pytest.mark.full
def test_cfg_job_under_the_launcher_prints_the_config_once(root: Path, tmp_path: Path) -> None:
    ended = run_deepspeed(["-cn", "llama_tiny_pp2", "seed=7", "--cfg", "job"], tmp_path)
    assert (ended.code, ended.left_alive) == (0, [])
    assert ended.output.count("seed: 7\n") == 1 and "learning_rate: " in ended.output
    assert not (tmp_path / "outputs").exists()


@pytest.mark.full
def test_a_rank_that_is_killed_ends_the_run(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def kill_rank_1(launch: Launch) -> None:
        launch.wait_for("step 1/")
        os.kill(launch.rank(1), signal.SIGKILL)

    ended = run_deepspeed(arguments(root, out, "max_steps=100000"), tmp_path, while_running=kill_rank_1)
    assert ended.code != 0 and ended.left_alive == []
    assert not (out / "completed.json").exists() and not (out / "hf").exists()
    assert len(read_metrics(out)) >= 1


@pytest.mark.full
def test_a_job_that_is_started_again_after_its_end_does_not_fail(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = arguments(root, out, "eval_file=null", "resume=auto")
    assert run_torchrun(given, tmp_path).code == 0
    before = {file: file.read_bytes() for file in (out / "checkpoints").rglob("*") if file.is_file()}
    ended = run_torchrun(given, tmp_path)
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    assert f"resume: {out} has finished: step 3 of 3, exported; nothing is left to do." in ended.output
    ended = run_supervised(out, arguments(root, out, "eval_file=null"), tmp_path)
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    assert "has finished: step 3 of 3" in ended.output and "start 2 of" not in ended.output
    assert {file: file.read_bytes() for file in (out / "checkpoints").rglob("*") if file.is_file()} == before
