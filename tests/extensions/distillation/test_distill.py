"""Distillation through real pipeline stages against both plain Hugging Face models in one process."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import objective_runs
from support.adapters import make_adapter, to_peft_weights
from support.cases import BOUND, CHECKPOINTED, CLIPPED, RING, Case, merge, train_run, worst_difference
from support.configs import build_config
from support.distill_runs import build_case, check_equal, compute_document, save_sharp, save_teacher, train_oracle
from support.objective_runs import find_dataset, load_model, start_runs, train_answers
from support.tiny import VOCAB_SIZE, save_tokenizer
from support.workers import WorkerError, WorkerGroup

from errors import UserError
from extensions.distillation.modifier import Teacher
from training.objectives.registry import check_objective


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("distill"))


FORWARD = ("distill.divergence=forward", "distill.temperature=2")
REVERSE, SYMMETRIC = "distill.divergence=reverse", "distill.divergence=jensen_shannon"


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", False, (*FORWARD, CLIPPED)),
        *(
            pytest.param(layout, tied, overrides, marks=pytest.mark.full)
            for layout, tied, *overrides in (
                ("pp1", True, *FORWARD, CHECKPOINTED, "micro_batch_size=1"),
                ("pp2", True, REVERSE, "data.packing=true", "global_batch_size=2", "micro_batch_size=1"),
                ("pp2", False, SYMMETRIC, "distill.temperature=1.5", "data.pad_to=max_seq_length"),
                ("pp2xdp2", True, REVERSE, "distill.temperature=0.7", CLIPPED),
                ("pp2xdp2", False, *FORWARD, "distill.num_stages=4"),
                ("tp2", True, SYMMETRIC, "distill.temperature=2"),
                ("tp2", False, *FORWARD, f"distill.top_k={VOCAB_SIZE}"),
                ("tp2", False, REVERSE, "sequence_parallel=true", "distill.tensor_parallel_size=1"),
                ("tp2xpp2", False, *FORWARD, "distill.num_stages=1"),
                ("pp2", False, *FORWARD, "distill.num_stages=1", "distill.tensor_parallel_size=2"),
                ("pp2", True, *FORWARD, "schedule=zero_bubble"),
                ("pp2", False, REVERSE, "schedule=interleaved", "virtual_stages_per_rank=2"),
                ("cp2", False, *FORWARD, RING, "data.packing=true", "global_batch_size=2", "micro_batch_size=1"),
                ("cp2xpp2", True, SYMMETRIC, CHECKPOINTED),
                ("zero2", True, *FORWARD, CHECKPOINTED),
                ("zero3", False, REVERSE),
                ("pp2", False, "data=pretrain", "max_seq_length=64", "global_batch_size=4", *FORWARD),
            )
        ),
    ],
)
def test_three_sgd_steps_equal_the_formula(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    if "data=pretrain" in overrides:
        records = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
        texts = "".join(json.dumps({"text": each["prompt"] + " " + each["completion"]}) + "\n" for each in records)
        (tmp_path / "texts.jsonl").write_text(texts)
        overrides = (*overrides, f"train_file={tmp_path}/texts.jsonl")
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, load_model(case.model), load_model(root / "teacher"))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND


@pytest.mark.full
def test_adapters_are_distilled_too(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> None:
    student = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    case = build_case(root, tmp_path, "pp2", "adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", *FORWARD)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, student, load_model(root / "teacher"))
    check_equal(result, oracle)
    worst, name = worst_difference(*to_peft_weights(result, oracle, student.config))
    assert worst < BOUND, name


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


def find_teachers(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "cache").glob("*/teacher-*") if path.is_dir())


@pytest.mark.full
def test_a_run_evaluates_and_continues_at_another_layout_with_what_the_teacher_has_left(
    run, root: Path, tmp_path: Path
) -> None:
    files = (f"eval_file={root}/other.jsonl",)
    whole = run("whole", "pp2", *files)
    left = {folder: (folder / "hashes.json").stat().st_mtime_ns for folder in find_teachers(tmp_path)}
    assert len(left) == 2  # of train_file and of eval_file
    run("begun", "pp2", *files, "stop_after_steps=3")
    ended = run("ended", "tp2", *files, f"resume={tmp_path}/begun/checkpoints")
    assert {folder: (folder / "hashes.json").stat().st_mtime_ns for folder in find_teachers(tmp_path)} == left
    objective_runs.check_continued(whole, ended, ("loss", "grad_norm", "distill_loss"), absolute=1e-5)
    case = build_case(root, tmp_path, "pp1")
    student, teacher = load_model(tmp_path / "ended" / "hf"), load_model(root / "teacher")
    folder = find_dataset(tmp_path, 5)._arguments[0]
    sums = np.zeros(3)
    for number in range(5):
        dataset = find_dataset(tmp_path, 5)
        columns = (dataset.input_ids(number), dataset.labels(number))
        ids, labels = (torch.from_numpy(column.astype("int64")) for column in columns)
        with torch.no_grad():
            found = compute_document(case.config(), student, teacher, ids, labels)
        sums += np.array([float(each) for each in found])
    assert folder.name in {path.parent.name for path in left}
    expected = {"eval_loss": sums[0] / sums[2], "eval_distill_loss": sums[1] / sums[2]}
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 <= ended[-1]["eval_token_accuracy"] <= 1


@pytest.mark.full
def test_another_teacher_is_scored_anew_and_named_by_a_resume(run, root: Path, tmp_path: Path) -> None:
    run("begun", "pp1", "stop_after_steps=1")
    save_sharp(tmp_path / "other", seed=8)
    with pytest.raises(WorkerError, match="distill.coef was 0.8, is 0.5"):
        run("coef", "pp1", f"resume={tmp_path}/begun/checkpoints", "distill.coef=0.5")
    before = find_teachers(tmp_path)
    with pytest.raises(WorkerError, match="teacher was"):
        run("other", "pp1", f"resume={tmp_path}/begun/checkpoints", f"distill.teacher={tmp_path}/other")
    run("again", "pp1", f"distill.teacher={tmp_path}/other", "max_steps=1")
    assert len(find_teachers(tmp_path)) == len(before) + 1


def score_until_interrupted(case: Case) -> None:
    """The pass of the teacher, which ends after its first chunk of four rows, as when its process is killed."""
    from support.cases import build_engine

    from data.storage import scores as storage
    from training.scoring import scored as scoring

    seconds, chunk, advance = storage._SECONDS_BETWEEN_COMMITS, scoring._CHUNK, storage.ScoresWriter.advance

    def advance_once(self: storage.ScoresWriter, rows: int) -> None:
        advance(self, rows)
        assert self._lock is not None
        self._lock.release()
        raise KeyboardInterrupt(f"after {rows} rows")

    storage._SECONDS_BETWEEN_COMMITS, scoring._CHUNK, storage.ScoresWriter.advance = 0.0, 2, advance_once
    try:
        build_engine(case)
    finally:
        storage._SECONDS_BETWEEN_COMMITS, scoring._CHUNK = seconds, chunk
        storage.ScoresWriter.advance = advance  # type: ignore[method-assign]


def test_a_pass_that_was_interrupted_continues_at_another_layout(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match="after 4 rows"):
        workers(1).run(score_until_interrupted, build_case(root, tmp_path, "pp1"))
    (part,) = find_teachers(tmp_path)
    assert part.suffix == ".part" and json.loads((part / "progress.json").read_text())["rows"] == 4
    before = (part / "log_probabilities.bin").read_bytes()
    case = build_case(root, tmp_path, "pp2")
    result = merge(workers(2).run(train_answers, case))
    (folder,) = find_teachers(tmp_path)
    assert folder == part.with_suffix("")
    after = (folder / "log_probabilities.bin").read_bytes()
    done = np.flatnonzero(np.frombuffer(before, np.float32))
    assert 0 < len(done) < len(after) // 4
    assert np.array_equal(np.frombuffer(after, np.float32)[done], np.frombuffer(before, np.float32)[done])
    oracle = train_oracle(case, load_model(case.model), load_model(root / "teacher"))
    check_equal(result, oracle)


@pytest.mark.full
def test_damage_is_found_and_scored_again(run, root: Path, tmp_path: Path) -> None:
    whole = run("whole", "pp1", "eval_file=null", "eval_on_start=false", "max_steps=2")
    (folder,) = find_teachers(tmp_path)
    logs = np.memmap(folder / "log_probabilities.bin", np.float32, "r+")
    logs[3] += 1.0
    logs.flush()
    again = run("again", "pp1", "eval_file=null", "eval_on_start=false", "max_steps=2")
    assert [record["distill_loss"] for record in again] == [record["distill_loss"] for record in whole]


def test_a_teacher_with_other_tokens_is_refused(root: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "same")
    Teacher().check_tokenizer(tmp_path / "same", tokenizer)
    other = save_tokenizer(tmp_path / "other")
    other.add_tokens(["<think>"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(
        UserError, match=r"its vocabulary of 321 tokens is not the run's of 320; they differ at '<think"
    ):
        Teacher().check_tokenizer(tmp_path / "other", tokenizer)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("task=dpo", "data=preference", "distill.teacher=a"),
            "distill.teacher=a: task=dpo does not read it, only pretrain, sft do; give distill.teacher=null",
        ),
        (("distill.teacher=a", "distill.top_k=null"), "distill.top_k=null: the whole vocabulary"),
    ],
)
def test_keys_that_nothing_reads_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_objective(build_config(*overrides))


@pytest.mark.full
def test_more_tokens_than_the_vocabulary_has_are_refused(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    case = build_case(root, tmp_path, "pp1", "distill.top_k=1000")
    with pytest.raises(WorkerError, match="distill.top_k=1000: the vocabulary has 320 tokens"):
        workers(1).run(train_run, case)


def score_on_a_failing_disk(case: Case) -> None:
    from support.cases import build_engine

    from data.storage import scores as storage
    from training.distributed import ranks

    def refuse(self: storage.ScoresWriter, rows: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    advance, seconds = storage.ScoresWriter.advance, ranks.SECONDS_FOR_ANOTHER_TO_REPORT
    storage.ScoresWriter.advance = refuse  # type: ignore[method-assign]
    ranks.SECONDS_FOR_ANOTHER_TO_REPORT = 1  # `workers` wait 5 for a rank once another has failed
    try:
        build_engine(case)
    finally:
        storage.ScoresWriter.advance = advance  # type: ignore[method-assign]
        ranks.SECONDS_FOR_ANOTHER_TO_REPORT = seconds


def test_where_the_main_rank_cannot_write_all_ranks_end(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError) as raised:
        workers(2).run(score_on_a_failing_disk, build_case(root, tmp_path, "pp2"))
    text = str(raised.value)
    assert "UserError: teacher of train_file: " in text and "No space left on device; make room" in text
    assert "SystemExit: 74" in text and "ended or hanging" not in text
