"""`inspect_data=true`: one process for any layout; no process group, no engine, pictures and a page in output_dir."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.configs import build_config
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer

from errors import UserError
from extensions.inspection.run import inspect_data
from training.distributed.ranks import Ranks

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "add_your_data.md").read_text()


@pytest.fixture
def config(tmp_path: Path):
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    records = save_records(tmp_path / "train.jsonl", 20)
    # A layout that one process cannot have, and a precision that this machine cannot have.
    return build_config(
        f"model_name_or_path={tmp_path}/model",
        f"train_file={records}",
        f"eval_file={records}",
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        "max_seq_length=256",
        "num_stages=8",
        "precision=fp16",
        "data.packing=true",
        "inspect_data=true",
    )


def test_it_prints_what_the_model_will_see(config, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    inspect_data(config, Ranks(0, 1, 0, 1))
    printed = capsys.readouterr().out
    for part in (
        f"=== files ===\ntrain_file: {tmp_path}/train.jsonl: 20 records; 20 samples, ",
        "\n  20 of its records are in train_file too, so the evaluation is contaminated\n",
        f"samples to read in a browser: {tmp_path}/out/data_report.html\n",
        "=== train_file ===",
        "=== eval_file ===",
        "20 samples, ",
        "target tokens: ",
        "(packing efficiency)",
        "\n--- row 0: ",
        "</s>]]",
        "=== what looks wrong ===",
        "eval_file: 20 of 20 samples are in train_file too",
    ):
        assert part in printed, part
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "data_report.html",
        "lengths_eval_file.png",
        "lengths_train_file.png",
    ]
    assert not torch.distributed.is_initialized()


def test_one_rank_does_it(config, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    inspect_data(config, Ranks(1, 2, 1, 2))
    assert capsys.readouterr().out == "" and not (tmp_path / "out").exists()


def test_a_missing_evaluation_file_is_reported_before_anything_is_tokenized(config, tmp_path: Path) -> None:
    config.eval_file = f"{tmp_path}/none.jsonl"
    with pytest.raises(UserError, match=f"eval_file: no such file: {tmp_path}/none.jsonl; check the path"):
        inspect_data(config, Ranks(0, 1, 0, 1))
    assert not (tmp_path / "cache").exists()


def test_a_stream_is_refused(tmp_path: Path) -> None:
    keys = ("data=pretrain", "data.streaming=true", "eval_file=null", "max_steps=1", "inspect_data=true")
    config = build_config(f"model_name_or_path={tmp_path}", "train_file=x.txt", f"output_dir={tmp_path}/out", *keys)
    with pytest.raises(UserError, match="data.streaming=true does not go together with inspect_data=true: it shows"):
        inspect_data(config, Ranks(0, 1, 0, 1))


def test_preferences_come_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    config = build_config(
        f"model_name_or_path={tmp_path}/model",
        f"train_file={save_pairs(tmp_path / 'pairs.jsonl', 9)}",
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        "max_seq_length=256",
        "data=preference",
        "inspect_data=true",
    )
    inspect_data(config, Ranks(0, 1, 0, 1))
    printed = capsys.readouterr().out
    for part in (
        "18 samples, ",
        "in 9 records of 2 samples",
        "\n--- record 0, chosen: ",
        "\n--- record 0, rejected: ",
        "\n--- record 8, rejected: ",
        "</s>]]",
    ):
        assert part in printed, part


def test_documents_for_which_a_query_leaves_no_room_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    queries = ("why wrap?", "why wrap? " * 50)
    records = [{"query": query, "positive": "lines are long", "negatives": ["indent"]} for query in queries]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = build_config(
        f"model_name_or_path={tmp_path}/model",
        f"train_file={tmp_path}/train.jsonl",
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        "max_seq_length=64",
        "data=rerank",
        "inspect_data=true",
    )
    inspect_data(config, Ranks(0, 1, 0, 1))
    lines = capsys.readouterr().out.splitlines()
    without = "2 samples without a token of their own text, since what comes before it fills the row"
    assert "  2 samples truncated" in lines and f"  {without}: raise max_seq_length" in lines


def test_user_defined_records_and_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Those of docs/add_your_data.md, with its command."""
    code, command = (re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) for language in ("python", "bash"))
    (tmp_path / "my_data.py").write_text(code[0])
    (tmp_path / "quiz.txt").write_text("Legs of a spider?\neight\nLegs of a bee?\nsix\nAnd a snake?\n\n")
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    overrides = [argument for argument in shlex.split(command[1]) if "=" in argument]
    assert len(overrides) == 5
    config = build_config("model_name_or_path=model", "output_dir=out", "data.on_bad_record=skip", *overrides)
    inspect_data(config, Ranks(0, 1, 0, 1))
    printed = capsys.readouterr().out
    assert (
        "Question: Legs of a spider? A:[[ eight</s>]]" in printed
        and "Question: Legs of a bee? A:[[ six</s>]]" in printed
    )
    assert "skipped: my_data.read_quiz: record 3: no answer; fix or remove it" in printed


@pytest.mark.full
def test_the_benchmark_prints_a_row() -> None:
    command = [sys.executable, "-m", "extensions.inspection.benchmark", "--records", "200"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and re.search(r"^\| 200 \| [\d,]+ \| [\d.]+ s \|", ended.stdout, re.M), ended.stderr
