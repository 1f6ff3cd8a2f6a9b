"""Loaders: the data and shapes that a rank reads, and that the parts of a step add up to its global batch."""

import _multiprocessing
import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.corpora import write_corpus

from data.collator import Checked, PadRight, unshift_targets
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.loading.loader import (
    Batch,
    EvalLoader,
    LoaderOptions,
    PlaceholderLoader,
    TrainLoader,
    build_eval_loader,
    build_train_loader,
)
from data.loading.row_lengths import measure_rows
from data.loading.step_totals import BatchShape, compute_step_totals
from data.options import MeanOver, Packing, PadTo
from data.order import GlobalOrder
from data.storage import sample_names
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenized import TokenizedDataset
from data.storage.tokenizing import prepare_dataset
from data.worker_processes import iterate_dataset
from errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAD = 2
NUM_SAMPLES = 21
ORDER = GlobalOrder(num_samples=NUM_SAMPLES, global_batch_size=8, seed=1)
OPTIONS = LoaderOptions(
    reads_inputs=True,
    reads_labels=True,
    dp_rank=0,
    dp_size=1,
    micro_batch_size=2,
    row_plan=RowPlan(60),
    pad_token_id=PAD,
)
# dp_size, micro_batch_size, gradient_accumulation_steps of the same global batch
LAYOUTS = [(1, 2, 4), (1, 8, 1), (2, 2, 2), (4, 2, 1), (2, 1, 4)]


