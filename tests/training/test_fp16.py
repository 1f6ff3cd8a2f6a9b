"""fp16 on a CPU, where DeepSpeed refuses it unless the processor has fp16: a real run, whose first steps overflow their
loss scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.cases import Case, train_run
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

STEPS = 6


def train_in_fp16(case: Case) -> None:
    from deepspeed.accelerator import get_accelerator

    from training import setup
    from training.config import validate
    from training.engine import pipeline_engine as engines

    written = engines.build_deepspeed_config

    def build(*arguments: Any) -> dict[str, Any]:
        return {**written(*arguments), "fp16": {"enabled": True, "initial_scale_power": 21}}

    with (
        patch.object(engines, "build_deepspeed_config", build),
        patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True),
        patch.object(setup, "check_together", lambda run: None),
        patch.object(validate, "check_together", lambda run: None),
    ):
        train_run(case)


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def test_skipped_steps_and_the_loss_scale_are_in_the_metrics(
    workers: Callable[[int], WorkerGroup], tmp_path: Path
) -> None:
    save_llama(tmp_path / "hf", num_hidden_layers=2)
    save_tokenizer(tmp_path / "hf")
    records = save_records(tmp_path / "train.jsonl", 40)
    case = Case(
        tmp_path / "hf", records, tmp_path, 2, 2, STEPS,
        overrides=("precision=fp16", "optimizer=adamw", "learning_rate=1e-3", "logging_steps=1", "save_steps=null"),
    )  # fmt: skip
    workers(2).run(train_in_fp16, case)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    skipped, scales = [line["skipped_steps"] for line in lines], [line["loss_scale"] for line in lines]
    assert skipped[:2] == [1, 1] and 0 in skipped  # a gradient of 0.1 x 2^21 is beyond fp16's 65,504
    assert scales[0] == 2**21 and scales == sorted(scales, reverse=True) and scales[-1] < 2**21
    assert [line["grad_norm"] is None for line in lines] == [bool(count) for count in skipped]
    assert all(0.1 < line["grad_norm"] < 10 for line in lines if line["grad_norm"] is not None)
    assert all(line["loss"] < 6 for line in lines)  # of a skipped step too
