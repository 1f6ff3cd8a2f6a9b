"""Pairs of answers: which tokens carry loss, that the two stay together, and errors of bad records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import read_runs

from data.collator import unshift_targets
from data.loading.columns import DOCUMENT_SUMS, list_scored_columns
from data.loading.loader import LoaderOptions, build_eval_loader, build_train_loader
from data.options import LengthPolicy, MeanOver, OnBadRecord, Packing
from data.order import GlobalOrder
from data.sources.mixture import Mixture
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, count_rows, prepare_rows
from data.storage.scores import Scores, find_scores, write_scores
from data.storage.tokenized import TokenizedDataset, load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from extensions.preferences.encoders import PreferenceEncoder
from extensions.preferences.reference import REFERENCE

RECORD = {"prompt": "Legs of a {spider}?", "chosen": "Eight.", "rejected": "Five, I would say."}
USER, EIGHT, FIVE = (
    {"role": role, "content": text}
    for role, text in (("user", "Legs?"), ("assistant", "Eight."), ("assistant", "Five."))
)
SURE = {"role": "user", "content": "Sure?"}


def encode(record: dict, tokenizer, **options: str) -> list[list[tuple[str, str]]]:
    return [
        read_runs(sample, tokenizer)
        for sample in PreferenceEncoder(**options).encode(record, "pairs.jsonl:3", tokenizer)
    ]


def test_loss_is_on_each_answer_and_its_end_token(build_tokenizer) -> None:
    tokenizer = build_tokenizer(puts_bos=True, pad_token="</s>")  # pad and end are one token
    chosen, rejected = encode(RECORD, tokenizer)
    assert chosen == [("masked", "<s>Legs of a {spider}?\n"), ("loss", "Eight.</s>")]
    assert rejected == [("masked", "<s>Legs of a {spider}?\n"), ("loss", "Five, I would say.</s>")]
    renamed = {"question": RECORD["prompt"], "good": RECORD["chosen"], "bad": RECORD["rejected"]}
    names = {"prompt_field": "question", "chosen_field": "good", "rejected_field": "bad"}
    assert encode(renamed, tokenizer, **names) == [chosen, rejected]
    assert encode(RECORD, tokenizer, prompt_template="Q: {prompt} A: ")[0][0] == (
        "masked",
        "<s>Q: Legs of a {spider}? A: ",
    )


def test_messages_and_texts_may_be_mixed(chat_tokenizer) -> None:
    expected = [
        [("masked", "<|im_start|>user\nLegs?<|im_end|>\n<|im_start|>assistant\n"), ("loss", f"{answer}.<|im_end|>")]
        for answer in ("Eight", "Five")
    ]
    assert encode({"prompt": [USER], "chosen": [EIGHT], "rejected": [FIVE]}, chat_tokenizer) == expected
    assert encode({"prompt": "Legs?", "chosen": [EIGHT], "rejected": [FIVE]}, chat_tokenizer) == expected
    assert encode({"prompt": [USER], "chosen": "Eight.", "rejected": "Five."}, chat_tokenizer) == expected
    assert encode({"chosen": [USER, EIGHT], "rejected": [USER, FIVE]}, chat_tokenizer) == expected
    assert (
        encode({"prompt": "no", "chosen": [USER, EIGHT], "rejected": [USER, FIVE]}, chat_tokenizer) == expected
    )  # whole conversations


def test_assistant_turns_that_both_have_are_the_prompt(chat_tokenizer) -> None:
    yes, no = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    expected = encode({"prompt": [USER, EIGHT, SURE], "chosen": [yes], "rejected": [no]}, chat_tokenizer)
    assert [run for run in expected[0] if run[0] == "loss"] == [("loss", "Yes.<|im_end|>")]
    assert "Eight." in expected[0][0][1]
    assert encode({"chosen": [USER, EIGHT, SURE, yes], "rejected": [USER, EIGHT, SURE, no]}, chat_tokenizer) == expected
    # From the first different turn, every assistant turn belongs to an answer.
    parted = encode({"chosen": [USER, EIGHT, SURE, yes], "rejected": [USER, FIVE, SURE, no]}, chat_tokenizer)
    assert [text for kind, text in parted[1] if kind == "loss"] == ["Five.<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "no field 'rejected'; the record has 'prompt', 'chosen'; set data.rejected_field",
        ),
        (
            {"q": "a", "yes": "b", "no": "c"},
            "the record has 'q', 'yes', 'no'; set data.prompt_field and data.chosen_field and data.rejected_field",
        ),
        ({**RECORD, "chosen": " "}, "field 'chosen' is empty; fill it or remove the record"),
        ({**RECORD, "rejected": ""}, "field 'rejected' is empty; fill it or remove the record"),
        ({"prompt": [USER], "chosen": [EIGHT], "rejected": []}, "field 'rejected' is empty"),
        (
            {**RECORD, "rejected": RECORD["chosen"]},
            "fields 'chosen' and 'rejected' are the same, so nothing is preferred; fix or remove the record",
        ),
        ({"chosen": [USER, EIGHT], "rejected": [USER, EIGHT]}, "fields 'chosen' and 'rejected' are the same"),
        ({**RECORD, "chosen": 8}, "field 'chosen' must be text, not int"),
        ({**RECORD, "prompt": None}, "field 'prompt' must be text, not NoneType"),
        ({"prompt": [USER], "chosen": [EIGHT], "rejected": [SURE]}, "message 2 is a user turn, after a user turn"),
        (
            {"prompt": [USER, EIGHT], "chosen": "b", "rejected": "c"},
            "message 3 is an assistant turn, after an assistant turn",
        ),
    ],
)
def test_a_bad_record(record: dict, message: str, chat_tokenizer) -> None:
    with pytest.raises(UserError, match="^pairs.jsonl:3: ") as caught:
        encode(record, chat_tokenizer)
    assert message in str(caught.value)


def test_messages_need_a_chat_template(tokenizer) -> None:
    with pytest.raises(
        UserError, match="pairs.jsonl:3: the record holds messages, but the tokenizer has no chat template"
    ):
        encode({"prompt": [USER], "chosen": [EIGHT], "rejected": [FIVE]}, tokenizer)


def tokenize(folder: Path, tokenizer, records: list[dict], max_seq_length: int = 64, **options) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(PreferenceEncoder(), tokenizer, max_seq_length, samples_per_record=2, **options)
    return prepare_dataset(
        [str(file)],
        key="train_file",
        encoding=encoding,
        cache_dir=folder / "cache",
        num_proc=options.pop("num_proc", 1),
        log=None,
    )


def build_records(count: int) -> list[dict]:
    return [
        {"prompt": f"{i}?", "chosen": "France " * (1 + i % 5), "rejected": "Paris " * (1 + i % 3)} for i in range(count)
    ]


@pytest.fixture
def pairs(tmp_path: Path, tokenizer) -> Path:
    return tokenize(tmp_path, tokenizer, build_records(11))


def test_both_answers_are_kept_or_neither(tmp_path: Path, tokenizer) -> None:
    long = {**RECORD, "rejected": "spider " * 40}
    path = tokenize(tmp_path, tokenizer, [RECORD, long, RECORD], max_seq_length=40, length_policy=LengthPolicy.drop)
    rows = Rows(path, RowPlan(40, group_size=2), True, True)
    assert count_rows(path, RowPlan(40, group_size=2)) == 2 and len(rows) == 4
    assert [tokenizer.decode(rows.input_ids(row)[-2:]).endswith("</s>") for row in range(4)] == [True] * 4
    path = tokenize(tmp_path, tokenizer, [RECORD, long], max_seq_length=40, length_policy=LengthPolicy.truncate)
    assert Rows(path, RowPlan(40, group_size=2), True, True).lengths[3] == 40


def test_answers_that_differ_too_late(tmp_path: Path, tokenizer) -> None:
    late = {**RECORD, "chosen": "spider " * 40 + "yes", "rejected": "spider " * 40 + "no"}
    with pytest.raises(
        UserError,
        match="pairs.jsonl:2: the two texts that are compared are the same up to max_seq_length=40 tokens; raise it",
    ):
        tokenize(tmp_path, tokenizer, [RECORD, late], max_seq_length=40)
    path = tokenize(tmp_path, tokenizer, [RECORD, late], max_seq_length=40, on_bad_record=OnBadRecord.skip)
    assert count_rows(path, RowPlan(40, group_size=2)) == 1


@pytest.mark.parametrize("shares_rows", [False, True], ids=["unpacked", "packed"])
def test_what_becomes_of_pairs_that_cannot_be_trained_on(tmp_path: Path, tokenizer, shares_rows: bool) -> None:
    """A pair longer than a row, an empty answer, equal answers, before and after they are cut: one line each. Packed,
    the two answers have the row together."""
    long = {**RECORD, "chosen": "yes " + "spider " * 70, "rejected": "no " + "spider " * 70}
    late = {**RECORD, "chosen": "spider " * 70 + "yes", "rejected": "spider " * 70 + "no"}
    bad = {
        2: ({**RECORD, "chosen": " "}, "field 'chosen' is empty; fill it or remove the record"),
        3: (
            {**RECORD, "rejected": RECORD["chosen"]},
            "fields 'chosen' and 'rejected' are the same, so nothing is pref",
        ),
        4: (
            late,
            f"are the same up to {'30 of ' * shares_rows}max_seq_length=60 tokens; raise it, or remove the record",
        ),
    }
    for number, (record, message) in bad.items():
        with pytest.raises(UserError) as caught:
            tokenize(
                tmp_path, tokenizer, [RECORD] * (number - 1) + [record], max_seq_length=60, shares_rows=shares_rows
            )
        lines = str(caught.value).splitlines()
        assert len(lines) == 1 and f"pairs.jsonl:{number}: " in lines[0] and message in lines[0], lines
    records = [RECORD, *(record for record, _ in bad.values()), long]
    given = {"max_seq_length": 60, "shares_rows": shares_rows, "on_bad_record": OnBadRecord.skip}
    path = tokenize(tmp_path, tokenizer, records, **given)
    lengths = Rows(path, RowPlan(60, group_size=2), False, False).lengths.tolist()
    assert lengths[2:] == ([30, 30] if shares_rows else [60, 60])
    words = load_summary(path).describe()
    assert "\n2 samples truncated\n" in words and "\n3 of 5 records skipped as bad, such as " in words, words
    path = tokenize(tmp_path, tokenizer, records, length_policy=LengthPolicy.drop, **given)
    words = load_summary(path).describe()
    assert words.startswith("5 records; 2 samples, ") and "\n4 samples too long and dropped\n" in words, words


def test_one_answer_is_not_a_pair(tmp_path: Path, tokenizer) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(RECORD))
    with pytest.raises(UserError, match="the encoder must make one sample of a record, not a tuple of 2"):
        prepare_dataset(
            [str(file)],
            key="train_file",
            encoding=Encoding(PreferenceEncoder(), tokenizer, 64),
            cache_dir=tmp_path / "cache",
            log=None,
        )


def reference_of(path: Path) -> Scores:
    """A reference whose value for sample i is -i - 1."""
    scores = find_scores("reference", path, RowPlan(64), (REFERENCE,), "0")
    write_scores(scores, "train_file", [-1.0 - np.arange(22)])
    return scores


def build_options(
    path: Path, plan: RowPlan, micro_batch_size: int = 1, dp_rank: int = 0, dp_size: int = 1, **options
) -> LoaderOptions:
    return LoaderOptions(
        reads_inputs=True,
        reads_labels=True,
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=micro_batch_size,
        row_plan=plan,
        pad_token_id=0,
        mean_over=MeanOver.samples,
        columns=tuple(list_scored_columns(reference_of(path))),
        **options,
    )


@pytest.mark.parametrize(("micro_batch_size", "dp_size", "accumulation"), [(1, 1, 4), (2, 2, 1), (4, 1, 1)])
def test_a_pair_stays_together_and_the_order_does_not_depend_on_the_layout(
    pairs: Path, micro_batch_size: int, dp_size: int, accumulation: int
) -> None:
    plan = RowPlan(64, group_size=2)
    order = GlobalOrder(count_rows(pairs, plan), 4, seed=3)
    rows = Rows(pairs, plan, True, True)
    for step in range(3):
        seen = []
        for rank in range(dp_size):
            loader = build_train_loader(
                pairs, build_options(pairs, plan, micro_batch_size, rank, dp_size), order, accumulation
            )
            for batch in loader.iterate(step, step + 1):
                labels, input_ids = unshift_targets(batch.targets.ids), batch.inputs.input_ids
                reference = batch.targets.columns["reference"]
                assert len(input_ids) == len(labels) == len(reference) == 2 * micro_batch_size
                assert (
                    batch.targets.denominator == micro_batch_size
                )  # pairs: the mean over micro-batches and replicas is the global batch's
                samples = (-reference - 1).long().tolist()
                assert all(
                    rejected == chosen + 1 and chosen % 2 == 0 for chosen, rejected in zip(samples[::2], samples[1::2])
                )
                for sample, ids, row_labels in zip(samples, input_ids, labels, strict=True):
                    length = rows.lengths[sample]
                    assert ids[:length].tolist() == rows.input_ids(sample).tolist() and not ids[length:].any()
                    assert (
                        row_labels[:length].tolist() == rows.labels(sample).tolist()
                        and (row_labels[length:] == -100).all()
                    )
                seen += [sample // 2 for sample in samples[::2]]
        assert sorted(seen) == sorted(order.sample_ids(step).tolist())
        totals = loader.step_totals(step)
        assert totals.count_terms(MeanOver.samples) == totals.num_samples == 4 and totals.num_documents == 8
        assert totals.num_tokens == sum(int(rows.lengths[2 * i] + rows.lengths[2 * i + 1]) for i in seen)


def test_evaluation_takes_every_pair_once(pairs: Path) -> None:
    plan = RowPlan(64, group_size=2)
    loaders = [build_eval_loader(pairs, build_options(pairs, plan, 2, rank, 2), 11) for rank in range(2)]
    batches = [batch.targets for loader in loaders for batch in loader.iterate()]
    assert {len(loader) for loader in loaders} == {3} and all(targets.denominator == 1 for targets in batches)
    real = [
        sample
        for targets in batches
        for row, sample in zip(targets.ids, -targets.columns["reference"] - 1)
        if (row != -100).any()
    ]
    assert sorted(int(sample) for sample in real) == list(range(22))
    assert sum(len(targets.ids) for targets in batches) == 24  # the last pair is a filler


@pytest.mark.parametrize(("micro_batch_size", "dp_size", "accumulation"), [(1, 1, 4), (2, 2, 1), (4, 1, 1)])
def test_packed_pairs_share_a_row(pairs: Path, micro_batch_size: int, dp_size: int, accumulation: int) -> None:
    """The loss is a mean over the pairs of the step, however many a micro-batch has."""
    dataset = TokenizedDataset(pairs, True, True)
    plan = RowPlan(40, Packing.BEST_FIT, group_size=2)
    lines: list[str] = []
    prepare_rows(pairs, plan, "train_file", lines.append)
    rows, num_rows = Rows(pairs, plan, True, True), count_rows(pairs, plan)
    assert len(rows) == num_rows < 11 and f"{11 / num_rows:.1f} records in each" in lines[1], lines
    order = GlobalOrder(num_rows, 4, seed=3)
    seen = []
    for rank in range(dp_size):
        options = build_options(pairs, plan, micro_batch_size, rank, dp_size)
        options = replace(options, columns=(*options.columns, *DOCUMENT_SUMS))
        loader = build_train_loader(pairs, options, order, accumulation)
        for batch in loader.iterate(0, 1):
            columns, labels = batch.targets.columns, unshift_targets(batch.targets.ids)
            samples = (-columns["reference"] - 1).long()
            assert len(batch.inputs.input_ids) == micro_batch_size and len(samples) > 2 * micro_batch_size - 1
            assert (samples[1::2] == samples[::2] + 1).all() and not (samples[::2] % 2).any()
            for document, sample in enumerate(samples.tolist()):
                own = batch.targets.ids.flatten()[batch.targets.indices][columns["target_documents"] == document]
                expected = dataset.labels(sample)[1:]
                assert own.tolist() == expected[expected != -100].tolist()
                assert len(own) == columns["num_targets"][document]
            assert (labels[batch.inputs.position_ids == 0] == -100).all()
            seen += (samples[::2] // 2).tolist()
            totals = loader.step_totals(0)
            assert batch.targets.denominator == totals.num_samples / (dp_size * accumulation)
    assert sorted(seen) == sorted((rows.list_samples(order.sample_ids(0))[::2] // 2).tolist())
    assert totals.count_terms(MeanOver.samples) == totals.num_samples == len(seen) == totals.num_documents // 2
    loader = build_eval_loader(pairs, build_options(pairs, plan, 3), num_rows)
    found = torch.cat([batch.targets.columns["reference"] for batch in loader.iterate()])
    assert sorted((-found - 1).tolist()) == list(range(22))


def test_a_mixture_takes_whole_pairs(tmp_path: Path, tokenizer) -> None:
    for name, count in (("a", 6), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in build_records(count)))
    encoding = Encoding(PreferenceEncoder(), tokenizer, 64, samples_per_record=2)
    entries = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    path = prepare_dataset(entries, key="train_file", encoding=encoding, cache_dir=tmp_path / "cache", log=None)
    plan = RowPlan(64, mixture=Mixture((1, 2)), group_size=2)
    lines: list[str] = []
    prepare_rows(path, plan, "train_file", lines.append, names=["a", "b"])
    rows = Rows(path, plan, False, False)
    assert count_rows(path, plan) == 6 + 12 and any("b 66.7% (12 samples, 4.00 times)" in line for line in lines), lines
    assert (rows.sample_ids[1::2] == rows.sample_ids[::2] + 1).all() and (rows.sample_ids[::2] % 2 == 0).all()
