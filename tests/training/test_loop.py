"""The loop around an engine that only counts: its reports, their steps and their times."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import build_config

from data.loading.step_totals import StepTotals
from errors import UserError
from training import evaluations
from training.callbacks import Callbacks, RunView
from training.checkpoint.best import Best
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.distributed.interrupts import Interrupt
from training.distributed.topology import Layout, Topology
from training.evaluations import Evaluations
from training.inputs.loaders import Loaders
from training.inputs.step_budget import EvalSize, StepBudget
from training.loop import Collaborators, TrainingLoop
from training.objectives.objective import Metrics
from training.observability import interval
from training.observability.metrics import Reporter
from training.optim.lr_schedule import learning_rate_at

LOSSES = [4.0, 3.0, 2.0, 1.0, 0.5]
TARGETS = [10, 30, 20, 5, 5]
TOKENS = [100, 200, 300, 400, 500]


class Engine:
    device, rank = torch.device("cpu"), 0
    loop: TrainingLoop
    layout = Layout(Topology.of(1), 2, 4)

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.totals: list[StepTotals] = []
        self.last_steps: list[int] = []  # those that it was told to be the last
        self.module = SimpleNamespace(loss_fn=None, routers=None)

    def train_step(
        self, micro_batches: Any, step: int, total_steps: int, totals: StepTotals, is_last: bool
    ) -> tuple[torch.Tensor, float]:
        self.last_steps += [step] * is_last
        self.rates.append(learning_rate_at(step, total_steps, self.loop.config))
        self.totals.append(totals)
        return torch.tensor(LOSSES[next(micro_batches)]), self.rates[-1]

    def gradient_norm(self) -> torch.Tensor:
        return torch.tensor(0.25)

    def has_skipped_step(self) -> bool:
        return False

    def read_loss_scaler(self) -> dict[str, float]:
        return {}


class Loader:
    def iterate(self, start_step: int = 0, end_step: int = 0) -> Any:
        return iter(range(start_step, end_step))

    def name_samples(self, step: int) -> str:
        return f"samples {step}"

    def describe_position(self, step: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def step_totals(self, step: int) -> StepTotals:
        known = {} if step == 2 else {"most_documents": step + 5, "longest_document": 10 * step}
        return StepTotals(TOKENS[step], TARGETS[step], num_documents=1, num_samples=1, **known)

    def __len__(self) -> int:
        return 1


class Recorder(Reporter):
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def report(self, record: dict[str, Any]) -> None:
        self.events.append(dict(record))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """run(*overrides, start=..., last=..., asked={step: request}): (events in order, the engine, the final state)."""

    def start(
        *overrides: str,
        start: int = 0,
        last: int = 5,
        evaluates: bool = False,
        evaluated: bool = True,
        elsewhere: bool = False,
        engine: Engine | None = None,
        asked: dict[int, Interrupt] | None = None,
        eval_losses: list[float] | None = None,
        best: Best | None = None,
        callbacks: Sequence[tuple[str, Any]] = (),
    ) -> tuple[list[Any], Engine, TrainerState]:
        events: list[Any] = []
        losses = iter(eval_losses or itertools.repeat(7.0))
        writer = SimpleNamespace(
            save=lambda state: events.append(f"save {state.step}"),
            wait=lambda: None,
            finish=lambda: setattr(engine, "has_finished_saves", True),
            is_writing=False,
        )
        monkeypatch.setattr(evaluations, "evaluate", lambda *_, **__: next(losses))
        nothing = lambda: None  # noqa: E731
        interrupts = SimpleNamespace(
            start=nothing,
            close=nothing,
            saved=nothing,
            saving=nullcontext,
            check_evaluation=nothing,
            keep_until_exit=nothing,
            agree=lambda nonfinite: (asked or {}).get(len(engine.rates), Interrupt(nonfinite=nonfinite)),
            agree_on_signal=lambda: (asked or {}).get(len(engine.rates), Interrupt()).signum,
        )
        monkeypatch.setattr(Callbacks, "_agree", lambda self, *flags: list(flags))  # one rank
        config, engine = (
            build_config("learning_rate=1", "lr_scheduler_type=linear", "warmup_ratio=0", "min_lr_ratio=0", *overrides),
            engine or Engine(),
        )
        state = TrainerState(
            step=start,
            num_tokens=sum(TOKENS[:start]),
            num_stages=1,
            dp_size=1,
            global_batch_size=8,
            micro_batch_size=2,
            num_samples=40,
            total_steps=5,
            seed=42,
            best=best,
            evaluation={"eval_loss": 7.0} if evaluates and start and evaluated else {},
        )
        eval_loaders = {"": Loader()} if evaluates else {}
        sizes = {"": EvalSize(rows=3, targets=12, terms=12)}
        budget = StepBudget(40, 5, last, evaluations=sizes, starts_elsewhere=elsewhere)
        telemetry = SimpleNamespace(
            start_step=lambda profiled: None,
            finish_step=nothing,
            gather=object,
            describe=lambda measured, tokens_per_second, step_time: {},
        )
        folder, metrics = RunFolder(tmp_path), Metrics((), engine.device)
        view = RunView(folder.path, 0, 1, last, engine.module, start, state.num_tokens)
        collaborators: Any = Collaborators(
            engine,
            Loaders(Loader(), eval_loaders),
            SimpleNamespace(get=Loader().step_totals),
            metrics,
            Evaluations(engine, eval_loaders, sizes, metrics),
            writer,
            interrupts,
            Callbacks(callbacks, view, wait_for_save=nothing),
            SimpleNamespace(reset=nothing, find_first=lambda: "in stage 0"),
            telemetry,
            [Recorder(events)],
        )
        engine.loop = TrainingLoop(config, folder, budget, state, collaborators)
        return events, engine, engine.loop.run()

    return start


def test_a_line_holds_what_routers_report(run) -> None:
    engine = Engine()
    found = {"expert_load_max": 2.0, "expert_load_min": 0.5}
    engine.module.routers = SimpleNamespace(finish_interval=lambda: found)
    events, _, _ = run("logging_steps=2", engine=engine, last=2)
    assert [list(event)[1:4] for event in events if isinstance(event, dict)] == [
        ["loss", "expert_load_max", "expert_load_min"]
    ]


def test_a_line_holds_the_fields_of_the_contract(run) -> None:
    events, _, final = run("logging_steps=2")
    lines = [event for event in events if isinstance(event, dict)]
    fields = ["step", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "step_time"]
    assert [list(line) for line in lines] == [fields] * 3
    assert [line["step"] for line in lines] == [2, 4, 5]
    # the mean over tokens since the last line, not over steps
    assert [line["loss"] for line in lines] == pytest.approx([(4 * 10 + 3 * 30) / 40, (2 * 20 + 1 * 5) / 25, 0.5])
    assert [line["num_tokens"] for line in lines] == [300, 1000, 1500]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.75, 0.25, 0.0])
    assert all(line["grad_norm"] == 0.25 and line["step_time"] > 0 for line in lines)
    for line, tokens, steps in zip(lines, (300, 700, 500), (2, 2, 1)):
        assert line["tokens_per_second"] * line["step_time"] * steps == pytest.approx(tokens)
    assert (final.step, final.num_tokens) == (5, 1500)


def test_evaluation_and_saving_come_at_their_steps_and_at_the_end(run) -> None:
    events, _, _ = run(
        "logging_steps=5", "eval_file=e", "eval_steps=2", "save_steps=3", "eval_on_start=true", evaluates=True
    )
    assert [e if isinstance(e, str) else (e["step"], e.get("eval_loss")) for e in events] == [
        (0, 7.0), (2, 7.0), "save 3", (4, 7.0), (5, None), (5, 7.0), "save 5",
    ]  # fmt: skip
    assert events[0] == {"step": 0, "eval_loss": 7.0, "eval_tokens": 12}


def test_each_step_is_run_with_what_the_host_knows_of_it(run) -> None:
    _, engine, _ = run()
    assert engine.totals == [Loader().step_totals(step) for step in range(5)]
    assert engine.last_steps == [4]


def test_saving_is_not_counted_as_training(run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(interval.time, "perf_counter", lambda: float(next(clock)))  # one second between two reads
    events, _, _ = run("logging_steps=5", "save_steps=1")
    (line,) = (event for event in events if isinstance(event, dict))
    assert line["step_time"] == 1.0  # start to the first save, and from the end of each save to the next read


def test_a_resumed_run_continues_its_schedule_and_counts(run) -> None:
    whole, first, _ = run("logging_steps=1")
    events, second, final = run("logging_steps=1", start=3)
    assert first.rates[3:] == second.rates
    timed = ("tokens_per_second", "step_time")
    strip = [
        [{k: v for k, v in e.items() if k not in timed} for e in es if isinstance(e, dict)] for es in (whole, events)
    ]
    assert strip[0][3:] == strip[1]
    assert final.step == 5 and events[-1] == "save 5"


def test_stopping_early_leaves_the_schedule(run) -> None:
    _, whole, _ = run()
    events, stopped, final = run("logging_steps=10", last=2)
    assert stopped.rates == whole.rates[:2] and final.step == 2
    assert events[-1] == "save 2" and events[0]["step"] == 2
    assert stopped.last_steps == [1]  # its figures are in the last line, whatever logging_steps is


def test_a_request_takes_effect_after_its_step(run) -> None:
    events, _, final = run(
        "logging_steps=10", "eval_file=e", evaluates=True, asked={2: Interrupt(save=True), 3: Interrupt(stop=True)}
    )
    assert events[0] == "save 2" and final.step == 3
    assert [e if isinstance(e, str) else list(e)[1] for e in events[1:]] == ["loss", "eval_loss", "save 3"]


def test_a_signal_leaves_no_time_for_an_evaluation(run) -> None:
    events, _, final = run(
        "logging_steps=10", "eval_file=e", "eval_steps=1", evaluates=True, asked={1: Interrupt(signum=15)}
    )
    assert [e if isinstance(e, str) else list(e)[1] for e in events] == ["loss", "save 1"] and final.step == 1


def test_a_skipped_step_counts_for_nothing_but_its_tokens(
    run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr(f"{__name__}.LOSSES", [4.0, float("nan"), *LOSSES[2:]])
    events, _, final = run("logging_steps=2", "on_nonfinite=skip")
    lines = [event for event in events if isinstance(event, dict)]
    assert [(line["step"], line["loss"]) for line in lines] == [
        (2, 4.0),
        (4, pytest.approx((2 * 20 + 1 * 5) / 25)),
        (5, 0.5),
    ]
    assert lines[0]["tokens_per_second"] * lines[0]["step_time"] == pytest.approx(lines[0]["num_tokens"] / 2)
    assert [line["skipped_steps"] for line in lines] == [1, 0, 0] and "loss_scale" not in lines[0]
    assert final.num_tokens == 1500
    printed = capsys.readouterr().err
    assert "skipped step 2: loss nan, gradient norm 0.25; samples 1; first seen in stage 0" in printed


class ScaledEngine(Engine):
    """An engine in fp16 whose first three steps overflow their loss scale."""

    def gradient_norm(self) -> torch.Tensor:
        return torch.tensor(float("inf") if self.has_skipped_step() else 0.25)

    def has_skipped_step(self) -> bool:
        return len(self.rates) <= 3

    def read_loss_scaler(self) -> dict[str, float]:
        return {"cur_scale": 2.0 ** (16 - min(3, len(self.rates)))}


def test_a_step_that_overflowed_its_loss_scale_has_a_loss_and_no_norm(run) -> None:
    events, _, _ = run("logging_steps=2", "precision=fp16", engine=ScaledEngine())
    lines = [event for event in events if isinstance(event, dict)]
    assert [line["loss"] for line in lines] == pytest.approx([(4 * 10 + 3 * 30) / 40, (2 * 20 + 1 * 5) / 25, 0.5])
    assert [line["grad_norm"] for line in lines] == [None, 0.25, 0.25]
    assert [line["skipped_steps"] for line in lines] == [2, 1, 0]  # since the last line
    assert [line["loss_scale"] for line in lines] == [2.0**14, 2.0**13, 2.0**13]


def words(events: list[Any]) -> list[str]:
    """Return the saves and evaluations, in order."""
    return [e if isinstance(e, str) else f"eval {e['step']}" for e in events if isinstance(e, str) or "eval_loss" in e]


STOPPING = ("logging_steps=5", "eval_file=e", "eval_steps=1", "early_stopping_patience=2")


def test_a_run_ends_when_evaluations_stop_improving(run) -> None:
    events, _, final = run(*STOPPING, evaluates=True, eval_losses=[3.0, 2.0, 2.5, 2.0, 1.0])
    assert words(events) == ["eval 1", "eval 2", "eval 3", "eval 4", "save 4"] and final.step == 4
    assert [event["step"] for event in events if isinstance(event, dict) and "loss" in event] == [4]
    assert (final.best.step, final.best.value, final.best.evaluations_since) == (2, 2.0, 2)


def test_an_improvement_counts_only_above_its_threshold(run) -> None:
    given = (*STOPPING, "early_stopping_threshold=0.5")
    _, _, final = run(*given, evaluates=True, eval_losses=[3.0, 2.8, 2.6, 1.0, 0.5])
    assert final.step == 3 and final.best.step == 3  # the best all the same


def test_patience_continues_after_a_resume(run) -> None:
    """A resumed run starts with the saved count."""
    best = Best("eval_loss", False, 2.0, step=2, evaluations_since=1)
    _, _, final = run(*STOPPING, start=3, best=best, evaluates=True, eval_losses=[2.0, 1.0])
    assert final.step == 4
    _, _, final = run(*STOPPING, start=3, best=best, evaluates=True, eval_losses=[1.5, 1.0])
    assert final.step == 5 and final.best.value == 1.0


def test_the_best_step_is_saved_though_no_save_is_due(run) -> None:
    given = ("logging_steps=5", "eval_file=e", "eval_steps=1", "eval_on_start=true")
    losses = [0.5, 3.0, 2.0, float("nan"), 2.5, 1.5]  # the first one is before the first step, without a checkpoint
    events, _, final = run(*given, "load_best_model_at_end=true", evaluates=True, eval_losses=losses)
    assert [word for word in words(events) if "save" in word] == ["save 1", "save 2", "save 5"] and final.best.step == 5
    events, _, _ = run(*given, evaluates=True, eval_losses=losses)
    assert [word for word in words(events) if "save" in word] == ["save 5"]
    events, _, final = run(
        *given, "load_best_model_at_end=true", "greater_is_better=true", evaluates=True, eval_losses=losses
    )
    assert [word for word in words(events) if "save" in word] == ["save 1", "save 5"] and final.best.step == 1


def test_a_metric_that_is_not_reported_ends_the_run_at_the_first_evaluation(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "raise_together", raise_alone)
    with pytest.raises(UserError, match="'eval_accuracy' is not reported by this run's evaluations; give one of eval_"):
        run("eval_file=e", "eval_steps=2", "metric_for_best_model=accuracy", evaluates=True)


def raise_alone(error: UserError | None) -> None:
    if error is not None:
        raise error


def test_an_evaluation_that_asks_to_stop_ends_the_run_there(run) -> None:
    class Enough:
        def on_evaluate(self, view: RunView, metrics: dict[str, Any]) -> None:
            if metrics["eval_loss"] < 2:
                view.stop()

    given = ("logging_steps=5", "eval_file=e", "eval_steps=1")
    events, _, final = run(*given, evaluates=True, eval_losses=[3.0, 1.0], callbacks=[("my.Enough", Enough())])
    assert words(events) == ["eval 1", "eval 2", "save 2"] and final.step == 2


def test_an_evaluation_at_a_resumed_start_is_of_that_step_and_recorded_in_its_checkpoint(run, tmp_path: Path) -> None:
    """A signal had interrupted it. `keep_best` and the next start know its result."""
    seen = []

    class Watcher:
        def on_evaluate(self, view: RunView, metrics: dict[str, Any]) -> None:
            seen.append((view.step, view.num_tokens, metrics["step"]))

    step_dir = RunFolder(tmp_path).find_checkpoint(3)
    step_dir.mkdir(parents=True)
    given = ("logging_steps=5", "eval_file=e", "eval_steps=3")
    run(
        *given,
        start=3,
        evaluates=True,
        evaluated=False,
        eval_losses=[6.99, 7.25],
        callbacks=[("my.Watcher", Watcher())],
    )
    assert seen == [(3, 600, 3), (5, 1500, 5)]
    recorded = json.loads((step_dir / "evaluation.json").read_text())
    assert recorded["evaluation"]["eval_loss"] == recorded["best"]["value"] == 6.99 and recorded["best"]["step"] == 3
    (step_dir / "evaluation.json").unlink()
    run(*given, start=3, evaluates=True, eval_losses=[7.25])
    assert not list(step_dir.iterdir()), "it was evaluated when it was saved"


def test_a_start_in_another_folder_is_saved_where_the_run_ends_with_it(run) -> None:
    given = ("logging_steps=5", "eval_file=e", "eval_steps=1")
    assert run(*given, start=5, elsewhere=True)[0] == ["save 5"] and run(*given, start=5)[0] == []
    assert run(*given, "save_final=false", start=5, elsewhere=True)[0] == []
    best = Best("eval_loss", False, 1.0, step=3)
    keys = {"start": 3, "best": best, "evaluates": True, "eval_losses": [2.0, 3.0], "elsewhere": True}
    assert [word for word in words(run(*given, "load_best_model_at_end=true", **keys)[0]) if "save" in word] == [
        "save 3", "save 5",
    ]  # fmt: skip
    assert "save 3" not in words(run(*given, **keys | {"eval_losses": [2.0, 3.0]})[0])


def test_a_signal_during_the_last_callback_ends_the_run(run) -> None:
    asked: dict[int, Interrupt] = {}

    class Slow:
        def on_end(self, view: RunView) -> None:
            asked[5] = Interrupt(signum=15)

    _, engine, _ = run("logging_steps=5", asked=asked, callbacks=[("my.Slow", Slow())])
    assert (engine.loop.signum, engine.loop.ended_by) == (15, "SIGTERM")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_save_under_way_is_finished_whatever_ends_the_run(run, error: type[BaseException]) -> None:
    class Broken(Engine):
        def train_step(self, *_: Any, **named: Any) -> tuple[torch.Tensor, float]:
            raise error

    engine = Broken()
    with pytest.raises(error):
        run(engine=engine)
    assert engine.has_finished_saves
