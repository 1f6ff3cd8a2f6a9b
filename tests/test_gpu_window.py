"""`benchmarks/gpu_window.py`: the table of items and its time, results that outlive the command, the worker that is
kept, and what the report says of routers."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import gpu_window
from benchmarks.gpu_parts import window_state
from benchmarks.gpu_parts.items import ITEMS, SECTIONS, DeviceCheck, Item, Section, TransferCheck, Variant
from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.material import PADDING, save_records
from benchmarks.gpu_parts.measured_runs import MARKS, Prediction
from benchmarks.gpu_parts.processes import Command, Deadline, RowFailed, TimeLimit, Worker
from benchmarks.gpu_parts.report import choose_folder
from benchmarks.gpu_parts.routers import RouterChoices, compare_choices, load_choices
from benchmarks.gpu_parts.rows import Cells, NotRun, Row, Status, run_row
from benchmarks.gpu_parts.shapes import SHAPES
from benchmarks.gpu_parts.window import Window
from benchmarks.gpu_parts.window_state import State, hash_sources, plan_calls

ROOT = Path(__file__).resolve().parents[1]
CPU = Machine("cpu", "CPU", (), 0, {"torch": "2"})
H200 = Machine("cuda", "NVIDIA H200", ("0",), 150_000_000_000, {"torch": "2"})


def test_two_calls_have_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has 520 seconds; the first one answers all but what is compared with published figures, and single
    layers of mixtures."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    calls = plan_calls(SECTIONS, 520)
    last = {item.name for section in SECTIONS[-4:] for item in section.items}
    assert {call for name, call in calls.items() if name not in last} == {1}
    assert {calls[name] for name in last} == {1, 2}


def test_items_are_what_there_is() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert {item.task.shape for item in ITEMS if isinstance(item.task, Variant)} <= SHAPES.keys()
    assert {*MARKS} <= {item.name for item in ITEMS}


ANSWERS = {"first": Status.ok, "second": Status.measured, "third": Status.measured}


class FakeWindow:
    """Items that note when they run, and are stopped at one of them."""

    def __init__(self, stops_at: str = "", statuses: dict[str, Status] = ANSWERS) -> None:
        self.ran: list[str] = []
        self._stops_at, self._statuses = stops_at, statuses

    def build_row(self, item: Item) -> Row:
        def work(deadline: Deadline) -> tuple[Status, Cells]:
            if item.name == self._stops_at:
                raise KeyboardInterrupt
            self.ran.append(item.name)
            if self._statuses[item.name] is Status.not_run:
                raise NotRun("needs a GPU")
            return self._statuses[item.name], {"loss": "1e-7"}

        return Row(item.name, work, item.seconds, 60)


@pytest.fixture
def run_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., State]:
    sections = [Section((Item(name, f"Is {name} right?", 1, DeviceCheck()),)) for name in ANSWERS]
    items = tuple(item for section in sections for item in section.items)
    for module in (gpu_window, window_state):
        monkeypatch.setattr(module, "SECTIONS", sections)
        monkeypatch.setattr(module, "ITEMS", items)
    monkeypatch.setattr("benchmarks.gpu_parts.rows.STOPPED", SimpleNamespace(set=lambda: None))

    def run(window: FakeWindow, budget: float = 10**6, rows: tuple[str, ...] = ("",)) -> State:
        state = State(tmp_path, CPU, budget, tiny=True)
        gpu_window.run_items(window, state, argparse.Namespace(budget=budget, rows=rows))  # type: ignore[arg-type]
        return state

    return run


def test_a_window_that_is_stopped_continues(run_window: Callable[..., State], tmp_path: Path) -> None:
    stopped = FakeWindow(stops_at="second")
    with pytest.raises(KeyboardInterrupt):
        run_window(stopped)
    assert stopped.ran == ["first"] and "| OK |" in (tmp_path / "report.md").read_text()
    continued, again = FakeWindow(), FakeWindow()
    run_window(continued)
    state = run_window(again)
    assert (continued.ran, again.ran) == (["second", "third"], [])
    table = state.render_table().splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == [*ANSWERS]
    assert table[2].startswith("| 1 | first | Is first right? | 1 s | loss 1e-7 | OK |")


def test_what_could_not_run_is_tried_again(run_window: Callable[..., State]) -> None:
    """Another call may have the time, or the package."""
    without = FakeWindow(statuses={**ANSWERS, "second": Status.not_run})
    assert "| not run: needs a GPU |" in run_window(without).render_table()
    with_it = FakeWindow()
    run_window(with_it)
    assert with_it.ran == ["second"]
    later = FakeWindow()
    state = run_window(later, budget=0.5)
    assert later.ran == [] and not state.is_bad


def test_rows_are_chosen_by_name(run_window: Callable[..., State]) -> None:
    window = FakeWindow()
    run_window(window, rows=("ir",))
    assert window.ran == ["first", "third"]


def test_an_item_without_time_waits_for_the_next_call(run_window: Callable[..., State]) -> None:
    window = FakeWindow()
    assert "| not run: time |" in run_window(window, budget=0.5).render_table() and window.ran == []


def test_results_count_for_their_sources_alone(
    run_window: Callable[..., State], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_window(FakeWindow(statuses={**ANSWERS, "third": Status.wrong})).is_bad
    monkeypatch.setattr(window_state, "hash_sources", lambda: "others")
    window = FakeWindow()
    assert not run_window(window).is_bad and window.ran == [*ANSWERS]
    monkeypatch.undo()


def test_a_changed_source_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.py").write_text("1")
    before = hash_sources(tmp_path)
    (tmp_path / "notes.md").write_text("1")
    assert hash_sources(tmp_path) == before
    (tmp_path / "training" / "run.py").write_text("2")
    assert hash_sources(tmp_path) != before


def test_a_row_that_the_budget_has_ended_has_not_hung() -> None:
    def work(deadline: Deadline) -> tuple[Status, Cells]:
        raise TimeLimit("did not end in time")

    row = Row("a row", work, expected=1, limit=60)
    assert [run_row(row, left).status for left in (5, 100)] == [Status.not_run, Status.timed_out]


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["kind"] == "fails":
        sys.exit("CUDA out of memory")
    if job["kind"] == "hangs":
        time.sleep(60)
    open(job["result"] + ".part", "w").write(json.dumps({"pid": os.getpid(), "is_last": job["kind"] == "is full"}))
    os.replace(job["result"] + ".part", job["result"])
"""


