"""report.html: its curves are those of metrics.jsonl at any length, and it needs nothing else."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pages import load_page, open_in_browser

from training.checkpoint.run_folder import RunFolder
from training.observability.curves import MOST_POINTS, Curve
from training.observability.metrics import Event, EventsFile, MetricsFile
from training.observability.run_page import RunPage, read_history, write_run_page

ROOT = Path(__file__).resolve().parents[3]


def record(step: int, **figures: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "num_tokens": 10 * step, "peak_memory": [7, 8], **figures}


def write_run(folder: Path, steps: int, **facts: Any) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(facts))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(record(step, grad_norm=None if step == 2 else 1.5)) + "\n")
    return folder


def test_a_curve_is_the_values_themselves_until_there_are_many() -> None:
    curve = Curve()
    for step in range(10, 10 * MOST_POINTS + 1, 10):
        curve.add(step, step / 4)
    steps = list(range(10, 10 * MOST_POINTS + 1, 10))
    assert curve.describe() == {"step": steps, "mean": [float(f"{step / 4:.6g}") for step in steps]}


def test_a_long_curve_keeps_its_means_and_every_spike() -> None:
    values = [random.Random(step).random() for step in range(1, 100_001)]
    values[54_321], values[99_998] = 50.0, -7.0
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    assert MOST_POINTS / 2 <= len(curve.buckets) <= MOST_POINTS
    assert sum(bucket.count for bucket in curve.buckets) == 100_000 and curve.buckets[-1].step == 100_000
    assert math.fsum(bucket.total for bucket in curve.buckets) == pytest.approx(math.fsum(values))
    described = curve.describe()
    assert max(described["high"]) == 50 and min(described["low"]) == -7
    begin = curve.buckets[0].step
    assert described["mean"][1] == pytest.approx(
        math.fsum(values[begin : curve.buckets[1].step]) / curve.buckets[1].count, rel=1e-5
    )


def test_the_page_is_there_from_the_first_report_and_follows_evaluations_and_saves(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    page = RunPage(folder, first_step=0)
    page.report(record(1))
    assert load_page(folder.report)["runs"][0]["curves"]["loss"]["step"] == [1]
    page.report(record(2, loss=math.nan))
    page.report({"step": 2, "eval_loss": 0.25})
    (run,) = load_page(folder.report)["runs"]
    assert run["curves"]["eval_loss"] == {"step": [2], "mean": [0.25]} and run["curves"]["loss"]["step"] == [1]
    assert run["curves"]["stage1/peak_memory"]["mean"] == [8, 8] and run["last"]["peak_memory"] == [7, 8]
    page.note(Event(3, "save", "global_step3"))
    assert [event["text"] for event in load_page(folder.report)["runs"][0]["events"]] == ["global_step3"]
    page.report(record(4))
    page.close()
    assert load_page(folder.report)["runs"][0]["curves"]["loss"]["step"] == [1, 4]


def test_a_resumed_run_continues_its_page(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = [MetricsFile(folder.metrics, 0), EventsFile(folder.events, 0)]
    for reporter in first:
        for step in (1, 2, 3):
            reporter.report(record(step))
            reporter.note(Event(step, "save", f"global_step{step}"))
        reporter.close()
    reporters = [MetricsFile(folder.metrics, 2), EventsFile(folder.events, 2), RunPage(folder, 2)]
    for reporter in reporters:
        reporter.note(Event(2, "resumed", "from step 2"))
        reporter.report(record(3, loss=9.0))
        reporter.close()
    (run,) = load_page(folder.report)["runs"]
    assert run["curves"]["loss"] == {"step": [1, 2, 3], "mean": [1, 0.5, 9]}
    assert [(event["step"], event["kind"]) for event in run["events"]] == [(1, "save"), (2, "save"), (2, "resumed")]
    assert len(folder.events.read_text().splitlines()) == 3


def test_pictures_and_samples_are_in_the_page(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "step_3.png").write_bytes(b"\x89PNG...")
    (tmp_path / "step_1.png").write_bytes(b"of another run")
    hostile = "</script><script>alert(1)</script>"
    (tmp_path / "samples.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": hostile}]}) + "\n")
    page = RunPage(folder, first_step=0)
    page.note(Event(3, "picture", "step_3.png"))
    page.close()
    (run,) = load_page(folder.report)["runs"]
    assert [picture["name"] for picture in run["pictures"]] == ["step_3.png"]
    assert run["pictures"][0]["src"].startswith("data:image/png;base64,iVBOR")
    assert run["samples"][0]["messages"][0]["content"] == hostile and hostile not in folder.report.read_text()


def test_files_that_are_half_written_and_odd_values_do_not_remove_the_page(tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path / "run", 3))
    with open(folder.metrics, "a") as file:
        file.write('{"step": 4, "loss": Infinity, "peak_memory": [Infinity, 8]}\n[1]\n{"loss": 1}\n{"step": 5, "lo')
    folder.events.write_bytes(b'{"step": 3, "kind": "save"}\n"text"\n{"step": 3, "kind": "end", "text": "\xc3')
    folder.facts.write_text('{"config": {"se')
    folder.completed.write_text(json.dumps({"step": 4, "ended_by": "max_steps", "eval_loss": math.inf}))
    said = "a\u2028b\u0085c"
    sample = {"messages": [{"role": "user", "content": said}], "score": -math.inf}
    (folder.path / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n", encoding="utf-8")
    folder.skipped.write_text("train_file: a.jsonl:2: bad\n" * 200)
    write_run_page(folder.report, [(folder, read_history(folder))])
    (run,) = load_page(folder.report)["runs"]
    assert run["curves"]["loss"]["step"] == [1, 2, 3] and run["last"]["peak_memory"] == [None, 8]
    assert run["facts"] == {} and run["events"] == [] and run["completed"]["eval_loss"] is None
    assert run["samples"] == [sample | {"score": None}] and run["skipped"] == ["train_file: a.jsonl:2: bad"] * 100
    assert run["samples"][0]["messages"][0]["content"] == said


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = RunPage(RunFolder(tmp_path), first_step=0)
    page.close()
    text = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in text
    assert not [part for part in ("src=", 'href="http', "@import", "fetch(") if part in text.replace("image.src =", "")]


def compare(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "report.py", *arguments], capture_output=True, text=True, timeout=120
    )


def test_the_script_compares_runs_and_names_a_folder_that_is_none(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, 3, config={"seed": seed}) for name, seed in (("a", 1), ("b", 2))]
    done = compare(*folders, "--output", tmp_path / "compared.html")
    assert done.returncode == 0 and done.stdout.count("training loss, first and last report") == 2, done.stderr
    runs = load_page(tmp_path / "compared.html")["runs"]
    assert [run["name"] for run in runs] == ["a", "b"] and runs[1]["facts"]["config"]["seed"] == 2
    assert runs[0]["curves"]["loss"]["mean"] == [1, 0.5, 0.333333] and runs[0]["curves"]["grad_norm"]["step"] == [1, 3]
    failed = compare(tmp_path)
    assert failed.returncode == 1 and failed.stderr.startswith(f"error: {tmp_path} has no metrics.jsonl; give the ")


# A document that takes everything, and the page's data.
STUB = """
const everything = new Proxy(function () {}, {
  get: (target, name) => name === Symbol.toPrimitive ? () => 0 : name === "textContent" ? DATA : everything,
  set: () => true, apply: () => everything,
});
globalThis.document = globalThis.matchMedia = globalThis.addEventListener = everything;
globalThis.Node = class {};
"""


def run_in_page(file: Path, expression: str) -> Any:
    """Return the value of an expression of the page's script, run by Node without a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node")
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", file.read_text(), re.DOTALL)
    program = f"const DATA = {json.dumps(data)};{STUB}{script};console.log(JSON.stringify({expression}))"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_metrics(folder: Path, *records: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"config": {"model_name_or_path": "org/m", "num_stages": 2}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def test_a_metric_has_one_dash_and_one_colour_whichever_came_first(tmp_path: Path) -> None:
    loss, evaluation = {"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3.0}
    write_metrics(tmp_path / "a", loss, evaluation)
    write_metrics(tmp_path / "b", evaluation, loss)  # evaluated at its start
    drawn = "series(CHARTS[0]).map(each => [each.label, each.dash, each.colour])"
    for names in ("ab", "ba"):
        folders = [tmp_path / name for name in names]
        assert compare(*folders, "--output", tmp_path / "compared.html").returncode == 0
        found = run_in_page(tmp_path / "compared.html", drawn)
        assert {label: dash for label, dash, _ in found} == {
            "a, loss": "", "a, eval_loss": "6 3", "b, loss": "", "b, eval_loss": "6 3"
        }  # fmt: skip
    alone = []
    for name in "ab":
        assert compare(tmp_path / name).returncode == 0
        alone.append(run_in_page(tmp_path / name / "report.html", drawn))
    assert alone[0] == alone[1] == [["loss", "", "var(--c0)"], ["eval_loss", "", "var(--c1)"]]


def test_the_page_names_model_data_and_layout(tmp_path: Path) -> None:
    data = {"train_file": [{"name": "a.jsonl"}, {"name": "b.jsonl"}]}
    config = {"model_name_or_path": "org/m", "num_stages": 2, "tensor_parallel_size": 4}
    folder = write_run(tmp_path / "a", 3, config=config, data=data)
    assert compare(folder).returncode == 0
    about = dict(run_in_page(folder / "report.html", "aboutOf(runs[0])"))
    assert about == {"model": "org/m", "data": "a.jsonl, b.jsonl", "layout": "num_stages 2, tensor_parallel_size 4"}


def test_figures_are_those_of_the_run_as_in_the_table_at_its_end(tmp_path: Path) -> None:
    """Means over steps without the first report, those of rates over their time (60 tokens in 8 seconds), the highest
    memory of all reports, and the last loss."""
    reports = [(1, 4, 1.0, 9.0), (5, 3, 1.0, 2.0), (7, 6, 2.0, 1.0)]  # step, peak in GiB, seconds, seconds of waiting
    lines = [
        record(step, step_time=seconds, tokens_per_second=10 / seconds, mfu=0.1 * seconds, bubble=0.2 / seconds,
               peak_memory=[memory * 2**30, 2**30], compute_time=[1.0, 1.0], wait_time=[waiting, 0.0])
        for step, memory, seconds, waiting in reports
    ]  # fmt: skip
    write_metrics(tmp_path / "a", *lines, {"step": 7, "eval_loss": 0.5})
    assert compare(tmp_path / "a").returncode == 0
    found = dict(run_in_page(tmp_path / "a" / "report.html", "figuresOf(runs[0])"))
    assert (found["tokens/s, mean"], found["MFU, mean"], found["bubble, mean"]) == ("7.5", "15.0%", "15.0%")
    assert (found["loss"], found["evaluation loss"], found["peak memory"]) == ("0.1429", "0.5", "6 GiB")
    means = run_in_page(tmp_path / "a" / "report.html", "runs[0].means")
    assert means["stage0/wait_time"] == pytest.approx((4 * 2.0 + 2 * 1.0) / 6) and "eval_loss" not in means


def test_saves_do_not_push_out_other_events(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 3)
    events = [{"step": 1, "kind": "resume", "text": "from step 1", "time": 1}]
    events += [{"step": step, "kind": "save", "text": "saved", "time": step} for step in range(2, 1000)]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (folder / "samples.jsonl").write_text('{"messages": []}\n' * 30)
    assert compare(folder).returncode == 0
    (run,) = load_page(folder / "report.html")["runs"]
    assert run["events"][0]["kind"] == "resume" and len(run["events"]) == 501
    assert (len(run["samples"]), run["num_samples"]) == (20, 30)


@pytest.mark.full
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_draws_a_hundred_thousand_steps_without_an_error(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "long", 100_000, config={}, plan={"tokens_per_second": 5.0})
    (folder / "events.jsonl").write_text(json.dumps({"step": 9, "kind": "warning", "text": "a loss spike", "time": 1}))
    assert compare(folder).returncode == 0
    assert (folder / "report.html").stat().st_size < 2_000_000
    drawn = "document.title = [document.querySelectorAll('figure:not([hidden]) polyline').length, "
    drawn += "innerWidth, document.documentElement.scrollWidth <= innerWidth, "
    drawn += "[0, 1, 3].map(i => document.querySelectorAll('.events td')[i]).every("
    drawn += "cell => cell.clientHeight < 40 && cell.scrollWidth <= cell.clientWidth)].join(' ')"
    title, console = open_in_browser(folder / "report.html", tmp_path / "profile", width, drawn)
    # Loss, gradient norm, memory of two stages; nothing is too wide, and step, kind and time of an event are in a line
    assert title == f"4 {width} true true" and console == []


CONTRAST = """
const luminance = color => color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
  v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce(
  (sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const paper = cell => { const color = getComputedStyle(cell).backgroundColor;
  return color.endsWith(', 0)') ? paper(cell.parentElement) : color; };
const texts = [...document.querySelectorAll('td, th, h1, h2, p, label, figcaption, summary, pre, .names span')].filter(
  cell => cell.innerText && cell.clientHeight);
const ratios = texts.map(cell => [getComputedStyle(cell).color, paper(cell)].map(luminance)).map(
  pair => (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05));
"""


@pytest.mark.full
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_browser_draws_a_comparison_that_can_be_read(tmp_path: Path, width: int, is_dark: bool) -> None:
    """Both runs in each chart, their different keys in the table, and a contrast of 4.5 as WCAG asks of texts."""
    folders = [write_run(tmp_path / name, 30, config={"seed": seed}) for name, seed in (("a", 1), ("b", 2))]
    assert compare(*folders, "--output", tmp_path / "compared.html").returncode == 0
    figures = "[...document.querySelectorAll('figure:not([hidden])')]"
    checks = (
        "document.documentElement.classList.contains('dark')", "texts.length > 20", "Math.min(...ratios) >= 4.5",
        f"{figures}.every(each => each.querySelectorAll('polyline').length > 1)",
        "document.body.innerText.includes('seed')", "document.documentElement.scrollWidth <= innerWidth",
    )  # fmt: skip
    turn = "find('theme').click();" if is_dark else ""
    script = f"{turn} {CONTRAST} document.title = [{', '.join(checks)}].join(' ')"
    title, console = open_in_browser(tmp_path / "compared.html", tmp_path / "profile", width, script)
    assert title == f"{str(is_dark).lower()} true true true true true" and console == []
