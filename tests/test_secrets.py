"""No secret that a user gives to a run is in what the run prints or leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.launching import ROOT, run
from support.tiny import save_llama, save_records, save_tokenizer

MINE = """
import json
from torch.optim import SGD


class Tracker:
    def __init__(self, api_key, server):
        self.api_key, self.server = api_key, server

    def start(self, run, params):
        (run.output_dir / "tracker.json").write_text(json.dumps(params))
        return f"{self.server} with {self.api_key}"

    def log_metrics(self, figures, step):
        raise ConnectionError(f"{self.server} refuses {self.api_key}")

    def log_file(self, file): ...
    def close(self): ...


def keep(record, hub_token):
    return True


def records(file, password):
    return [json.loads(line) for line in open(file)]


def optimizer(groups, lr, access_token):
    return SGD(groups, lr=lr)
"""


@pytest.mark.full
def test_secrets_are_used_and_never_left(tmp_path: Path) -> None:
    """One in every place: an open group of the config, a filter, a source, an optimizer, an address, the environment;
    and what a failing tracker says of it."""
    (tmp_path / "mine_secret.py").write_text(MINE)
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    data = save_records(tmp_path / "train.jsonl", 40)
    keys = (
        f"model_name_or_path={tmp_path}/hf", f"output_dir={tmp_path}/out", f"data.cache_dir={tmp_path}/cache",
        f"+train_file={{_target_: mine_secret.records, file: {data}, password: planted-source}}",
        "+logger.trackers.mine={_target_: mine_secret.Tracker, api_key: planted-key, "
        "server: 'https://user:planted-address@host'}",
        "+logger.trackers.other={_target_: mine_secret.Tracker, api_key: '${oc.env:OWN_API_KEY}', server: there}",
        "data.filter={_target_: mine_secret.keep, hub_token: planted-filter}", "optimizer=custom",
        "optimizer.custom={_target_: mine_secret.optimizer, access_token: planted-optimizer}", "weight_decay=0",
        "max_seq_length=256", "micro_batch_size=1", "global_batch_size=4", "max_steps=2", "logging_steps=1",
        "num_stages=1",
    )  # fmt: skip
    planted = ("source", "key", "address", "filter", "optimizer", "environment", "uri", "evaluation")
    variables = (
        "OWN_API_KEY=planted-environment", "MLFLOW_TRACKING_URI=https://me:planted-uri@host",
        f"PYTHONPATH={tmp_path}{os.pathsep}{ROOT}",
    )  # fmt: skip
    command = ["env", *variables, sys.executable, str(ROOT / "trainer_base_ds_mp.py"), *keys]
    ended = run(command, tmp_path)
    assert ended.code == 0 and (tmp_path / "out" / "completed.json").is_file(), ended.output
    source = f"{{_target_: mine_secret.records, file: {data}, password: planted-evaluation}}"
    evaluation = (f"output_dir={tmp_path}/evaluated", "evaluate_only=true", f"+eval_file={source}")
    evaluated = run([*command, *evaluation], tmp_path)
    assert evaluated.code == 0, evaluated.output
    left = {
        file: file.read_bytes()
        for folder in ("out", "cache", "evaluated")
        for file in (tmp_path / folder).rglob("*")
        if file.is_file()
    }
    written = {"config.yaml", "run.json", "report.html", "tracker.json", "rank_0.log", "evaluation.json"}
    assert written <= {file.name for file in left}
    left[Path("screen")] = (ended.output + evaluated.output).encode()
    found = [
        (str(file), name) for file, content in left.items() for name in planted if f"planted-{name}".encode() in content
    ]
    assert not found, found
    assert "refuses ***" in ended.output
