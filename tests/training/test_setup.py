"""The setup of a run, before a process group exists."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from support.configs import build_config
from support.tiny import save_llama

from data.loading.row_lengths import RowLengths
from training import setup as setups
from training.distributed.ranks import SINGLE_PROCESS
from training.resolution import counts


def test_costs_are_counted_once_for_the_split_and_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "hf")
    count = Mock(wraps=counts.count_layers)
    monkeypatch.setattr(counts, "count_layers", count)
    monkeypatch.setattr(setups, "describe_device", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(setups, "has_accelerator", lambda: True)
    config = build_config(
        f"model_name_or_path={tmp_path}/hf", f"output_dir={tmp_path}/out", "micro_batch_size=1", "global_batch_size=2",
    )  # fmt: skip
    setup = setups.check_run(config, SINGLE_PROCESS)
    machine = setups.find_run_machine(config, SINGLE_PROCESS)
    rows = RowLengths(longest=config.max_seq_length, padded=config.max_seq_length, filled=config.max_seq_length)
    monkeypatch.setattr(setups, "broadcast_from_main", lambda compute, ranks: compute())
    monkeypatch.setattr(setups, "measure_rows", Mock(return_value=rows))
    predicted = setups.predict_run(
        config, setup, machine, train_path=tmp_path, num_samples=2, steps=range(1), ranks=SINGLE_PROCESS
    )
    assert predicted is not None
    assert count.call_count == 1 and predicted.costs is setup.costs
    assert machine is not None and predicted.hardware is machine and predicted.peak_flops == machine.peak_flops["bf16"]


def test_a_run_that_only_evaluates_counts_no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "hf")
    count = Mock()
    monkeypatch.setattr(counts, "count_layers", count)
    config = build_config(
        f"model_name_or_path={tmp_path}/hf", f"output_dir={tmp_path}/out", "micro_batch_size=1", "global_batch_size=2",
        "eval_file=eval.jsonl", "evaluate_only=true",
    )  # fmt: skip
    setups.check_run(config, SINGLE_PROCESS)
    assert not count.called
