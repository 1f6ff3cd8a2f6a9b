"""The samples of each global batch, read from the batches that real ranks receive: the same for every layout, and after
a resume with another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import Case, train_run
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerGroup

from data.collator import unshift_targets
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from models.storage.manifest import STATE_NAME
from training.checkpoint.state import TrainerState
from training.distributed.ranks import Ranks
from training.inputs import datasets as preparation
from training.inputs.datasets import load_tokenizer, tokenize
from training.inputs.step_budget import compute_step_budget
from training.setup import check_run

LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "dp2": (1, 2), "pp2xdp2": (2, 4)}  # stages, ranks
NUM_SAMPLES, GLOBAL_BATCH, STEPS, STOP = (
    22,
    4,
    8,
    3,
)  # five steps per epoch; the run stops in the middle of the first, and ends in the second
Received = list[tuple[list[list[int]] | None, list[list[int]] | None]]  # input_ids and labels of each micro-batch


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("order")
    save_llama(root / "model", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    save_tokenizer(root / "model")
    records = [
        {"prompt": f"{number} legs?" * (1 + number % 3), "completion": f"{number} or more."}
        for number in range(NUM_SAMPLES)
    ]
    for name, half in (("a", records[:12]), ("b", records[12:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in half))
    return root


def train_and_listen(case: Case) -> tuple[int, Received]:
    """On a rank: a whole run; returns its data-parallel rank, and the batches that its engine took from its loader."""
    import torch.distributed as dist

    from data.loading.loader import TrainLoader

    taken: Received = []
    iterate = TrainLoader.iterate

    def listen(loader: TrainLoader, start_step: int, end_step: int):
        for batch in iterate(loader, start_step, end_step):
            inputs, targets = batch.inputs, batch.targets
            taken.append((inputs and inputs.input_ids.tolist(), targets and unshift_targets(targets.ids).tolist()))
            yield batch

    TrainLoader.iterate = listen
    try:
        train_run(case)
    finally:
        TrainLoader.iterate = iterate
    return dist.get_rank() % (case.world_size // case.num_stages), taken


@pytest.fixture(scope="module")
def run(workers: Callable[[int], WorkerGroup], root: Path) -> Callable[..., list[str]]:
    """run(layout, *overrides): a hash of the sample ids of each global batch of the run, in order."""

    def start(layout: str, *overrides: str) -> list[str]:
        num_stages, world_size = LAYOUTS[layout]
        given = (
            f"train_file=[{root}/a.jsonl,{root}/b.jsonl]",
            f"global_batch_size={GLOBAL_BATCH}",
            "micro_batch_size=1",
            f"output_dir={root}/{layout}",
        )
        case = Case(root / "model", root / "a.jsonl", root, num_stages, world_size, STEPS, (*given, *overrides))
        return hash_global_batches(root, workers(world_size).run(train_and_listen, case), world_size // num_stages)

    return start


def hash_global_batches(root: Path, ranks: list[tuple[int, Received]], dp_size: int) -> list[str]:
    """Samples are identified by their tokens. Micro-batches go round-robin to the replicas; inputs and labels must be
    of the same samples."""
    data = TokenizedDataset(next(path for path in (root / "cache").iterdir() if path.is_dir()), True, True)
    ids_of = ({tuple(read(i).tolist()): i for i in range(len(data))} for read in (data.input_ids, data.labels))
    inputs, labels = (find_ids(half, known, ranks, dp_size) for half, known in enumerate(ids_of))
    assert inputs == labels and len(inputs) % GLOBAL_BATCH == 0
    steps = [inputs[start : start + GLOBAL_BATCH] for start in range(0, len(inputs), GLOBAL_BATCH)]
    return [hashlib.sha256(repr(ids).encode()).hexdigest() for ids in steps]


def find_ids(
    half: int, known: dict[tuple[int, ...], int], ranks: list[tuple[int, Received]], dp_size: int
) -> list[int]:
    """Return the ids of the samples in the order of the run, from the ranks that read inputs (half 0) or labels (1)."""
    streams: dict[int, list[int]] = {}
    for dp_rank, taken in ranks:
        rows = [row for batch in taken if batch[half] is not None for row in batch[half]]
        if rows:
            streams[dp_rank] = [
                next(i for tokens, i in known.items() if tuple(row[: len(tokens)]) == tokens) for row in rows
            ]
    return [i for together in zip(*(streams[rank] for rank in range(dp_size)), strict=True) for i in together]


@pytest.fixture(scope="module")
def whole(run: Callable[..., list[str]]) -> list[str]:
    return run("pp1")


@pytest.mark.parametrize(
    "layout", ["pp2xdp2", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("pp2", "dp2"))]
)
def test_global_batches_are_the_same_at_every_layout(
    run: Callable[..., list[str]], whole: list[str], layout: str
) -> None:
    assert len(whole) == len(set(whole)) == STEPS
    assert run(layout) == whole


@pytest.mark.full
def test_and_after_a_resume_in_the_middle_of_an_epoch_at_another_layout(
    run: Callable[..., list[str]], whole: list[str], root: Path
) -> None:
    assert (
        run("pp2", "overwrite_output_dir=true", f"stop_after_steps={STOP}", f"output_dir={root}/begun") == whole[:STOP]
    )
    for layout in ("dp2", "pp2xdp2"):
        resumed = run(layout, f"resume={root}/begun/checkpoints", f"output_dir={root}/resumed-{layout}")
        assert resumed == whole[STOP:], layout


def test_a_resume_on_other_data_names_what_changed(
    whole: list[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of weights, of a file, of the way the order is drawn; not of a file's path. `resume_allow_changes`
    permits them."""
    step_dir = root / "pp1" / "checkpoints" / f"global_step{STEPS}"

    def resume(*overrides: str) -> int:
        given = (
            f"resume={step_dir}",
            f"output_dir={root}/other",
            f"global_batch_size={GLOBAL_BATCH}",
            "micro_batch_size=1",
            *overrides,
        )
        config = Case(root / "model", root / "a.jsonl", root, steps=STEPS + 1, overrides=given).config()
        setup = check_run(config, Ranks(0, 1, 0, 1))
        datasets = tokenize(config, load_tokenizer(config, setup.source))
        rows = setup.architecture.vocab_size
        return compute_step_budget(config, setup.layout, datasets, setup.resume_from, rows)[1].step

    other = root / "other.jsonl"
    other.write_text((root / "b.jsonl").read_text().replace("or more", "or less"))
    first, second = f"path: {root}/a.jsonl", f"path: {root}/b.jsonl"
    changes = {
        f"[{{{first}, weight: 3}}, {{{second}, weight: 1}}]": "mixture was none, is weight 3, 1 by samples",
        f"[{{{first}, epochs: 2}}, {{{second}, epochs: 1}}]": "mixture was none, is epochs 2, 1 by samples",
        f"[{root}/a.jsonl,{other}]": "differs from the one that saved .*: the hash of the tokens of train_file entry 2 "
        r"was [0-9a-f]+, is [0-9a-f]+\. Give",
    }
    for files, message in changes.items():
        with pytest.raises(UserError, match=f"{message}.*resume_allow_changes=true"):
            resume(f"train_file={files}")
        assert resume(f"train_file={files}", "resume_allow_changes=true") == STEPS
    other.write_text((root / "b.jsonl").read_text())
    same = f"train_file=[{root}/a.jsonl,{other}]"
    assert resume(same) == STEPS
    monkeypatch.setattr(preparation, "ORDER_VERSION", 3)
    with pytest.raises(UserError, match="the way the order of samples is drawn was 2, is 3. Give"):
        resume(same)


