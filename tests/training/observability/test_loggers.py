"""Curves, facts and files in each tracker, offline, read back from what it wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.configs import build_config, compose_config
from support.launching import run_deepspeed
from support.tiny import save_llama, save_records, save_tokenizer
from support.trackers import FACTS, HELD, RECORDS

from errors import UserError
from training.observability.environment import describe_environment
from training.observability.loggers import IsolatedReporter, TrackerReporter, build_loggers, keep_handlers
from training.observability.metrics import Reporter
from training.resolution.packages import check_packages
from training.trackers.tracker import TrackedRun

ROOT = Path(__file__).resolve().parents[3]
OPTIONAL = {"mlflow": "mlflow", "swanlab": "swanlab", "trackio": "trackio", "comet": "comet_ml"}  # -> package
MINIMAL = ("model_name_or_path=m", "train_file=t", "output_dir=o")
MINE = """
import json
from dataclasses import dataclass

@dataclass
class Mine:
    file: str
    def _write(self, *words):
        with open(self.file, "a") as stream:
            stream.write(json.dumps(words) + "\\n")
    def start(self, run, params):
        self._write("start", run.name, dict(params))
        return self.file
    def log_metrics(self, figures, step):
        self._write("metrics", step, dict(figures))
    def log_file(self, file):
        self._write("file", file.name)
    def close(self):
        self._write("close")
"""


def build(*keys: str, folder: Path, first_step: int | None = 0) -> list[Reporter]:
    return build_loggers(build_config(*keys).logger, folder, FACTS, first_step)


def test_nothing_is_logged_elsewhere_unless_asked_for(tmp_path: Path) -> None:
    assert build(folder=tmp_path) == [] and list(tmp_path.iterdir()) == []


def run_tracker(name: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    """In a process of its own: a run, its continuation and an evaluation. Returns what each left there; with `read`
    what runs have left there before."""
    done = subprocess.run(
        [sys.executable, "-m", "support.trackers", name, folder, *words], cwd=ROOT / "tests", capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / HELD).read_text())


@pytest.mark.parametrize(
    "name", ["wandb", "tensorboard", *(pytest.param(name, marks=pytest.mark.full) for name in OPTIONAL)]
)
def test_what_a_tracker_holds_offline_is_what_metrics_jsonl_holds(name: str, tmp_path: Path) -> None:
    """Read back by the package itself. The run is resumed from step 2 under the same id; the evaluation has its own."""
    if not is_installed(name):
        pytest.skip(f"{OPTIONAL[name]} is not installed")
    first, second, evaluation = run_tracker(name, tmp_path)
    assert first["points"] == {
        "loss": [[1, 2.5], [2, 2.25]], "eval_loss": [[2, 2.0]], "stage0/wait_time": [[1, 0.5]],
        "stage1/wait_time": [[1, 0.25]],
    }  # fmt: skip
    assert [3, 2.0] in second["points"]["loss"] and [3, 1.5] in evaluation["points"]["eval_loss"]
    assert first["id"] == second["id"] != evaluation["id"]
    assert float(first["params"]["config.learning_rate"]) == 0.5 and first["params"]["config.data.name"] == "sft"
    assert "    0     0-3" in first["params"]["plan_table"]
    assert set(first["files"]) >= (
        {"step_2.png"} if name == "tensorboard" else {"run.json", "step_2.png", "report.html"}
    )


def is_installed(name: str) -> bool:
    return find_spec(OPTIONAL.get(name, name)) is not None


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of a run on two stages that was stopped and resumed, in all trackers that are installed."""
    root = tmp_path_factory.mktemp("tracked")
    save_llama(root / "model", num_hidden_layers=2)
    save_tokenizer(root / "model")
    save_records(root / "train.jsonl", 20)
    save_records(root / "eval.jsonl", 5, seed=1)
    names = [name for name in ("wandb", "tensorboard", *OPTIONAL) if is_installed(name)]
    keys = (
        f"model_name_or_path={root}/model", f"train_file={root}/train.jsonl", f"eval_file={root}/eval.jsonl",
        f"output_dir={root}/out", f"data.cache_dir={root}/cache", "num_stages=2", "micro_batch_size=2",
        "global_batch_size=4", "max_seq_length=128", "precision=fp32", "learning_rate=1e-2", "max_steps=5",
        "eval_steps=2", "save_steps=2", "logging_steps=1", f"logger=[{','.join(names)}]", "logger.mode=offline",
    )  # fmt: skip
    for last in ("stop_after_steps=3", "resume=latest"):
        ended = run_deepspeed([*keys, last], root)
        assert ended.code == 0 and "nothing more is logged there" not in ended.output, ended.output
    return root / "out"


@pytest.mark.full
@pytest.mark.parametrize("name", ["wandb", "tensorboard", *OPTIONAL])
def test_a_run_is_in_a_tracker_line_by_line_as_in_its_metrics_jsonl(name: str, tracked: Path) -> None:
    if not is_installed(name):
        pytest.skip(f"{OPTIONAL[name]} is not installed")
    written: dict[str, list[list[float]]] = {}
    for line in map(json.loads, (tracked / "metrics.jsonl").read_text().splitlines()):
        for key, value in line.items():
            stages = {f"stage{number}/{key}": each for number, each in enumerate(value)} if type(value) is list else {}
            for figure, number in (stages or {key: value}).items():
                if figure != "step" and number is not None:
                    as_kept = float(np.float32(number)) if name == "tensorboard" else number
                    written.setdefault(figure, []).append([line["step"], as_kept])
    held: dict[str, list[list[float]]] = {}
    for part in run_tracker(name, tracked, "read"):
        for figure, points in part["points"].items():
            held.setdefault(figure, []).extend(points)
    assert [step for step, _ in written["loss"]] == [1, 2, 3, 4, 5] and len(written["eval_loss"]) >= 2
    assert {"stage0/wait_time", "stage1/wait_time", "tokens_per_second"} <= written.keys()
    assert held == written


