"""metrics.jsonl and the progress line."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from support.configs import build_config

import console
from training.objectives import registry
from training.objectives.objective import Objective
from training.observability.metrics import MetricsFile, ProgressBar, describe_evaluation, perplexity, split_stages

RECORD = {
    "step": 3, "loss": 2.5, "grad_norm": 0.125, "learning_rate": 1e-3, "num_tokens": 3000,
    "tokens_per_second": 1234.5, "step_time": 30.0,
}  # fmt: skip


def write(path: Path, *records: dict[str, float]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_report_on_disk_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=0)
    file.report(RECORD)
    assert read(tmp_path / "metrics.jsonl") == [RECORD]  # a run that is killed loses no report
    file.report({"step": 3, "eval_loss": 2.0, "eval_tokens": 10})
    file.close()
    assert read(tmp_path / "metrics.jsonl") == [RECORD, {"step": 3, "eval_loss": 2.0, "eval_tokens": 10}]


def test_a_resumed_run_cuts_the_file_back_to_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = [
        {"step": 0, "eval_loss": 9.0},
        {"step": 1, "loss": 8.0},
        {"step": 2, "loss": 7.0},
        {"step": 2, "eval_loss": 7.5},
    ]
    write(path, *kept, {"step": 3, "loss": 6.0}, {"step": 4, "loss": 5.0})
    file = MetricsFile(path, first_step=2)
    file.report({"step": 3, "loss": 6.5})
    file.close()
    assert read(path) == [*kept, {"step": 3, "loss": 6.5}]


@pytest.mark.parametrize("half", ['{"step": 2, "lo', '{"step', "{", "1", '{"loss": 3}'])
def test_a_half_line_is_dropped(tmp_path: Path, half: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 8.0})
    with open(path, "a") as handle:
        handle.write(half)  # no end of line: the next report must not be appended to it
    file = MetricsFile(path, first_step=2)
    file.report({"step": 3, "loss": 6.5})
    file.close()
    assert read(path) == [{"step": 1, "loss": 8.0}, {"step": 3, "loss": 6.5}]


def test_a_run_from_the_start_keeps_nothing_of_one_that_saved_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 0, "eval_loss": 9.0}, {"step": 1, "loss": 8.0})
    MetricsFile(path, first_step=0).close()
    assert read(path) == []


def test_without_a_terminal_the_bar_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(console, "stream", lambda: stream)
    bar = ProgressBar(build_config(), 2, 123)
    bar.advance(3)
    bar.report(RECORD)
    bar.report({"step": 3, "eval_loss": math.log(50), "eval_tokens": 10})
    bar.close()
    assert stream.getvalue() == (
        "step 3/123  loss 2.5000  grad_norm 0.125  lr 1.00e-03  1,234 tokens/s  1:00:00 left\n"
        "step 3: eval_loss 3.9120  perplexity 50.00\n"
    )
    ProgressBar(build_config("skip_data_intervals=[[1,63],[100,200]]"), 2, 123).report(RECORD)
    assert stream.getvalue().endswith("  0:18:00 left\n")  # 36 steps are left that are not skipped


def test_lists_are_split_by_stage_or_layer() -> None:
    record = {"wait_time": [1.0, 2.0], "router_other_choices": [None, 0.25], "grad_norm": None, "loss": 3.0}
    assert split_stages(record) == {
        "stage0/wait_time": 1.0, "stage1/wait_time": 2.0, "layer1/router_other_choices": 0.25, "loss": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("routed", "text"),
    [
        (
            {"router_aux_loss": 1.25, "router_z_loss": 0.5, "expert_load_max": 2, "expert_load_min": 0.125},
            "loss 2.5000  router aux 1.2500  router z 0.5000  expert load 0.12 to 2.00  grad_norm",
        ),
        ({"expert_load_max": 1.5, "expert_load_min": 0.5}, "loss 2.5000  expert load 0.50 to 1.50  grad_norm"),
    ],
    ids=["losses", "a bias alone"],
)
def test_routers_are_shown_when_they_are_balanced(
    monkeypatch: pytest.MonkeyPatch, routed: dict[str, float], text: str
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(console, "stream", lambda: stream)
    balanced = build_config("moe.aux_loss_coef=0.01")
    ProgressBar(balanced, 2, 123).report(RECORD | routed)
    assert text in stream.getvalue()
    ProgressBar(build_config(), 2, 123).report(RECORD | routed)
    assert "loss 2.5000  grad_norm" in stream.getvalue()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    ProgressBar(balanced, 2, 123).report(RECORD | routed)
    assert "tokens/s, " in stream.getvalue() and f"load {routed['expert_load_min']:.2f}" in stream.getvalue()


def test_on_a_terminal_there_is_one_bar_with_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(console, "stream", lambda: stream)
    bar = ProgressBar(build_config(), 2, 123)
    bar.advance(3)
    bar.report(RECORD)
    bar.report({"step": 3, "eval_loss": 1.0, "eval_tokens": 10})
    bar.close()
    text = stream.getvalue()
    assert (
        "3/123" in text
        and "loss 2.5000, lr 1.00e-03, 1,234 tokens/s" in text
        and "eval_loss 1.0000  perplexity 2.72" in text
    )


def test_perplexity_of_a_loss_that_diverged() -> None:
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert math.isfinite(perplexity(1e6))


def test_only_a_cross_entropy_of_tokens_has_a_perplexity() -> None:
    """A user-defined loss of the same data has none, nor have scores of classes."""
    record = {"step": 4, "eval_loss": 1.0, "eval_mtp_loss_1": 2.0, "eval_tokens": 9}
    assert "perplexity" in describe_evaluation(record, build_config())
    assert describe_evaluation(record, build_config("loss={_target_: my.Loss}")) == "eval_loss 1.0000"
    record = {"eval_loss": 0.7, "eval_a_loss": 0.7, "eval_a_accuracy": 0.5, "eval_a_tokens": 3, "eval_tokens": 3}
    classified = describe_evaluation(record, build_config("data=classification"))
    assert classified == "eval_loss 0.7000; a: eval_loss 0.7000  accuracy 50.0%"


def test_a_line_shows_the_metrics_of_the_run_s_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another objective with a metric of the same name does not change its words; on a terminal they are shown too."""

    class Other(Objective):
        shown = (("accuracy", "other {:.4f}"),)

    stream = io.StringIO()
    monkeypatch.setattr(console, "stream", lambda: stream)
    monkeypatch.setitem(registry.OBJECTIVES, "other", Other())
    config = build_config("data=classification")
    ProgressBar(config, 2, 123).report(RECORD | {"accuracy": 0.5})
    assert "loss 2.5000  accuracy 50.0%  grad_norm" in stream.getvalue()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    ProgressBar(config, 2, 123).report(RECORD | {"accuracy": 0.25})
    assert "1,234 tokens/s, accuracy 25.0%" in stream.getvalue() and "other" not in stream.getvalue()


def test_an_evaluation_of_named_files_shows_each() -> None:
    record = {"step": 4, "eval_loss": 1.0, "eval_a_loss": 2.0, "eval_a_tokens": 3, "eval_a_b_loss": 0.5}
    shown = describe_evaluation({**record, "eval_a_b_tokens": 6, "eval_tokens": 9}, build_config())
    assert shown == (
        "eval_loss 1.0000  perplexity 2.72; a: eval_loss 2.0000  perplexity 7.39; a_b: eval_loss 0.5000  "
        "perplexity 1.65"
    )