def test_a_worker_is_kept_until_a_job_fails(tmp_path: Path) -> None:
    worker = Worker(lambda: Command([sys.executable, "-S", "-c", WORKER], {}), tmp_path)

    def ask(kind: str, seconds: float = 20) -> int:
        worker.send({"kind": kind})
        return worker.receive(Deadline(seconds))["pid"]

    first = ask("works")
    assert ask("works") == first
    with pytest.raises(RowFailed, match="ended with code 1") as failure:
        ask("fails")
    assert failure.value.out_of_memory and failure.value.tail == "CUDA out of memory"
    second = ask("works")
    assert second != first
    with pytest.raises(TimeLimit):
        ask("hangs", 0.3)
    third = ask("is full")
    assert third not in (first, second)
    assert ask("works") not in (first, second, third)
    worker.end()


@pytest.mark.parametrize(
    ("predicted", "seen", "status"),
    [(False, False, Status.ok), (True, True, Status.ok), (False, True, Status.failed), (True, False, Status.failed)],
)
def test_a_check_that_ends_otherwise_than_predicted_has_failed(
    predicted: bool, seen: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(commands: list[Command], log: Path, deadline: Deadline) -> None:
        assert [command.environment["NCCL_LAUNCH_ORDER_IMPLICIT"] for command in commands] == ["1", "1"]
        log.parent.mkdir(exist_ok=True)
        log.write_text("Timeout (0:00:08)!" if seen else "")
        if seen:
            raise RowFailed("ended with code 1")

    monkeypatch.setattr("benchmarks.gpu_parts.window.run", run)
    check = TransferCheck(("replay", "2", "0"), 2, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, predicted)
    row = Window(H200, tmp_path, tmp_path, tiny=True).build_row(Item("replay", "Does it end?", 1, check))
    assert run_row(row, 100).status is status


def test_a_row_of_speed_has_its_plan_and_what_others_report(tmp_path: Path) -> None:
    found = {"tokens_per_second": 5_000.0, "tokens": 4096, "peak": 2**30, "loss": 2.0, "obstacle": None}
    cells = Window(H200, tmp_path, tmp_path, True)._describe_speed("8b full", found, Prediction(1e4, 0.5, 2**31, None))
    assert cells["tokens/s"] == "5,000 (plan 10,000, 0.50 of it)" and cells["MFU"] == "25.0%"
    assert cells["ms a micro-batch"] == "819.2"
    assert cells["peak GiB"] == "1.0 (plan 2.0)" and cells["mark"].startswith("0.48 of 10,471")


def test_rows_of_speed_have_all_tokens_as_targets(tmp_path: Path) -> None:
    save_records(tmp_path / "records", [64, 64], prompt=1)
    for line in (tmp_path / "records").read_text().splitlines():
        record = json.loads(line)
        assert (len(record["prompt"].split()), len(record["completion"].split())) == (1, 62)  # and the end


def test_a_report_of_the_same_day_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_parts.report.ROOT", tmp_path)
    first = choose_folder(H200, tiny=False)
    first.mkdir(parents=True)
    second = choose_folder(H200, tiny=False)
    second.mkdir()
    assert second.name == f"{first.name}-2" and choose_folder(H200, tiny=False).name == f"{first.name}-3"
    trial = choose_folder(CPU, tiny=True)
    trial.mkdir(parents=True)
    assert choose_folder(CPU, tiny=True) == trial


class TopKRouter(nn.Module):
    """Chooses two of four experts by the ids themselves."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, chosen = logits.topk(2)
        return logits, weights, chosen


def choose_experts(logits: torch.Tensor, *micro_batches: list[list[int]]) -> RouterChoices:
    """logits: [tokens of the vocabulary, experts]."""
    router, choices = TopKRouter(), RouterChoices()
    choices.watch(nn.ModuleList([router]))
    for rows in micro_batches:
        ids = torch.tensor(rows)
        choices.start(ids)
        router(logits[ids.flatten()])
    return choices


def test_a_token_that_moved_is_found(tmp_path: Path) -> None:
    """Also where samples are padded, in another order, and on another rank in the next step."""
    logits = torch.tensor([[4.0, 3, 2, 1]] * 8)
    short, long = [3, 4], [5, 6, 7]
    padded = [*short, PADDING]
    expected = choose_experts(logits, [short], [long], [short], [long])
    moved = logits.clone()
    moved[6] = torch.tensor([4.0, 2, 3, 1])
    choose_experts(logits, [padded], [padded]).save(tmp_path / "routers_0.pt")
    choose_experts(logits, [long], [long]).save(tmp_path / "routers_1.pt")
    assert str(compare_choices(load_choices(tmp_path.glob("*.pt")), expected)).startswith("0 of 10 moved")
    choose_experts(logits, [padded], [long]).save(tmp_path / "routers_0.pt")
    choose_experts(moved, [long], [padded]).save(tmp_path / "routers_1.pt")
    found = compare_choices(load_choices(tmp_path.glob("*.pt")), expected)
    assert str(found) == "1 of 10 moved, the first in step 1, layer 1, where the margin is 1.0e+00"
    assert str(compare_choices(expected, expected)) == "0 of 10 moved, smallest margin 1.0e+00"
    with pytest.raises(ValueError, match="other samples"):
        compare_choices(choose_experts(logits, [short]), expected)


def run_command(folder: Path, *rows: str) -> list[str]:
    script = str(ROOT / "benchmarks" / "gpu_window.py")
    return [
        sys.executable, script, "--device", "cpu", "--tiny", "--budget", "3000", "--state", str(folder), "--rows", *rows
    ]  # fmt: skip


@pytest.mark.full
def test_a_window_that_is_killed_continues(tmp_path: Path) -> None:
    command = run_command(tmp_path, "device", "1b, micro-batches of 1", "transfers, a group per message, 64 MB")
    first = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.DEVNULL)
    while not (tmp_path / "state.json").exists() and first.poll() is None:
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (before,) = json.loads((tmp_path / "state.json").read_text()).values()
    assert [result["name"] for result in before] == ["device"]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (after,) = json.loads((tmp_path / "state.json").read_text()).values()
    assert after[0] == before[0] and len(after) == 3
    again = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert again.returncode == 0 and json.loads((tmp_path / "state.json").read_text()).values() != []
    assert [line for line in again.stdout.splitlines() if not line.startswith("|")][1:] == [""]


@pytest.mark.full
def test_transfers_between_two_ranks_on_a_cpu(tmp_path: Path) -> None:
    ended = subprocess.run(
        run_command(tmp_path, "transfers, 2 stages"), cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "as predicted: ends | OK" in ended.stdout
