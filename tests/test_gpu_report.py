"""`benchmarks/gpu.py`: rows that fail in every way, the time of a part, the report, and figures that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import gpu
from benchmarks.gpu_parts.cases import CASES, Case
from benchmarks.gpu_parts.fast import CASES as SPEED_CASES
from benchmarks.gpu_parts.figures import compare_records, compare_weights, find_skipped_steps
from benchmarks.gpu_parts.machine import Machine, find_machine
from benchmarks.gpu_parts.material import LENGTHS, MODELS, save_model, save_tokenizer
from benchmarks.gpu_parts.measured_runs import MeasuredRuns, fit_efficiency, read_speed
from benchmarks.gpu_parts.processes import Command, Deadline, RowFailed, TimeLimit, run
from benchmarks.gpu_parts.report import Report
from benchmarks.gpu_parts.right import BOUNDS, Right
from benchmarks.gpu_parts.rows import Cells, NotRun, Result, Row, Status, choose_rows, run_row, run_rows
from benchmarks.gpu_parts.shapes import find_shape
from training.cost_terms.layers import Launch

ROOT = Path(__file__).resolve().parents[1]
CPU = Machine("cpu", "CPU", (), 0, {"torch": "2"})
H200 = Machine("cuda", "NVIDIA H200", ("3",), 150_000_000_000, {"torch": "2"})


def start(code: str, **environment: str) -> Command:
    return Command([sys.executable, "-S", "-c", code], environment)


def build_row(work: Callable[[Deadline], tuple[Status, Cells]], expected: float = 1, limit: float = 5) -> Row:
    return Row("a row", work, expected, limit)


def raising(error: Exception) -> Callable[[Deadline], tuple[Status, Cells]]:
    def work(deadline: Deadline) -> tuple[Status, Cells]:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (NotRun("needs a GPU"), Status.not_run, "needs a GPU"),
        (RowFailed("ended with code 1", "the last lines"), Status.failed, "ended with code 1"),
        (RowFailed("ended with code 1", out_of_memory=True), Status.out_of_memory, "ended with code 1"),
        (TimeLimit("did not end in time"), Status.timed_out, "ended after 5 s"),
        (KeyError("loss"), Status.failed, "KeyError: 'loss'"),
    ],
)
def test_whatever_ends_a_row_is_its_result(error: Exception, status: Status, note: str) -> None:
    result = run_row(build_row(raising(error)), 100)
    assert (result.status, result.note) == (status, note)


def test_a_part_ends_within_its_time() -> None:
    shown: list[Result] = []

    def work(deadline: Deadline) -> tuple[Status, Cells]:
        time.sleep(0.3)
        return Status.ok, {}

    rows = [Row(name, work, expected, 5) for name, expected in (("first", 0.3), ("long", 9), ("short", 0.1))]
    results = run_rows(rows, 0.6, shown.append)
    assert [(result.name, result.status, result.note) for result in results] == [
        ("first", Status.ok, ""),
        ("long", Status.not_run, "time"),
        ("short", Status.ok, ""),
    ]
    assert [result.name for result in shown] == ["first", "long", "short"]


def test_rows_side_by_side_are_returned_in_their_order() -> None:
    def work(seconds: float) -> Callable[[Deadline], tuple[Status, Cells]]:
        return lambda deadline: (time.sleep(seconds), (Status.ok, {}))[1]

    shown: list[str] = []
    rows = [Row("slow", work(0.4), 0, 5), Row("quick", work(0.0), 0, 5)]
    results = run_rows(rows, 10, lambda result: shown.append(result.name), jobs=2)
    assert shown == ["quick", "slow"] and [result.name for result in results] == ["slow", "quick"]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """Also what has left its session, as torchrun's workers do."""
    child = f"""import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("it hangs here", flush=True)
time.sleep(60)"""
    with pytest.raises(TimeLimit) as failure:
        run([start(child)], tmp_path / "log", Deadline(1.5))
    assert failure.value.tail == "it hangs here"
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_parts.processes._SECONDS_FOR_THE_OTHERS", 0.2)
    ranks = [
        start("import time; time.sleep(60)"),
        start("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory')"),
    ]
    with pytest.raises(RowFailed, match="ended with code 1") as failure:
        run(ranks, tmp_path / "log", Deadline(20))
    assert failure.value.out_of_memory and "OutOfMemoryError" in failure.value.tail


