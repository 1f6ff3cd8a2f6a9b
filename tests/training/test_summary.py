"""The panel at the end of a run."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import build_config
from support.families import build_family_config
from support.tiny import save_pairs, save_tokenizer
from transformers import LlamaConfig

from data.storage.rows import count_rows
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.inputs.datasets import build_row_plan, tokenize
from training.objectives.registry import get_objective
from training.summary import RunEnd, RunTotals, _describe_rows, show_end, warn_of_indexers

START = TrainerState(
    step=2,
    num_tokens=100,
    num_stages=1,
    dp_size=1,
    global_batch_size=1,
    micro_batch_size=1,
    num_samples=9,
    total_steps=9,
    seed=0,
)


def test_totals_count_from_the_start_of_the_run_and_only_steps() -> None:
    totals = RunTotals(START)
    totals.report({"step": 4, "loss": 3.0, "step_time": 0.5, "num_tokens": 300, "tokens_per_second": 200.0})
    totals.report({"step": 4, "eval_loss": 2.0, "eval_tokens": 7})
    # with fifteen steps whose data were skipped
    totals.report({"step": 20, "loss": 2.5, "step_time": 2.0, "num_tokens": 400, "tokens_per_second": 50.0})
    facts = totals.describe()
    assert facts["trained"] == "3 steps, 300 tokens, 100 tokens/s" and facts["loss"] == "2.5000 at step 20"
    assert facts["time"].endswith("3.0 s of it in steps")
    assert RunTotals(START).describe() == {}
    first, second = totals.summarize("llama", "2 ranks", "eval_loss 2.0000")
    assert re.fullmatch(r"llama: 3 steps, 300 tokens, 100 tokens/s on 2 ranks in \S+ m?s", first)
    assert second.startswith("loss 3.000 -> 2.500, eval_loss 2.0000")
    assert RunTotals(START).summarize("llama", "2 ranks", "") == []


def test_random_indexers_that_choose_keys_are_told() -> None:
    config = build_config("init=random", "max_seq_length=64")
    indexed = build_family_config("deepseek_v32", index_topk=16)
    assert warn_of_indexers(indexed, config).startswith("init=random: the indexers are random too and are not trained")
    assert not warn_of_indexers(indexed, replace(config, max_seq_length=16))  # all keys are seen
    assert not warn_of_indexers(indexed, build_config("max_seq_length=64"))
    assert not warn_of_indexers(LlamaConfig(), config)


def test_a_step_of_packed_rows_has_so_many_pairs(tmp_path: Path) -> None:
    tokenizer, file = save_tokenizer(tmp_path / "model"), save_pairs(tmp_path / "train.jsonl", 21)
    keys = ("data=preference", "data.packing=true", "max_seq_length=512", f"data.cache_dir={tmp_path}/cache")
    config = build_config(f"train_file={file}", *keys)
    datasets = tokenize(config, tokenizer)
    num_rows = count_rows(datasets["train_file"], build_row_plan(config, "train_file"))
    setup: Any = SimpleNamespace(
        config=config, layout=SimpleNamespace(global_batch_size=4), objective=get_objective(config)
    )
    planned: Any = SimpleNamespace(run=SimpleNamespace(config=SimpleNamespace(max_seq_length=400)))
    prediction: Any = SimpleNamespace(plan=planned, filled=390.0)
    budget: Any = SimpleNamespace(stream=None)
    assert 1 < num_rows < 21 and _describe_rows(setup, datasets, budget, prediction) == {
        "rows": f"400 tokens on average, 2.5% of them padding; about {21 / num_rows * 4:.0f} pairs in a step"
    }


@pytest.mark.parametrize(
    ("end", "is_saved", "title"),
    [
        (RunEnd(5, 5, "the last step"), True, "done: 5 steps"),
        (RunEnd(5, 5, "the last step"), False, "done: 5 steps, not saved (save_final=false)"),
        (RunEnd(5, 9, "stop_after_steps"), True, "ended by stop_after_steps at step 5 of 9; resume=latest continues"),
        (RunEnd(5, 9, "STOP"), False, "ended by STOP at step 5 of 9, not saved (save_final=false)"),
        (RunEnd(5, 9, "early stopping"), True, "ended by early stopping at step 5 of 9"),
        (RunEnd(5, 9, "", signal.SIGTERM), True, "stopped by SIGTERM at step 5; continue with resume=latest"),
        (
            RunEnd(5, 9, "", signal.SIGINT),
            False,
            "stopped by SIGINT at step 5; it is not saved; continue with resume=auto",
        ),
    ],
)
def test_the_two_lines_come_however_a_run_ends(
    end: RunEnd, is_saved: bool, title: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    if is_saved:
        folder.find_checkpoint(5).mkdir(parents=True)
    config = LlamaConfig(architectures=["LlamaForCausalLM"])
    layout = SimpleNamespace(describe_ranks=lambda: "2 ranks")
    setup: Any = SimpleNamespace(adapter=None, architecture=config, layout=layout)
    totals = RunTotals(START)
    totals.report({"step": 5, "loss": 2.5, "step_time": 2.0, "num_tokens": 400, "tokens_per_second": 50.0})
    if is_saved and not end.signum:
        end = replace(end, exported=folder.export)
    run: Any = SimpleNamespace(setup=setup, folder=folder)
    show_end(run, totals, end, records="")
    shown = capfd.readouterr()
    lines = (shown.out + shown.err).splitlines()
    assert title in lines
    assert lines[-2].startswith("llama: 3 steps, 300 tokens") and lines[-1] == "loss 2.500 -> 2.500"
    assert any("exported" in line for line in lines) is (is_saved and not end.signum)
