"""The output of `inspect_data=true`: the numbers match the data, and the marks the labels."""

import json
from pathlib import Path

import matplotlib.image
import pytest

from data.encoders.chat import ChatEncoder
from data.encoders.sft import SFTEncoder
from data.options import LengthPolicy, OnBadRecord, Packing
from data.storage.encoding import Encoding
from data.storage.file_report import describe_files
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenizing import prepare_dataset
from extensions.inspection.report import MAX_TOKENS_SHOWN, choose_rows, describe_dataset, render_row, save_histogram
from extensions.preferences.encoders import PreferenceEncoder, UnpairedEncoder

PLANS = {packing: RowPlan(64, packing) for packing in (Packing.NONE, Packing.BEST_FIT)}


@pytest.fixture(scope="module")
def path(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspection")
    records = [
        {"prompt": "Legs?", "completion": "Eight\x1b[2J."},
        {"prompt": "How many legs?", "completion": "8"},
        {"prompt": "a"},
    ]
    records.append({"prompt": "a", "completion": "legs " * 99})
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(SFTEncoder(), tokenizer, 64, LengthPolicy.drop, OnBadRecord.skip)
    path = prepare_dataset([str(folder / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=folder)
    prepare_rows(path, PLANS[Packing.BEST_FIT], "train_file")
    return path


def test_the_report_counts_everything(path: Path) -> None:
    single, packed = (describe_dataset(path, plan) for plan in PLANS.values())
    rows = Rows(path, PLANS[Packing.NONE], False, False)
    tokens, targets = rows.lengths.sum(), rows.num_targets.sum()
    assert f"2 samples, {tokens} tokens, {targets} target tokens\n" in single
    (lines,) = describe_files({"train_file": path}).values()
    assert ": 4 records; 2 samples, " in lines and "\n1 sample too long and dropped\n" in lines
    assert "\n1 of 4 records skipped as bad, such as " in lines
    assert f"tokens a sample: {min(rows.lengths)} to {max(rows.lengths)}" in single
    assert f"target tokens: {targets / tokens:.1%} of all" in single
    assert (
        f"rows: 2, {tokens / 128:.1%} of max_seq_length=64 filled; "
        f"data.packing=true would make 1 row, {tokens / 64:.1%}" in single
    )
    assert f"rows: 1, {tokens / 64:.1%} of max_seq_length=64 filled (packing efficiency)" in packed
    assert "skipped: " in single and "a.jsonl:3: no field 'completion'" in single


def test_answers_with_labels_are_counted_and_not_to_be_packed(tokenizer, tmp_path: Path) -> None:
    records = [{"prompt": "Legs?", "completion": "Eight.", "label": number == 1} for number in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(UnpairedEncoder(), tokenizer, 64, LengthPolicy.drop, label_key="desirable")
    path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
    report = describe_dataset(path, PLANS[Packing.NONE], ("not liked", "liked"))
    assert "labels: not liked 2, liked 1" in report and "packing" not in report


def test_packed_pairs_are_named(tokenizer, tmp_path: Path) -> None:
    records = [{"prompt": "Legs?", "chosen": f"Eight, {number}.", "rejected": "Five."} for number in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(PreferenceEncoder(), tokenizer, 256, samples_per_record=2, shares_rows=True)
    path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
    alone, packed = RowPlan(256, group_size=2), RowPlan(256, Packing.BEST_FIT, group_size=2)
    prepare_rows(path, packed, "train_file")
    report = describe_dataset(path, alone)
    assert ", in 3 records of 2 samples; data.packing=true would make 1 row, " in report
    assert " filled (packing efficiency), in 3 records of 2 samples" in describe_dataset(path, packed)
    rows = Rows(path, packed, True, True)
    shown = render_row(rows, 0, tokenizer, in_colour=False, sample_names=("chosen", "rejected"))
    parts = [f"--- record {n}, chosen ---\nLegs?\n[[Eight, {n}.</s>]]\n" for n in range(3)]
    for number, part in enumerate(parts):
        assert part + f"--- record {number}, rejected ---\nLegs?\n[[Five.</s>]]" in shown
    assert shown.count("---\n") == 6 and shown.startswith("--- record ")


def test_trained_parts_are_marked(path: Path, tokenizer) -> None:
    rows = Rows(path, PLANS[Packing.NONE], True, True)
    # Terminal escape sequences are shown, not sent.
    assert render_row(rows, 0, tokenizer, in_colour=False) == "Legs?\n[[Eight\\x1b[2J.</s>]]"
    assert render_row(rows, 1, tokenizer, in_colour=True) == "\x1b[2mHow many legs?\n\x1b[0m\x1b[32m8</s>\x1b[0m"
    packed = Rows(path, PLANS[Packing.BEST_FIT], True, True)
    parts = render_row(packed, 0, tokenizer, in_colour=False).split("\n--- next document of the row ---\n")
    assert sorted(parts) == ["How many legs?\n[[8</s>]]", "Legs?\n[[Eight\\x1b[2J.</s>]]"]


def test_the_stop_token_of_each_turn_is_shown(build_tokenizer, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    turns = [{"role": role, "content": text} for role, text in (("user", "Legs?"), ("assistant", "Eight."))]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns * 2}))
    encoding = Encoding(ChatEncoder(), tokenizer, 64)
    path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
    assert "turns end at </s> (2)" in describe_dataset(path, PLANS[Packing.NONE])
    shown = render_row(Rows(path, PLANS[Packing.NONE], True, True), 0, tokenizer, in_colour=False)
    assert shown == "user: Legs?\n[[assistant: Eight.</s>]]user: Legs?\n[[assistant: Eight.</s>]]"


def test_a_long_row_is_shortened(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": " legs" * 700}))
    encoding = Encoding(SFTEncoder(), tokenizer, 1000)
    path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
    rows = Rows(path, RowPlan(1000), True, True)
    assert render_row(rows, 0, tokenizer, in_colour=False).endswith(
        f"\n... and {rows.lengths[0] - MAX_TOKENS_SHOWN} tokens more"
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.packing)
def test_the_histogram_is_an_image(path: Path, plan: RowPlan, tmp_path: Path) -> None:
    save_histogram(path, plan, "train_file", tmp_path / "new" / "lengths.png")
    image = matplotlib.image.imread(tmp_path / "new" / "lengths.png")
    assert min(image.shape[:2]) > 200 and image[..., :3].std() > 0.05


def test_rows_are_spread_from_first_to_last() -> None:
    assert choose_rows(1, 3) == [0] and choose_rows(2, 3) == [0, 1] and choose_rows(101, 3) == [0, 50, 100]