def test_an_ordinary_error_is_not_out_of_memory(tmp_path: Path) -> None:
    with pytest.raises(RowFailed) as failure:
        run([start("raise SystemExit('a wrong key')")], tmp_path / "log", Deadline(20))
    assert not failure.value.out_of_memory


def test_what_is_killed_on_purpose_has_not_failed(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    code = f"import time; open({str(file)!r}, 'w'); time.sleep(60)"
    assert run([start(code)], tmp_path / "log", Deadline(20), until=file.exists) < 10


def test_ranks_share_a_gpu_where_there_is_only_one() -> None:
    """Each rank then is its own host for NCCL, which would refuse them; on several GPUs and on a CPU they share one."""
    first, second = (H200.rank_environment(rank, 2) for rank in (0, 1))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    for environment in (first, second):
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["LOCAL_RANK"], environment["LOCAL_SIZE"]) == (
            "3",
            "0",
            "1",
        )
        assert environment["NCCL_P2P_DISABLE"] == environment["NCCL_SHM_DISABLE"] == "1"
    pair = Machine("cuda", "NVIDIA H200", ("0", "1"), 1, {}).rank_environment(1, 2)
    assert pair == {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert CPU.rank_environment(1, 2) == {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "1", "LOCAL_SIZE": "2",
    }  # fmt: skip


def test_a_report_has_every_row_and_the_end_of_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, CPU, {"tiny": "True"})
    report.begin("right", "right: differences", ("loss", "bound"))
    report.add("right", Result("pp1", Status.ok, {"loss": "1e-7", "bound": "1e-5"}, seconds=3))
    report.add("right", Result("8b", Status.out_of_memory, {}, "ended with code 1", tail="CUDA out of memory"))
    assert not report.is_bad
    report.add("right", Result("pp2", Status.wrong, {"loss": "1e-1", "bound": "1e-5"}))
    assert report.is_bad
    text = (tmp_path / "report.md").read_text()
    for line in ("| pp1 | 1e-7 | 1e-5 | OK | 3 s |", "| 8b | - | - | out of memory: ended with code 1 | 0 s |"):
        assert line in text.splitlines() and line in capsys.readouterr().out.splitlines() + text.splitlines()
    assert "CUDA out of memory" in text
    rows = json.loads((tmp_path / "report.json").read_text())["parts"]["right"]
    assert [row["status"] for row in rows] == ["OK", "out of memory", "WRONG"]