@pytest.fixture(scope="module")
def path(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that all differ, with lengths and numbers of targets that differ much."""
    assert tokenizer.pad_token_id == PAD
    folder = tmp_path_factory.mktemp("loader")
    records = [
        {"prompt": f"{n}" + " legs" * (4 * (n % 7)), "completion": "Paris " * (1 + n % 4)} for n in range(NUM_SAMPLES)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return prepare_dataset(
        [str(folder / "a.jsonl")],
        key="train_file",
        encoding=Encoding(SFTEncoder(), tokenizer, max_seq_length=60),
        cache_dir=folder / "cache",
    )


@pytest.fixture(scope="module")
def data(path: Path) -> TokenizedDataset:
    return TokenizedDataset(path, True, True)


def build_layout(path: Path, dp_size: int, micro_batch_size: int, accumulation: int, **changes) -> list[TrainLoader]:
    options = replace(OPTIONS, dp_size=dp_size, micro_batch_size=micro_batch_size, **changes)
    return [build_train_loader(path, replace(options, dp_rank=rank), ORDER, accumulation) for rank in range(dp_size)]


def find_samples(batch: Batch, data: TokenizedDataset) -> list[int]:
    """The samples in a batch, by content; rows that are all padding are omitted. Checks the padding and the labels."""
    input_ids, position_ids, segment_ids = batch.inputs.activations
    targets = batch.targets.ids
    labels = unshift_targets(targets)
    assert (targets[:, -1] == -100).all()
    ids = {tuple(data.input_ids(i).tolist()): i for i in range(len(data))}
    found = []
    assert segment_ids.dtype == torch.int32
    for row, positions, segments, row_labels in zip(
        input_ids.tolist(), position_ids.tolist(), segment_ids.tolist(), labels.tolist(), strict=True
    ):
        assert positions == list(range(len(row)))
        matches = [i for tokens, i in ids.items() if row == list(tokens) + [PAD] * (len(row) - len(tokens))]
        if not matches:
            assert set(row) == {PAD} and set(row_labels) == {-100} and set(segments) == {0}
            continue
        expected = data.labels(matches[0]).tolist()
        padding = len(row) - len(expected)
        assert row_labels == expected + [-100] * padding and segments == [1] * len(expected) + [0] * padding
        found += matches
    return found


def assert_equal_batches(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right):
        assert all(torch.equal(a, b) for a, b in zip(list_tensors(one), list_tensors(other), strict=True))


def list_tensors(batch: Batch) -> list[torch.Tensor]:
    """The tensors of the halves that a rank has, in their order."""
    inputs = batch.inputs.activations if batch.inputs else ()
    targets = batch.targets
    return [*inputs, *((targets.ids, targets.indices, targets.denominator) if targets else ())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_global_batch_of_the_order(path: Path, data: TokenizedDataset, layout) -> None:
    ranks = [list(loader.iterate(0, 3)) for loader in build_layout(path, *layout)]
    accumulation = layout[2]
    for step in range(3):
        batches = [batch for rank in ranks for batch in rank[step * accumulation : (step + 1) * accumulation]]
        found = [i for batch in batches for i in find_samples(batch, data)]
        assert sorted(found) == sorted(ORDER.sample_ids(step).tolist())
        longest = max(data.lengths[found])
        assert {batch.inputs.input_ids.shape for batch in batches} == {(layout[1], -(-longest // 8) * 8)}


@pytest.mark.parametrize("packing", [Packing.NONE, Packing.BEST_FIT])
def test_the_samples_of_a_step_are_named_by_file_and_line(
    tokenizer, tmp_path: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed row is the samples that share it; an empty line is no sample, but counts as a line."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        records = [json.dumps({"prompt": f"{file.name} {n}", "completion": "Paris"}) for n in range(8)]
        file.write_text("\n" + "\n".join(records) + "\n")
    encoding = Encoding(SFTEncoder(), tokenizer, max_seq_length=60)
    path = prepare_dataset(list(map(str, files)), key="train_file", encoding=encoding, cache_dir=tmp_path / "cache")
    plan = RowPlan(60, packing)
    prepare_rows(path, plan, "train_file", log=None)
    rows = Rows(path, plan, False, False)
    order = GlobalOrder(num_samples=len(rows), global_batch_size=2, seed=1)
    loader = build_train_loader(path, replace(OPTIONS, row_plan=plan), order, 1)
    samples = sorted(sample for row in order.sample_ids(1) for sample, _, _ in rows.pieces(row))
    assert len(samples) == 2 if packing is Packing.NONE else len(samples) > 4
    lines = {file: [sample % 8 + 2 for sample in samples if sample // 8 == n] for n, file in enumerate(files)}
    named = "; ".join(f"{file}, lines or records {', '.join(map(str, each))}" for file, each in lines.items() if each)
    assert loader.name_samples(1) == f"samples of train_file: {named}"
    monkeypatch.setattr(sample_names, "_MOST_SAMPLES", 1)
    first = f"{files[samples[0] // 8]}, lines or records {samples[0] % 8 + 2}"
    assert loader.name_samples(1) == f"samples of train_file: {first}; {len(samples) - 1} more samples"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mean_of_the_parts_is_the_loss_of_the_global_batch(path: Path, data: TokenizedDataset, layout) -> None:
    token_losses = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def sum_losses(targets: torch.Tensor) -> torch.Tensor:
        return token_losses[targets[targets != -100]].sum()

    parts = []
    for loader in build_layout(path, *layout):
        for targets in (batch.targets for batch in loader.iterate(1, 2)):
            assert targets.denominator.dtype == torch.float64 and targets.denominator.shape == ()
            assert torch.equal(targets.ids.flatten()[targets.indices], targets.ids[targets.ids != -100])
            parts.append(sum_losses(targets.ids) / targets.denominator)
    whole = [torch.from_numpy(data.labels(i)[1:].astype(np.int64)) for i in ORDER.sample_ids(1)]
    expected = sum(sum_losses(targets) for targets in whole) / sum(int((targets != -100).sum()) for targets in whole)
    torch.testing.assert_close(torch.stack(parts).mean(), expected, rtol=1e-12, atol=0)


def test_a_global_batch_without_a_target_has_a_loss_of_zero(tokenizer, tmp_path: Path) -> None:
    """A document of one token, alone in a row: 0 / 0 would make all weights NaN."""
    corpus, plan = write_corpus(tmp_path / "corpus", [[[5, 6, 7, 8]], [[9]]]), RowPlan(4, Packing.CONCATENATE)
    encoding = Encoding(PretrainEncoder(), tokenizer, max_seq_length=None)
    path = prepare_dataset([corpus], key="train_file", encoding=encoding, cache_dir=tmp_path / "cache", log=None)
    prepare_rows(path, plan, "train_file", None)
    options = replace(OPTIONS, row_plan=plan, micro_batch_size=1)
    batches = build_train_loader(path, options, GlobalOrder(2, 1, seed=1), 1).iterate(0, 2)
    halves = [batch.targets for batch in batches]
    found = sorted(((targets.ids != -100).sum().item(), targets.denominator.item()) for targets in halves)
    assert found == [(0, 1.0), (3, 3.0)]


def test_step_totals_are_those_of_the_global_batch(path: Path, data: TokenizedDataset) -> None:
    ids = ORDER.sample_ids(2)
    for loader in build_layout(path, 2, 2, 2):
        totals = loader.step_totals(2)
        assert totals.num_tokens == sum(len(data.input_ids(i)) for i in ids)
        num_targets = sum(int((data.labels(i)[1:] != -100).sum()) for i in ids)
        assert totals.num_targets == totals.count_terms(MeanOver.targets) == num_targets
        assert totals.num_documents == totals.num_samples == len(ids) == 8
        shape = BatchShape(rows=2, seq_length=totals.longest_document)
        assert totals == compute_step_totals(Rows(path, OPTIONS.row_plan, False, False), ids, 1, shape)
        assert totals.most_documents == 2  # nothing is packed
    (loader,) = build_layout(path, 1, 2, 4, collator=Checked(PadRight(), "data.collator my.Own"))
    assert loader.step_totals(2).most_documents == 0  # the collator sets positions


def test_a_run_from_the_middle_is_the_tail_of_a_run_from_the_start(path: Path) -> None:
    (loader,) = build_layout(path, 1, 2, 4)
    assert_equal_batches(list(loader.iterate(3, 6)), list(loader.iterate(0, 6))[3 * 4 :])


def test_workers_give_the_same_batches(path: Path) -> None:
    inline = build_layout(path, 2, 2, 2)[1]
    workers = build_layout(path, 2, 2, 2, num_workers=2)[1]
    assert_equal_batches(list(workers.iterate(1, 5)), list(inline.iterate(1, 5)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_random_state_alone(path: Path, num_workers: int) -> None:
    (loader,) = build_layout(path, 1, 8, 1, num_workers=num_workers)
    before = torch.get_rng_state()
    next(loader.iterate(0, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_reads_its_half(path: Path) -> None:
    (whole,) = build_layout(path, 1, 8, 1)
    (first,) = build_layout(path, 1, 8, 1, reads_labels=False)
    (last,) = build_layout(path, 1, 8, 1, reads_inputs=False)
    both, one, other = (next(loader.iterate(0, 1)) for loader in (whole, first, last))
    assert one.targets is None and other.inputs is None
    halves = [*list_tensors(one), *list_tensors(other)]
    assert all(torch.equal(a, b) for a, b in zip(halves, list_tensors(both), strict=True))
    assert [tensor.dtype for tensor in halves[:4]] == [*[torch.int64] * 2, torch.int32, torch.int64]


def test_padding_to_a_fixed_length_and_to_a_cap(path: Path) -> None:
    (fixed,) = build_layout(path, 1, 8, 1, pad_to="max_seq_length")
    assert next(fixed.iterate(0, 1)).inputs.input_ids.shape == (8, 60)
    for lengths, seq_length in (([8, 3], 8), ([3, 9], 16), ([57], 60)):
        assert OPTIONS.compute_seq_length(np.array(lengths)) == seq_length
    with pytest.raises(ValueError, match="longst"):
        build_layout(path, 1, 8, 1, pad_to="longst")[0].iterate(0, 1).__next__()


@pytest.mark.parametrize(
    ("dp_size", "micro_batch_size", "num_workers"), [(1, 4, 0), (2, 4, 0), (2, 4, 2), (4, 3, 0), (1, 64, 0), (4, 16, 0)]
)
def test_evaluation_takes_every_sample_exactly_once(path, data, dp_size, micro_batch_size, num_workers) -> None:
    options = replace(OPTIONS, dp_size=dp_size, micro_batch_size=micro_batch_size, num_workers=num_workers)
    loaders = [build_eval_loader(path, replace(options, dp_rank=rank), NUM_SAMPLES) for rank in range(dp_size)]
    ranks = [list(loader.iterate()) for loader in loaders]
    count = -(-NUM_SAMPLES // (dp_size * micro_batch_size))
    assert {len(batches) for batches in ranks} == {count} == {loader.num_micro_batches for loader in loaders}
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(i for batch in batches for i in find_samples(batch, data)) == list(range(NUM_SAMPLES))
    assert {batch.inputs.input_ids.shape for batch in batches} == {
        (micro_batch_size, -(-int(data.lengths.max()) // 8) * 8)
    }
    assert {batch.targets.denominator.item() for batch in batches} == {1.0}
    targets = sum(int((batch.targets.ids != -100).sum()) for batch in batches)
    assert {loader.num_targets for loader in loaders} == {targets}


def test_a_rank_between_holds_a_length_and_no_data(tmp_path: Path) -> None:
    options = replace(OPTIONS, reads_inputs=False, reads_labels=False, dp_size=2)
    train = build_train_loader(tmp_path / "not there", options, ORDER, 2)
    evaluation = build_eval_loader(tmp_path / "not there", options, NUM_SAMPLES)
    assert isinstance(train, PlaceholderLoader) and len(train) == ORDER.steps_per_epoch == 2
    assert isinstance(evaluation, PlaceholderLoader) and len(evaluation) == 6
    reads = (iter, next, lambda loader: loader[0], lambda loader: loader.step_totals(0))
    for read in reads:
        with pytest.raises(RuntimeError, match="neither the first layer nor the loss"):
            read(train)
    for iterator in (train.iterate(0, 2), evaluation.iterate()):
        with pytest.raises(RuntimeError, match="nothing may read a batch here"):
            next(iterator)


def test_lengths_are_the_same_on_every_rank(path: Path) -> None:
    between = replace(OPTIONS, reads_inputs=False, reads_labels=False)
    assert len(build_train_loader(path, OPTIONS, ORDER, 4)) == len(build_train_loader(path, between, ORDER, 4))
    assert len(EvalLoader(path, OPTIONS, NUM_SAMPLES)) == len(build_eval_loader(path, between, NUM_SAMPLES))


def test_ranks_that_disagree_are_stopped(path: Path) -> None:
    with pytest.raises(RuntimeError, match="holds 21 samples, but the ranks agreed on 20"):
        build_train_loader(path, OPTIONS, replace(ORDER, num_samples=20), 4)
    with pytest.raises(RuntimeError, match="longer than max_seq_length=20"):
        build_eval_loader(path, replace(OPTIONS, row_plan=RowPlan(20)), NUM_SAMPLES)
    with pytest.raises(ValueError, match="the ranks read 6 samples a step, the order has 8"):
        build_train_loader(path, OPTIONS, ORDER, 3)


@pytest.mark.parametrize("pad_to", PadTo)
def test_the_lengths_of_rows_are_those_of_the_batches(path: Path, data: TokenizedDataset, pad_to: PadTo) -> None:
    steps = range(1, 6)  # of 2 an epoch
    loader = build_train_loader(path, replace(OPTIONS, pad_to=pad_to), ORDER, 4)
    batches = [batch.inputs.input_ids for batch in loader.iterate(steps.start, steps.stop)]
    measured = measure_rows(path, OPTIONS.row_plan, ORDER, steps, pad_to)
    widths = [input_ids.shape[1] for input_ids in batches]
    assert measured.padded == round(np.mean(widths)) and measured.longest >= max(widths)
    assert measured.filled == pytest.approx(np.mean([(ids != PAD).sum(1).float().mean() for ids in batches]))
    assert measured.longest == (60 if pad_to is PadTo.max_seq_length else min(60, -(-data.lengths.max() // 8) * 8))


READING = """
import multiprocessing, operator, sys
sys.path.insert(0, {root!r})
from types import SimpleNamespace
from data.loading.loader import _iterate
batches = _iterate(operator.index, range(1000), SimpleNamespace(num_workers=2, pin_memory=False))
next(batches)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
input()
assert [next(batches) for _ in range(100)] == list(range(1, 101))
print("read", flush=True)
input()
raise ValueError
"""


@pytest.mark.parametrize("end", ["error", pytest.param("kill", marks=pytest.mark.full)])
def test_workers_outlive_a_signal_but_not_their_rank(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", READING.format(root=str(ROOT))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        try:
            for worker in workers:
                worker.send_signal(signal.SIGINT)
                worker.send_signal(signal.SIGTERM)
            print(file=rank.stdin, flush=True)
            assert rank.stdout.readline() == "read\n"
            if end == "kill":
                rank.kill()
            else:
                print(file=rank.stdin, flush=True)
            assert rank.wait(30) == (-signal.SIGKILL if end == "kill" else 1)
            assert not psutil.wait_procs(workers, timeout=30)[1]
        finally:
            rank.kill()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()


AMONG_THREADS = """
import ctypes, operator, sys, threading
sys.path.insert(0, {root!r})
from types import SimpleNamespace
from data.loading.loader import _iterate

library, do_nothing = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def start_threads():
    thread = ctypes.c_ulong()
    while True:
        library.pthread_create(ctypes.byref(thread), None, do_nothing, None)
        library.pthread_join(thread, None)

for _ in range(4):
    threading.Thread(target=start_threads, daemon=True).start()
for _ in range(20):
    assert list(_iterate(operator.index, range(3), SimpleNamespace(num_workers=1, pin_memory=False))) == [0, 1, 2]
"""


def test_workers_start_while_threads_of_libraries_enter_python() -> None:
    """As threads of torch do that release a tensor. A worker that is forked meanwhile inherits a lock that nobody
    releases."""
    subprocess.run([sys.executable, "-c", AMONG_THREADS.format(root=str(ROOT))], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's iterator without queues
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_queues_that_shared_memory_refuses_are_explained(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose /dev/shm this user cannot write to, or that is full."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))  # as `sem_open` does, without a file's name

    monkeypatch.setattr(_multiprocessing, "SemLock", refuse)
    with pytest.raises(UserError, match=rf"^num_workers=1: {os.strerror(number)}.*/dev/shm.*or set num_workers=0$"):
        iterate_dataset(range(2), num_workers=1)
