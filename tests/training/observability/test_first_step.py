"""The time of the first step, known before the step has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import Case, build_engine, this_rank
from support.configs import build_config
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from training.costs.simulation import simulate
from training.engine.engine import BACKWARD, FORWARD
from training.observability import first_step
from training.observability.first_step import estimate_step, list_pass_ends
from training.pipeline.schedule import OneForwardOneBackward


def test_what_happens_once_is_not_counted_again() -> None:
    """Stage 0 of two with four micro-batches, F F B F B F B B: each pass but the first backward takes as planned."""
    shares = [0.05, 0.1, 0.3, 0.35, 0.5, 0.55, 0.75, 0.95]
    once, step = 7.0, 40.0
    seconds = [once + step * share for share in shares]
    assert estimate_step(shares, seconds[:2], 2) is None
    assert estimate_step(shares, seconds[:3], 2) == pytest.approx((once + 0.3 * step) / 0.3)
    for done in range(4, 9):
        assert estimate_step(shares, seconds[:done], 2) == pytest.approx(once + step)


def test_passes_that_the_plan_gives_no_time_do_no_harm() -> None:
    assert estimate_step([0.2, 0.5, 0.5], [1.0, 2.0, 2.5], 1) == 5.0


def test_the_passes_before_the_step_are_not_its_own() -> None:
    """One stage with two micro-batches: both have passed before the step, and one of them in it."""
    config, order = build_config("data=embedding", "task=embedding"), OneForwardOneBackward(1, 2)
    passes = simulate(order, [1.0], [2.0], [])
    plan: Any = SimpleNamespace(run=SimpleNamespace(config=config), schedule=order, passes=passes, step_seconds=8.0)
    finished = [(FORWARD, 1.0), (FORWARD, 2.0), (FORWARD, 3.0), (BACKWARD, 5.0)]
    timer: Any = SimpleNamespace(list_finished=lambda: finished)
    described = first_step.FirstStep(plan, timer)._describe(6.0)
    assert described == "first step: 2 of 4 passes after 6.0 s, about 13.3 s in all"
    finished[2:] = []
    assert first_step.FirstStep(plan, timer)._describe(6.0) == ""


def train_two_steps(case: Case) -> tuple[int, list[str]]:
    """Take two steps, the last pass of each of which waits for a line or a second on the main rank. Returns the number
    of passes that the plan lists, and the lines that were printed in the first step and after it."""
    from data.loading.row_lengths import RowLengths
    from training.costs.hardware import complete_hardware
    from training.observability.stage_timer import MemoryPeak, StageTimer
    from training.observability.telemetry import Telemetry
    from training.planner.prediction import predict
    from training.setup import build_setup, open_source

    engine, loader, config, layout, _ = build_engine(case)
    setup = build_setup(config, open_source(config, None), this_rank())
    machine = complete_hardware(config.hardware, config.precision, layout.world_size)
    lengths = RowLengths(config.max_seq_length, config.max_seq_length, config.max_seq_length)
    prediction = predict(setup, machine, lengths) if engine.rank == 0 else None
    timer = StageTimer(engine, MemoryPeak(engine.device))
    timer.attach()
    lines: list[str] = []
    printed, passes = threading.Event(), []

    def say(text: str) -> None:
        lines.append(text)
        printed.set()

    def wait_in_the_last(*_: object) -> None:
        passes.append(None)
        if engine.rank == 1 and len(passes) % layout.gradient_accumulation_steps == 0:
            printed.wait(1.0)

    engine.module.register_forward_hook(wait_in_the_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_step, "say", say)
        patch.setattr(first_step, "_FEWEST_SECONDS", 0.0)
        patch.setattr(first_step, "_SECONDS_BETWEEN_LOOKS", 0.01)
        telemetry = Telemetry(timer, layout, prediction)
        micro_batches = loader.iterate(0, 3)
        for step in range(2):
            telemetry.start_step(False)
            engine.train_step(micro_batches, step, 3)
            telemetry.finish_step()
            lines.append(f"step {step} has ended")
    timer.detach()
    return (len(list_pass_ends(prediction.plan)) if prediction is not None else 0), lines


def test_a_real_step_is_estimated_before_it_ends(
    workers: Callable[[int], WorkerGroup], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("first")
    save_llama(root / "hf")
    save_tokenizer(root / "hf")
    case = Case(root / "hf", save_records(root / "train.jsonl", 40), root, 2, 2)
    (num_passes, lines), (_, others) = workers(2).run(train_two_steps, case)
    first, *after = lines
    assert first.startswith("first step: ") and f" of {num_passes} passes after " in first and first.endswith(" in all")
    assert num_passes == 2 * 4 and after == ["step 0 has ended", "step 1 has ended"]
    assert others == ["step 0 has ended", "step 1 has ended"]