def build_records(*figures: tuple[float, float]) -> list[dict[str, float]]:
    return [{"step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in enumerate(figures, start=1)]


def test_the_worst_step_counts() -> None:
    expected = build_records((2.0, 1.0), (1.0, 1.0))
    figures = compare_records(build_records((2.0, 1.0), (1.1, 0.5)), expected)
    assert figures == {"loss": pytest.approx(0.1), "gradient norm": pytest.approx(0.5)}
    with pytest.raises(RowFailed, match="1 step reported, not 2"):
        compare_records(expected[:1], expected)


@pytest.mark.parametrize(("loss", "verdict"), [(1.0, Status.ok), (1.1, Status.wrong), (float("nan"), Status.wrong)])
def test_a_figure_beyond_its_bound_is_wrong(tmp_path: Path, loss: float, verdict: Status) -> None:
    figures = compare_records(build_records((loss, 1.0)), build_records((1.0, 1.0)))
    status, cells = Right(CPU, tmp_path, tmp_path, True)._judge(figures, "fp32", 1)
    assert status is verdict and cells["bound"] == "1e-05"


def test_weights_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "oracle").mkdir()
    large, small = torch.full((4,), 100.0), torch.tensor([1.0, 2.0])
    save_file({"large": large, "small": small}, tmp_path / "oracle" / "model.safetensors")
    save_file({"large": large, "small": small + 0.02}, tmp_path / "hf" / "model.safetensors")
    assert compare_weights(tmp_path / "hf", tmp_path / "oracle") == pytest.approx(0.01)
    save_file({"large": large}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(RowFailed, match=r"other tensors than the oracle's: \['small'\]"):
        compare_weights(tmp_path / "hf", tmp_path / "oracle")


def test_steps_that_fp16_skips_are_found() -> None:
    records = build_records((1.0, float("inf")), (1.0, 1.0), (1.0, 1.0))
    assert find_skipped_steps(records) == (1,)
    counted = [
        {**record, "grad_norm": norm, "skipped_steps": norm is None} for record, norm in zip(records, (None, 1, 1))
    ]
    assert find_skipped_steps(counted) == (1,)
    figures = compare_records(counted, build_records((1.0, 5.0), (1.0, 2.0), (1.0, 1.0)), (1,))
    assert figures["gradient norm"] == 0.5  # of the steps that were taken


def test_the_efficiency_that_makes_the_plan_fit() -> None:
    assert fit_efficiency(lambda efficiency: 1000 * efficiency, 480) == pytest.approx(0.48, abs=0.005)
    assert fit_efficiency(lambda efficiency: 1000 * efficiency, 1700) is None
    assert fit_efficiency(lambda efficiency: 480, 480) is None  # the host that launches is what takes the time


def test_the_first_steps_warm_up() -> None:
    rates = [1.0, 1.0, 10.0, 12.0, 14.0]
    speed = read_speed(
        [{"tokens_per_second": rate, "mfu": rate / 20, "peak_memory": [rate, 2 * rate]} for rate in rates]
    )
    assert (speed.tokens_per_second, speed.mfu, speed.peak) == (12.0, 0.6, 28.0)


def test_documents_are_as_long_as_they_are_meant_to_be(tmp_path: Path) -> None:
    """Or a packed batch would not divide by two stages, two replicas and micro-batches of two."""
    from data.storage.tokenized import TokenizedDataset

    right = Right(CPU, tmp_path, tmp_path / "logs", tiny=True)
    for kind in MODELS:
        save_tokenizer(right.folder / "models" / kind)  # what is there is not made
    for task, per_record in (("sft", 1), ("kto", 1), ("dpo", 2)):
        dataset = TokenizedDataset(right._tokenize(Case("", task=task))[1], True, True)
        assert [len(dataset.input_ids(index)) for index in range(0, len(dataset), per_record)] == list(LENGTHS)
    assert len(LENGTHS) % 8 == 0 and right._count_rows() % 8 == 0


def test_the_plan_of_a_row_is_that_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tiny model would wait for these alone
    monkeypatch.setattr("training.cost_terms.layers.KERNEL_SECONDS", 0)
    monkeypatch.setattr("training.cost_terms.layers.LAUNCH_SECONDS", dict.fromkeys(Launch, 0.0))
    runs = MeasuredRuns(H200, tmp_path, tmp_path / "logs", tiny=True)
    save_model(tmp_path / "model", **find_shape("1b", True, runs.seq_length))
    overrides = [*runs.list_overrides(tmp_path / "model", ()), f"output_dir={tmp_path}"]
    prediction = runs.predict(overrides, 1, None)
    fitted = runs.predict(overrides, 1, prediction.tokens_per_second)
    assert fitted.efficiency == pytest.approx(0.70, abs=0.01)  # what conf/hardware/h200.yaml assumes
    unknown = MeasuredRuns(Machine("cuda", "NVIDIA GTX", ("0",), 1, {}), tmp_path, tmp_path, tiny=True)
    assert unknown.predict(overrides, 1, None) is None


def test_weights_that_do_not_fit_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**10))
    runs = MeasuredRuns(H200, tmp_path, tmp_path / "logs", tiny=False)
    with pytest.raises(NotRun, match=r"^16 GB of weights do not fit into .*; TMPDIR names another folder$"):
        runs.prepare_model("8b", Deadline(60))