def test_several_trackers_are_a_list_and_one_of_a_user_is_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_trackers.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    composed = compose_config("base", "logger=[tensorboard,wandb]", *MINIMAL)
    assert list(composed.logger.trackers) == ["tensorboard", "wandb"] and composed.logger.project == "llm-pipeline"
    out = tmp_path / "out"
    out.mkdir()
    given = "+logger.trackers.mine={_target_: my_trackers.Mine, file: notes.jsonl}"
    loggers = build("logger=tensorboard", given, "logger.run_name=tuned", folder=out)
    for logger in loggers:
        for record in RECORDS:
            logger.report(record)
        logger.close()
    assert len(loggers) == 2 and list((out / "tensorboard").iterdir())
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert notes == [
        ["start", "tuned", FACTS], ["metrics", 1, {"loss": 2.5, "stage0/wait_time": 0.5, "stage1/wait_time": 0.25}],
        ["metrics", 2, {"loss": 2.25}], ["metrics", 2, {"eval_loss": 2.0}], ["close"],
    ]  # fmt: skip


def test_a_wrong_tracker_and_a_missing_package_end_the_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="logger.trackers.mine: builtins.list must be a class with the methods of"):
        check_packages(build_config("+logger.trackers.mine={_target_: builtins.list}"))
    monkeypatch.setattr("training.trackers.build.find_spec", lambda name: None)
    message = re.escape("logger=comet needs the package comet_ml (pip install comet_ml), or use none")
    with pytest.raises(UserError, match=message):
        check_packages(build_config("logger=comet"))


def test_a_tracker_does_not_take_the_handlers_of_signals() -> None:
    mine, hook = lambda signum, frame: None, sys.excepthook
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with keep_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.excepthook = print
        assert signal.getsignal(signal.SIGTERM) is mine and sys.excepthook is hook
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("place", ["build", "report", "close"])
def test_a_logger_that_fails_is_reported_once_and_dropped(capfd: pytest.CaptureFixture[str], place: str) -> None:
    calls = []

    class Broken:
        def _call(self, name: str) -> None:
            calls.append(name)
            if name == place:
                raise ConnectionError("the server is gone\nand much more")

        def __init__(self) -> None:
            self._call("build")

        def report(self, record: dict[str, Any]) -> None:
            self._call("report")

        def advance(self, step: int) -> None:
            self._call("advance")

        def close(self) -> None:
            self._call("close")

    logger = IsolatedReporter("logger=mine", Broken)
    for record in RECORDS:
        logger.report(record)
        logger.advance(1)
    logger.close()
    assert calls == {
        "build": ["build"], "report": ["build", "report"],
        "close": ["build", *3 * ["report", "advance"], "close"],
    }[place]  # fmt: skip
    said = capfd.readouterr()
    assert said.err.count("logger=mine: the server is gone; nothing more is logged there.") == 1
    assert "ConnectionError" in said.out  # the log


@pytest.mark.parametrize("place", ["start", "log_metrics", "log_file"])
@pytest.mark.parametrize("how", ["exits", "hangs"])
def test_a_tracker_that_exits_or_hangs_ends_nothing(
    place: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.observability.loggers._MOST_SECONDS", 0.2)

    class Tracker:
        def _call(self, name: str) -> str:
            while name == place:
                if how == "exits":
                    sys.exit("no login")
                with suppress(Exception):  # as a package that tries again
                    time.sleep(9)
            return "there"

        def start(self, *arguments: Any) -> str:
            return self._call("start")

        def log_metrics(self, *arguments: Any) -> None:
            self._call("log_metrics")

        def log_file(self, *arguments: Any) -> None:
            self._call("log_file")

        def close(self) -> None: ...

    (tmp_path / "run.json").write_text("{}")
    handler = signal.getsignal(signal.SIGALRM)
    run = TrackedRun(tmp_path, "id", "name", "project", None, False, 0, False)
    reporter = IsolatedReporter("logger=mine", lambda: TrackerReporter("mine", Tracker(), run, {}))  # type: ignore[arg-type]
    reporter.report(RECORDS[0])
    reporter.close()
    said = capfd.readouterr().err
    reason = "it ended with sys.exit('no login')" if how == "exits" else "has not "
    assert said.count(f"logger=mine: {reason}") == 1 and "The run continues" in said
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_environment_names_versions_source_and_hosts() -> None:
    environment = describe_environment(["a", "a", "b"])
    assert (
        environment["hosts"] == {"a": 2, "b": 1}
        and {"torch", "deepspeed", "transformers"} <= environment["packages"].keys()
    )
    assert environment["git"] is None or len(environment["git"]) >= 7
    json.dumps(environment)


@pytest.mark.parametrize("with_gpu", [False, True])
def test_a_run_on_the_cpu_names_the_processor(monkeypatch: pytest.MonkeyPatch, with_gpu: bool) -> None:
    """pip's default wheel of torch on Linux names the accelerator that it was built for, with `check_available` only if
    there is one; DS_ACCELERATOR=cpu overrides it."""
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator",
        lambda check_available=False: torch.device("cuda") if with_gpu or not check_available else None,
    )
    assert describe_environment(["a"])["device"]
