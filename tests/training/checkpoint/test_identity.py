"""A run is resumed on the base, reference and tokenizer that it began with, by their content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import Case, train_run
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from test_checkpoint import STATE
from transformers import AutoTokenizer

from errors import UserError
from models.weights.fingerprint import fingerprint_as_1_1, fingerprint_weights, is_of_1_1
from models.weights.sources import open_weights
from models.weights.vocabulary import fingerprint_tokenizer
from training.checkpoint.resume import check_resumable
from training.checkpoint.state import Identity

Workers = Callable[[int], WorkerGroup]
RUNS = {
    "base model": ("adapter=lora",),
    "reference model": ("data=preference", "task=dpo"),
}


def save_model(folder: Path, seed: int) -> Path:
    save_llama(folder, num_hidden_layers=1, seed=seed)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_not_resumed_on_another_model(workers: Workers, tmp_path: Path, name: str) -> None:
    model, other = save_model(tmp_path / "model", 0), save_model(tmp_path / "other", 1)
    save = save_pairs if name == "reference model" else save_records
    save(tmp_path / "train.jsonl", 24)
    overrides = (*RUNS[name], "optimizer=adamw", "stop_after_steps=1", f"output_dir={tmp_path}/out")
    case = Case(model, tmp_path / "train.jsonl", tmp_path, 1, 1, 4, overrides)
    workers(1).run(train_run, case)
    state = tmp_path / "out" / "checkpoints" / "global_step1" / "trainer_state.json"
    assert {"base model", "tokenizer"} <= set(json.loads(state.read_text())["identity"])

    if name == "base model":
        check_merged_into_its_base_alone(tmp_path / "out", other)
    resumed = replace(case, overrides=(*overrides, "resume=latest"))
    with pytest.raises(WorkerError) as caught:
        workers(1).run(train_run, replace(resumed, model=other))
    expected = f"resume: the {name} was {model}, is {other}, whose content differs"
    assert expected in str(caught.value)
    moved = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    workers(1).run(train_run, replace(resumed, model=moved))  # the same model at another path
    assert (tmp_path / "out" / "checkpoints" / "global_step2").is_dir()
    allowed = (*resumed.overrides, "resume_allow_changes=true")
    workers(1).run(train_run, replace(resumed, model=other, overrides=allowed))
    assert (tmp_path / "out" / "checkpoints" / "global_step3").is_dir()


def check_merged_into_its_base_alone(out: Path, other: Path) -> None:
    """The checkpoint and the export of a LoRA run know the base that the run was on."""
    for folder in (out / "checkpoints", out / "hf"):
        open_weights(str(folder))
        copy = Path(shutil.copytree(folder, out / f"{folder.name}-copy"))
        fields = json.loads((copy / "adapter_config.json").read_text())
        (copy / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": str(other)}))
        with pytest.raises(UserError, match=f"{copy} holds an adapter of another base model than {other}"):
            open_weights(str(copy))


def test_another_tokenizer_is_named_and_a_state_without_identity_resumes(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "before")
    saved = replace(STATE, identity={"tokenizer": Identity(fingerprint_tokenizer(tokenizer), "before")})
    again = AutoTokenizer.from_pretrained(tmp_path / "before")
    same = replace(STATE, identity={"tokenizer": Identity(fingerprint_tokenizer(again), "elsewhere")})
    assert check_resumable(saved, same, tmp_path) == check_resumable(STATE, same, tmp_path) == []
    again.add_tokens(["<new>"])
    other = replace(STATE, identity={"tokenizer": Identity(fingerprint_tokenizer(again), "after")})
    with pytest.raises(UserError, match="resume: the tokenizer was before, is after, whose content differs; "):
        check_resumable(saved, other, tmp_path)
    assert check_resumable(saved, other, tmp_path, allow_changes=True) == ["the tokenizer was before, is after"]


def test_a_fingerprint_of_version_1_1_is_compared_in_its_own_form(tmp_path: Path) -> None:
    source = open_weights(str(save_model(tmp_path / "model", 0)))
    old, new = fingerprint_as_1_1(source), fingerprint_weights(source)
    assert is_of_1_1(old) and not is_of_1_1(new)
    saved = replace(STATE, identity={"base model": Identity(old, "before")}, format=6)
    same = replace(STATE, identity={"base model": Identity(new, "after", old)})
    (note,) = check_resumable(saved, same, tmp_path)
    assert (
        note == "the base model is that of before by the fingerprint of version 1.1, which does not cover every tensor"
    )
    other = replace(STATE, identity={"base model": Identity(new, "after", "0" * 32)})
    with pytest.raises(UserError, match="resume: the base model was before, is after, whose content differs"):
        check_resumable(saved, other, tmp_path)


def test_another_collator_is_named_unless_an_older_version_saved_the_run(tmp_path: Path) -> None:
    collator = {"data.collator": "mine with code 12"}
    with pytest.raises(UserError, match="data.collator was none, is mine with code 12. Give the same"):
        check_resumable(STATE, replace(STATE, data=collator), tmp_path)
    notes = check_resumable(replace(STATE, format=6), replace(STATE, data=collator), tmp_path)
    assert notes == [f"{tmp_path} was saved by an earlier version: no comparison of data.collator"]