@pytest.mark.parametrize("obstacle", ["Torch not compiled with CUDA enabled", "The NVIDIA driver is too old"])
def test_why_no_gpu_is_found_is_said(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.dumps({"torch": "2.13.0", "obstacle": obstacle})
    ended = SimpleNamespace(returncode=0, stdout=f"a warning\n{found}\n")
    monkeypatch.setattr("benchmarks.gpu_parts.machine.subprocess.run", lambda *_, **__: ended)
    with pytest.raises(SystemExit, match=rf"^torch 2\.13\.0 finds no GPU here: {obstacle}; .* runs$"):
        find_machine("cuda")


@pytest.mark.parametrize(("machine", "accelerator"), [(CPU, "cpu"), (H200, "")])
def test_the_demo_chooses_its_devices_itself(machine: Machine, accelerator: str, tmp_path: Path) -> None:
    """With one GPU its two ranks need the CPU, which the script chooses unless DS_ACCELERATOR is set."""
    command = Right(machine, tmp_path, tmp_path / "logs", tiny=True).build_demo_command()
    assert str(Path(sys.executable).parent) in command.environment["PATH"].split(":")[:2]  # and its `python`
    assert command.environment["MASTER_PORT"] != "29500"
    before_script = command.words[: command.words.index("bash")]
    words = [*before_script, "bash", "-c", 'echo "${DS_ACCELERATOR:-}"']
    assert subprocess.check_output(words, text=True, env=command.environment).strip() == accelerator


def test_names_of_rows_are_unique() -> None:
    for cases in (CASES, SPEED_CASES):
        assert len({case.name for case in cases}) == len(cases)
    assert {case.precision for case in CASES} == set(BOUNDS)
    assert {case.baseline for case in SPEED_CASES} - {""} <= {case.name for case in SPEED_CASES}


def test_row_seconds_replaces_the_limit_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    class Part:
        TITLE, COLUMNS = "right", ()

        def __init__(self, *arguments: object) -> None: ...

        def list_rows(self) -> list[Row]:
            return [Row("a row", self.work, expected=1, limit=240)]

        def work(self, deadline: Deadline) -> tuple[Status, Cells]:
            seen.append(deadline.seconds)
            return Status.ok, {}

    monkeypatch.setattr(gpu, "PARTS", {"right": Part})
    for number, given in enumerate(([], ["--row-seconds", "600"])):
        words = ["gpu.py", "--device", "cpu", "--parts", "right", "--minutes", "60", *given]
        monkeypatch.setattr(sys, "argv", words)
        gpu.run_part("right", gpu.parse_arguments(), CPU, Report(tmp_path, CPU, {}), tmp_path / str(number))
    assert seen == [240, 600]


# One for each way in which ranks share the work, and a task
SHARING = (
    "pp2 zero_bubble, bf16", "cp2 ring, packed, bf16", "tp2 sequence_parallel, bf16", "dp2 zero3, bf16",
    "ep2 experts, bf16", "pp2 kto, bf16",
)  # fmt: skip


@pytest.mark.full
def test_rows_that_no_gpu_has_run_are_right_on_a_cpu(tmp_path: Path) -> None:
    """Six runs of two ranks, and their oracles: two minutes of CPU time."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny", "--parts", "right"]
    options = ["--minutes", "60", "--row-seconds", "900", "--output", str(tmp_path), "--rows", *SHARING]
    ended = subprocess.run([*command, *options], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["parts"]["right"]
    assert {row["name"]: row["status"] for row in rows} == dict.fromkeys(SHARING, "OK")


@pytest.mark.full
def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    """One row of each part runs to its end, and rows that a CPU cannot run say why."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--device",
        "cpu",
        "--tiny",
        "--output",
        str(tmp_path),
    ]
    rows = ["--rows", "pp2, fp32", "fp16", "8b stage, LoRA", "8b stage, offload"]
    ended = subprocess.run([*command, *rows], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    found = {part: {row["name"]: row["status"] for row in rows} for part, rows in parts.items()}
    assert found["right"]["pp2, fp32"] == "OK" and found["right"]["pp1, fp16"] == "not run"
    assert "pp1, fp16" in ended.stdout and "not run: needs a GPU" in ended.stdout
    assert found["fast"]["8b stage, offload"] == "-" and found["why"]["8b stage, LoRA"] == "-"
    assert parts["why"][0]["cells"]["idle"].endswith("%")


def test_a_whole_name_chooses_its_row_alone() -> None:
    rows = [Row(name, lambda _: (Status.ok, {}), 0, 1) for name in ("1b", "1b, Trainer", "8b stage")]
    chosen = {text: [row.name for row in choose_rows(rows, [text])] for text in ("1b", "1b,", "b", "2b")}
    assert chosen == {"1b": ["1b"], "1b,": ["1b, Trainer"], "b": ["1b", "1b, Trainer", "8b stage"], "2b": []}