def test_a_resume_notices_that_samples_are_laid_into_other_rows(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1.1 did not name the way. Where each sample is a row, all ways are one."""

    def start(packs: bool, saved: Path | None = None) -> TrainerState:
        given = (f"data.packing={packs}", "max_seq_length=64", "global_batch_size=2", "micro_batch_size=1")
        config = Case(root / "model", root / "a.jsonl", tmp_path, overrides=given).config()
        setup = check_run(config, Ranks(0, 1, 0, 1))
        datasets = tokenize(config, load_tokenizer(config, setup.source))
        return compute_step_budget(config, setup.layout, datasets, saved, setup.architecture.vocab_size)[1]

    def save(name: str, packs: bool, *removed: str) -> Path:
        state = dataclasses.asdict(start(packs))
        step_dir = tmp_path / name / "global_step0"
        step_dir.mkdir(parents=True)
        kept = {key: value for key, value in state["data"].items() if key not in removed}
        (step_dir / STATE_NAME).write_text(json.dumps(state | {"data": kept}))
        return step_dir

    packed, older, unpacked = save("a", True), save("b", True, preparation.LAYING), save("c", False)
    assert start(True, packed).step == start(True, older).step == 0
    monkeypatch.setattr(preparation, "INDEX_VERSION", 3)
    for saved in (packed, older):
        with pytest.raises(UserError, match=f"{saved}: the way samples are laid into rows was 2, is 3. Give"):
            start(True, saved)
    assert start(False, unpacked).step == 0
