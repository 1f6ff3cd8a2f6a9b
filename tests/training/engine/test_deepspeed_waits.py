"""DeepSpeed adds no waits of the host to a step on a GPU, and no timed events that nothing frees. Counted on an
accelerator whose streams and events only count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import Case, train_case
from support.counting_streams import count_waits
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

STEPS = 4  # DeepSpeed's throughput timer begins with the third


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("waits")
    save_llama(root / "model", num_hidden_layers=2)
    save_tokenizer(root / "model")
    save_records(root / "train.jsonl", 40)
    return root


@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        (1, ("zero_stage=3", "precision=bf16")),
        pytest.param(1, ("zero_stage=3", "activation_checkpoint_interval=1"), marks=pytest.mark.full),
        pytest.param(2, ("zero_stage=1",), marks=pytest.mark.full),
        pytest.param(1, ("zero_stage=2", "precision=bf16"), marks=pytest.mark.full),
    ],
)
def test_the_host_waits_for_no_stream_and_no_timer_runs(
    workers: Callable[[int], WorkerGroup], root: Path, num_stages: int, overrides: tuple[str, ...]
) -> None:
    files = root / "model", root / "train.jsonl", root / "work"
    case = Case(*files, num_stages, 2, STEPS, ("micro_batch_size=1", "global_batch_size=4", *overrides))
    expected = workers(2).run(train_case, case)
    for (found, counts), plain in zip(workers(2).run(train_counted, case), expected, strict=True):
        assert found["losses"] == plain["losses"] and found["norms"] == plain["norms"]
        assert [counted["timed events"] for counted in counts] == [0] * STEPS
        waits = [{name: count for name, count in counted.items() if name.startswith("host")} for counted in counts]
        # After an update stage 3 gathers the weights that it does not partition, being small, and waits for them
        gathers = {"host waits for the device": 1} if "zero_stage=3" in overrides else {}
        assert waits == [gathers] * STEPS
        if "zero_stage=3" in overrides:  # one for each micro-batch at least, or nothing would order the two streams
            assert all(counted["stream waits for a stream"] >= 2 for counted in counts)


def train_counted(case: Case) -> tuple[dict[str, Any], list[Counter[str]]]:
    """The run, and what each of its steps counts."""
    from training.engine.pipeline_engine import PipelineStage

    train_step, counts = PipelineStage.train_step, list[Counter[str]]()
    with count_waits() as counted:

        def recorded(*args: Any, **named: Any) -> Any:
            counted.clear()
            loss = train_step(*args, **named)
            counts.append(counted.copy())
            return loss

        PipelineStage.train_step = recorded  # type: ignore[method-assign]
        try:
            return train_case(case), counts
        finally:
            PipelineStage.train_step = train_step  # type: ignore[method-assign]
