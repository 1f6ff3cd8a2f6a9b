"""Packed rows on disk: every sample once, documents kept apart, and an index that is whole or rebuilt."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.collator import unshift_targets
from data.encoders.sft import SFTEncoder
from data.loading.loader import LoaderOptions, build_eval_loader, build_train_loader
from data.loading.step_totals import bound_documents
from data.options import Packing
from data.order import GlobalOrder
from data.sources.mixture import Mixture, ShareKind
from data.storage.disk import RowEstimate, estimate_rows
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, compute_fill, count_rows, prepare_rows
from data.storage.tokenized import TokenizedDataset
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from extensions.preferences.mismatched import MISMATCHED

LENGTH = 48
PLAN = RowPlan(LENGTH, Packing.BEST_FIT)
NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def end_is_pad(build_tokenizer):
    return build_tokenizer(pad_token="</s>")


@pytest.fixture(scope="module")
def path(end_is_pad, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that all differ; with an empty prompt a sample starts with the completion."""
    folder = tmp_path_factory.mktemp("rows")
    records = [
        {"prompt": "What legs" * (n % 4), "completion": f"{n} " + "Paris " * (n % 6)} for n in range(NUM_SAMPLES)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(SFTEncoder(prompt_template="{prompt}"), end_is_pad, LENGTH)
    path = prepare_dataset([str(folder / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=folder / "cache")
    prepare_rows(path, PLAN, "train_file")
    return path


def test_rows_hold_every_sample_once_and_say_where_it_begins(path: Path) -> None:
    rows, data = Rows(path, PLAN, True, True), TokenizedDataset(path, True, True)
    assert len(rows) == count_rows(path, PLAN) < NUM_SAMPLES / 2
    seen = []
    for row in range(len(rows)):
        input_ids, positions, labels = rows.input_ids(row), rows.position_ids(row), rows.labels(row)
        assert len(input_ids) == len(positions) == len(labels) == rows.lengths[row] <= LENGTH
        starts = np.flatnonzero(positions == 0)
        assert [i for i, _, _ in rows.pieces(row)] and len(starts) == len(rows.pieces(row))
        assert (labels[starts] == -100).all()
        for (sample, *_), start, stop in zip(rows.pieces(row), starts, [*starts[1:], len(positions)]):
            assert positions[start:stop].tolist() == list(range(stop - start))
            assert input_ids[start:stop].tolist() == data.input_ids(sample).tolist()
            assert labels[start + 1 : stop].tolist() == data.labels(sample)[1:].tolist()
            seen.append(sample)
        assert rows.num_targets[row] == (labels[1:] != -100).sum()
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert rows.num_targets.sum() == data.num_targets.sum() and rows.lengths.sum() == data.lengths.sum()


def test_which_tokens_of_a_packed_batch_carry_loss(path: Path, end_is_pad) -> None:
    """Token by token: completions with their end tokens, which are pad tokens too; no prompt, no padding, no first
    token.
    """
    order = GlobalOrder(count_rows(path, PLAN), 2, seed=0)
    options = LoaderOptions(True, True, 0, 1, micro_batch_size=2, row_plan=PLAN, pad_token_id=end_is_pad.pad_token_id)
    batch = next(build_train_loader(path, options, order, 1).iterate(0, 1))
    labels, inputs = unshift_targets(batch.targets.ids), batch.inputs.activations
    (shape,) = {tensor.shape for tensor in (*inputs, labels)}
    assert shape[0] == 2 and shape[1] % 8 == 0
    rows = Rows(path, PLAN, True, True)
    for ids, positions, segments, row_labels, row in zip(*inputs, labels, order.sample_ids(0)):
        length = rows.lengths[row]
        # Padding continues the last document's positions: it is not a document of its own, and needs no
        # mask without packing.
        assert positions[length:].tolist() == [positions[length - 1] + 1 + i for i in range(len(ids) - length)]
        assert (row_labels[length:] == -100).all() and (ids[length:] == end_is_pad.pad_token_id).all()
        starts = np.flatnonzero(positions[:length] == 0).tolist()
        assert segments[:length].tolist() == (positions[:length] == 0).cumsum(0).tolist() and len(starts) > 1
        assert not segments[length:].any()
        for start, stop in zip(starts, [*starts[1:], length]):
            text = end_is_pad.decode(ids[start:stop])
            prompt = "What legs" * text.count("What legs")
            trained = end_is_pad.decode([label for label in row_labels[start:stop].tolist() if label != -100])
            completion = text.removeprefix(prompt)
            assert completion.endswith("</s>") and completion.count("</s>") == 1
            first = (
                "" if prompt else end_is_pad.decode(ids[start : start + 1])
            )  # nothing predicts a document's first token
            assert trained == completion.removeprefix(first)


@pytest.mark.parametrize("layout", [(1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_every_layout_packs_the_same_global_batches(path: Path, layout: tuple[int, int, int]) -> None:
    dp_size, micro_batch_size, accumulation = layout
    order = GlobalOrder(count_rows(path, PLAN), 4, seed=5)
    rows = Rows(path, PLAN, True, True)
    read, documents, longest = [], [], []
    for rank in range(dp_size):
        options = LoaderOptions(
            True, True, rank, dp_size, micro_batch_size=micro_batch_size, row_plan=PLAN, pad_token_id=0
        )
        for batch in build_train_loader(path, options, order, accumulation).iterate(1, 2):
            read += [tuple(row[row != 0].tolist()) for row in batch.inputs.input_ids]
            starts = np.flatnonzero(batch.inputs.position_ids.flatten() == 0)
            documents.append(len(starts))
            longest.append(np.diff([*starts, batch.inputs.position_ids.numel()]).max())
            totals = build_train_loader(path, options, order, accumulation).step_totals(1)
            assert batch.targets.denominator == totals.num_targets / (dp_size * accumulation)
    ids = order.sample_ids(1)
    assert sorted(read) == sorted(tuple(rows.input_ids(i).tolist()) for i in ids)
    assert totals.num_tokens == rows.lengths[ids].sum() and totals.num_targets == rows.num_targets[ids].sum()
    assert totals.num_samples == totals.num_documents == sum(len(rows.pieces(i)) for i in ids) > len(ids)
    assert max(documents) <= totals.most_documents <= sum(documents) and totals.longest_document == max(longest)


def test_no_choice_of_rows_holds_more_documents_than_their_bound() -> None:
    counts = np.array([1, 5, 2, 3, 1])
    assert [bound_documents(counts, num_rows) for num_rows in (1, 2, 5)] == [5, 8, 12]
    assert bound_documents(counts, 7) == 14  # two rows of padding
    assert bound_documents(np.ones(9, np.int64), 4) == 4


def test_evaluation_takes_every_packed_sample_once(path: Path) -> None:
    count = count_rows(path, PLAN)
    options = LoaderOptions(True, True, 0, 1, micro_batch_size=4, row_plan=PLAN, pad_token_id=0)
    loader = build_eval_loader(path, options, count)
    targets = sum(int((batch.targets.ids != -100).sum()) for batch in loader.iterate())
    assert targets == loader.num_targets == TokenizedDataset(path, False, False).num_targets.sum()


def test_an_index_is_found_again_and_a_damaged_one_is_rebuilt(path: Path) -> None:
    folder = PLAN.folder(path)
    before = folder.stat().st_ino
    lines: list[str] = []
    prepare_rows(path, PLAN, "train_file", lines.append)
    rows = Rows(path, PLAN, False, False)
    fill = compute_fill(rows, PLAN)
    assert folder.stat().st_ino == before
    assert lines == [f"train_file: packed into {len(rows)} rows of 48 tokens, {fill:.1%} full"] and 0.8 < fill <= 1
    (folder / "stop.bin").write_bytes((folder / "stop.bin").read_bytes()[:-8])
    prepare_rows(path, PLAN, "train_file", lines.append)
    assert len(Rows(path, PLAN, False, False)) == len(rows) and lines[-1] == lines[0]


@pytest.mark.parametrize("packing", Packing)
def test_windows_of_samples_make_one_index(path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing) -> None:
    """However few samples are laid into rows at a time, all of them are there, once."""
    mixture = Mixture((1,), ShareKind.EPOCHS)  # a plan that no other test uses
    plan = RowPlan(LENGTH, packing, mixture)
    monkeypatch.setattr("data.storage.rows.WINDOW", 7)
    prepare_rows(path, plan, "train_file", print, names=["a"])
    rows, data = Rows(path, plan, True, True), TokenizedDataset(path, True, True)
    pieces = [piece for row in range(len(rows)) for piece in rows.pieces(row)]
    assert sorted(i for i, start, _ in pieces if start == 0) == list(range(NUM_SAMPLES))
    assert (
        sum(stop - start - 1 for _, start, stop in pieces) == (data.lengths - 1).sum()
    )  # each token but a sample's first, once
    assert rows.num_targets.sum() == data.num_targets.sum()
    assert all(rows.lengths[row] == len(rows.input_ids(row)) <= LENGTH for row in range(len(rows)))


def test_rows_without_packing_are_samples(path: Path) -> None:
    rows, data = Rows(path, RowPlan(LENGTH), True, True), TokenizedDataset(path, True, True)
    assert len(rows) == NUM_SAMPLES and rows.lengths.tolist() == data.lengths.tolist()
    assert rows.input_ids(3).tolist() == data.input_ids(3).tolist()
    assert rows.position_ids(3).tolist() == list(range(data.lengths[3]))


def test_a_row_without_room_for_a_target() -> None:
    with pytest.raises(UserError, match="^max_seq_length=1: at least 2"):
        RowPlan(1)


def test_a_packed_row_without_a_token_for_each_sample_of_a_record() -> None:
    RowPlan(7, group_size=8)
    RowPlan(8, Packing.BEST_FIT, group_size=8)
    with pytest.raises(UserError, match="^max_seq_length=7: the 8 samples of a record share a packed row"):
        RowPlan(7, Packing.BEST_FIT, group_size=8)


def test_rows_that_hold_samples_of_several_files_are_counted(end_is_pad, tmp_path: Path) -> None:
    """Before the files are tokenized as after."""
    sources = []
    for name, count in (("a", 3), ("b", 2), ("c", 4)):
        records = [{"prompt": name, "completion": f"{n} Paris"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        sources.append(str(tmp_path / f"{name}.jsonl"))
    encoding = Encoding(SFTEncoder(prompt_template="{prompt}"), end_is_pad, LENGTH)
    found = estimate_rows([[source] for source in sources], encoding, PLAN, tmp_path / "cache")
    path = prepare_dataset(sources, key="train_file", encoding=encoding, cache_dir=tmp_path / "cache")
    prepare_rows(path, PLAN, "train_file")
    assert found == RowEstimate(count_rows(path, PLAN), is_exact=True) and found.num_rows < 3


@pytest.mark.parametrize(("companion", "is_exact"), [("", True), (MISMATCHED, False)])
def test_rows_with_room_for_other_samples_are_estimated(
    path: Path, end_is_pad, tmp_path: Path, companion: str, is_exact: bool
) -> None:
    """As those of KTO, which no plan makes: the others are made of what is tokenized."""
    plan, encoding = replace(PLAN, companion=companion), Encoding(SFTEncoder(), end_is_pad, LENGTH)
    found = estimate_rows([[str(path.parents[1] / "a.jsonl")]], encoding, plan, tmp_path)
    assert found is not None and found.num_rows > 1 and found.is_exact is is_exact


def test_pickling_opens_the_folder_again(path: Path) -> None:
    rows = Rows(path, PLAN, True, False)
    content = pickle.dumps(rows)
    assert len(content) < 1000 and pickle.loads(content).input_ids(1).tolist() == rows.input_ids(1).tolist()


def test_a_flipped_byte_of_the_index_is_found_where_bytes_are_compared(path: Path) -> None:
    file = PLAN.folder(path) / "start.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])
    prepare_rows(path, PLAN, "train_file", compares_bytes=False)
    assert file.read_bytes() != whole
    prepare_rows(path, PLAN, "train_file")
    assert file.read_bytes() == whole
