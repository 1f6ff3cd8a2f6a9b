"""Runs that stream their training data: the same rows at every layout, after a resume and after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import Case, train_run
from support.runs import export_of, read_metrics
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup

from data.collator import unshift_targets
from data.storage.tokenized import TokenizedDataset
from data.streaming.blocks import Cursor, Position
from training.checkpoint.state import read_state
from training.inputs.stream import StreamStart, resume_stream

LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "dp2": (1, 2), "tp2": (1, 2), "cp2": (1, 2), "pp2xdp2": (2, 4)}
KEYS = {"tp2": ("tensor_parallel_size=2",), "cp2": ("context_parallel_size=2",)}
STEPS, STOP, GLOBAL_BATCH = 9, 4, 4
Received = list[tuple[list[list[int]] | None, list[list[int]] | None]]  # input_ids and labels of each micro-batch


def test_a_stream_of_other_rows_continues_with_the_next_pass() -> None:
    """Its cursor is a row of a block of a shard, by the seed, the encoder and the packing of before."""
    cursor = Cursor(Position(pass_number=2, block=1, shard=1), row=5)
    start, saved, said = StreamStart((), Cursor()), {"shards": [], "cursor": cursor.to_json()}, list[str]()
    assert resume_stream(saved, start, 3, said.append) == StreamStart((), cursor, 3) and said == []
    other = resume_stream(saved, start, 3, said.append, is_alike=False)
    assert other == StreamStart((), Cursor(Position(pass_number=3)), 3)
    assert said == ["resume: the rows of train_file are others; pass 4 over them begins"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streaming")
    save_llama(root / "model", num_hidden_layers=2)
    save_tokenizer(root / "model")
    (root / "shards").mkdir()
    for number in range(3):
        save_records(root / "shards" / f"{number}.jsonl", 7 + number, seed=number)
    save_records(root / "eval.jsonl", 5, seed=9)
    return root


def train_and_listen(case: Case) -> tuple[int, Received]:
    """On a rank: a whole run; returns its data-parallel rank, and the batches that its engine took from its loader."""
    import torch.distributed as dist

    from data.loading.loader import StepLoader

    taken: Received = []
    iterate = StepLoader.iterate

    def listen(loader: StepLoader, start_step: int, end_step: int):
        for batch in iterate(loader, start_step, end_step):
            inputs, targets = batch.inputs, batch.targets
            taken.append((inputs and inputs.input_ids.tolist(), targets and unshift_targets(targets.ids).tolist()))
            yield batch

    StepLoader.iterate = listen
    try:
        train_run(case)
    finally:
        StepLoader.iterate = iterate
    config = case.config()
    per_replica = config.tensor_parallel_size * config.context_parallel_size
    return dist.get_rank() % (case.world_size // case.num_stages) // per_replica, taken


@pytest.fixture(scope="module")
def run(workers: Callable[[int], WorkerGroup], root: Path) -> Callable[..., Path]:
    """run(layout, *overrides): a whole run; returns its folder, with the rows that each replica read next to it."""

    def start(layout: str, *overrides: str, name: str = "", steps: int = STEPS) -> Path:
        num_stages, world_size = LAYOUTS[layout]
        out = root / (name or layout)
        given = (
            f"train_file={root}/shards/*.jsonl", "data.streaming=true", "data.shuffle_block=5",
            f"global_batch_size={GLOBAL_BATCH}", "micro_batch_size=1", f"output_dir={out}", "logging_steps=1",
            "optimizer=adamw", "learning_rate=1e-3", *KEYS.get(layout, ()),
        )  # fmt: skip
        case = Case(root / "model", root, root, num_stages, world_size, steps, (*given, *overrides))
        ranks = workers(world_size).run(train_and_listen, case)
        (out / "rows.json").write_text(json.dumps(ranks))
        return out

    return start


def list_rows(out: Path, half: int) -> list[list[int]]:
    """The rows of a run in order, inputs or labels, from the replicas that read them; micro-batches go round-robin to
    the replicas. Ranks of one replica must have read the same."""
    replicas: dict[int, list[list[int]]] = {}
    for dp_rank, taken in json.loads((out / "rows.json").read_text()):
        rows = [row for batch in taken if batch[half] is not None for row in batch[half]]
        assert not rows or replicas.setdefault(dp_rank, rows) == rows
    return [row for together in zip(*(replicas[rank] for rank in sorted(replicas)), strict=True) for row in together]


@pytest.fixture(scope="module")
def whole(run: Callable[..., Path], root: Path) -> Path:
    return run("pp1", f"eval_file={root}/eval.jsonl")


def read_losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


def test_only_the_evaluation_file_is_tokenized_beforehand(whole: Path, root: Path) -> None:
    (folder,) = (path for path in (root / "cache").iterdir() if path.is_dir())
    assert len(TokenizedDataset(folder, False, False)) == 5
    assert any("eval_loss" in line for line in read_metrics(whole))
    assert len(list_rows(whole, 0)) == STEPS * GLOBAL_BATCH


@pytest.mark.parametrize(
    "layout",
    ["pp2xdp2", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("pp2", "dp2", "tp2", "cp2"))],
)
def test_rows_and_losses_are_the_same_at_every_layout(run: Callable[..., Path], whole: Path, layout: str) -> None:
    out = run(layout, "num_workers=1")
    assert read_losses(out) == pytest.approx(read_losses(whole), rel=1e-5)
    if layout != "cp2":  # whose ranks hold parts of rows
        assert [list_rows(out, half) for half in (0, 1)] == [list_rows(whole, half) for half in (0, 1)]


@pytest.mark.parametrize(("before", "after"), [("pp2", "dp2"), pytest.param("dp2", "pp2xdp2", marks=pytest.mark.full)])
def test_a_run_resumes_at_another_layout_with_the_next_row(
    run: Callable[..., Path], whole: Path, before: str, after: str
) -> None:
    name = f"{before}-{after}"
    begun = run(before, f"stop_after_steps={STOP}", name=name)
    assert list_rows(begun, 0) == list_rows(whole, 0)[: STOP * GLOBAL_BATCH]
    cursor = read_state(begun / "checkpoints" / f"global_step{STOP}").stream["cursor"]
    assert cursor["position"]["block"] > 0, "a resume begins in the middle of a pass"
    resumed = run(after, "resume=latest", "num_workers=1", name=name)
    assert list_rows(resumed, 0) == list_rows(whole, 0)[STOP * GLOBAL_BATCH :]
    assert read_losses(resumed) == pytest.approx(read_losses(whole), rel=1e-5)


def test_a_step_over_a_whole_pass_is_that_of_a_run_that_does_not_stream(run: Callable[..., Path], root: Path) -> None:
    """Both have the same samples then, in whatever order: losses, gradient norms and weights are equal."""
    keys = (
        "global_batch_size=24",
        "micro_batch_size=4",
        "data.shuffle_block=100",
        "optimizer=sgd",
        "learning_rate=0.5",
    )
    streamed, cached = (
        run("pp1", *keys, f"data.streaming={value}", "data.packing=false", name=f"streaming-{value}", steps=3)
        for value in ("true", "false")
    )
    for one, other in zip(read_metrics(streamed), read_metrics(cached), strict=True):
        assert one["num_tokens"] == other["num_tokens"]
        assert [one[name] for name in ("loss", "grad_norm")] == pytest.approx(
            [other[name] for name in ("loss", "grad_norm")], rel=1e-5
        )
    weights = export_of(cached)
    for name, tensor in export_of(streamed).items():
        assert (tensor - weights[name]).abs().max() <= 1e-5 * weights[name].abs().max(), name


@pytest.mark.parametrize("data", ["pretrain", pytest.param("sft", marks=pytest.mark.full)])
def test_packed_rows_are_trained_on_at_two_layouts(run: Callable[..., Path], root: Path, data: str) -> None:
    keys = ("data.packing=true", f"data={data}", f"max_seq_length={64 if data == 'pretrain' else 128}")
    keys += ("data.text_field=prompt",) if data == "pretrain" else ()
    one, other = (run(layout, *keys, name=f"packed-{data}-{layout}", steps=4) for layout in ("pp1", "pp2"))
    assert list_rows(one, 0) == list_rows(other, 0)
    assert read_losses(one) == pytest.approx(read_losses(other), rel=1e-5)


def test_skipped_steps_are_read_and_not_trained_on(run: Callable[..., Path], whole: Path) -> None:
    out = run("pp1", "skip_data_intervals=[[3,5]]", name="skipped")
    rows = list_rows(whole, 0)
    assert list_rows(out, 0) == rows[: 2 * GLOBAL_BATCH] + rows[5 * GLOBAL_BATCH :]


def test_a_resume_on_other_shards_names_them(run: Callable[..., Path], root: Path, tmp_path: Path) -> None:
    run("pp1", name="changed", steps=2)
    shards = tmp_path / "shards"
    shutil.copytree(root / "shards", shards)
    files = f"train_file={shards}/*.jsonl"
    run("pp1", files, "resume=latest", name="changed", steps=3)  # they may move
    with open(shards / "1.jsonl", "a") as file:
        file.write((root / "eval.jsonl").read_text())
    message = r"the shards of train_file was 3 shards, among them 1.jsonl of [\d,]+ bytes, hash \w+, is 3 shards, among"
    with pytest.raises(WorkerError, match=message):
        run("pp1", files, "resume=latest", name="changed", steps=4)
    with pytest.raises(WorkerError, match=r"data.shuffle_block was 5, is 6"):
        run("pp1", "data.shuffle_block=6", "resume=latest", name="changed", steps=4)
    run("pp1", files, "resume=latest", "resume_allow_changes=true", name="changed", steps=4)
    state = read_state(root / "changed" / "checkpoints" / "global_step4")
    assert state.stream["cursor"]["position"]["pass_number"] == 1, "they are read from their beginning"


def test_a_bad_record_ends_the_run_or_is_skipped(run: Callable[..., Path], root: Path, tmp_path: Path) -> None:
    lines = (root / "eval.jsonl").read_text().splitlines()
    lines.insert(3, "{")
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(WorkerError, match=r"UserError: .*bad.jsonl:4: not valid JSON"):
        run("pp1", f"train_file={file}", name="bad")
    assert len(read_losses(run("pp1", f"train_file={file}", "data.on_bad_record=skip", name="skips"))) == STEPS
