"""`profile_trace`: the files of a real run of two stages that is resumed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.configs import build_config
from torch.profiler import ProfilerActivity

from errors import UserError
from training.config.validate import check_config
from training.observability import step_trace


def test_one_step_is_traced_on_every_rank(run: Callable[..., Path]) -> None:
    """Step 3 of a run that is resumed after step 2: steps are counted as in metrics.jsonl."""
    first = run("out", 2, 2, "profile_trace=3", "stop_after_steps=2")
    assert not (first / "traces").exists()
    output = run("out", 2, 2, "profile_trace=3", "resume=latest")
    assert sorted(file.name for file in (output / "traces").iterdir()) == ["rank_0.json.gz", "rank_1.json.gz"]
    for rank in (0, 1):
        with gzip.open(output / "traces" / f"rank_{rank}.json.gz", "rt") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("optimizer step 3") == 1
        assert names.count("c10d::allreduce_") < 20  # of one step
    lines = (output / "profile_step_3.txt").read_text().splitlines()
    assert lines[0].startswith("step 3,")
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"] and "aten::item" in lines[3]
    assert "rank 1: operators by host time" in lines and any("aten::mm" in line for line in lines)
    assert [file.name for file in output.glob("profile_*")] == ["profile_step_3.txt"]


def test_the_step_is_counted_from_one() -> None:
    with pytest.raises(UserError, match="profile_trace=0: at least 1; null turns it off"):
        check_config(build_config("profile_trace=0"), has_accelerator=False)


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_does_not_trace_the_gpu(
    has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    monkeypatch.setattr(step_trace, "supported_activities", lambda: both)
    monkeypatch.setattr(step_trace, "has_accelerator", lambda: has_accelerator)
    assert step_trace.list_activities() == (both if has_accelerator else {ProfilerActivity.CPU})
