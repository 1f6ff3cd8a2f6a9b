"""Documents with labels: their tokens, which are those of the tokenizer alone, labels, and errors of bad records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.collator import number_documents
from data.encoders.sft import SFTEncoder
from data.options import LengthPolicy, OnBadRecord, Packing, ProblemType
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenized import TokenizedDataset
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from extensions.classification.encoders import ClassificationEncoder
from extensions.classification.token_encoders import TokenClassificationEncoder

WHERE = "documents.jsonl:3"
MULTI, REGRESSION = ProblemType.multi_label_classification, ProblemType.regression


def test_texts_have_the_tokens_that_the_tokenizer_gives_them(build_tokenizer) -> None:
    tokenizer = build_tokenizer()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=special
    )
    one = ClassificationEncoder(labels=["no", "yes"]).encode({"text": "Legs?", "label": "yes"}, WHERE, tokenizer)
    assert one["input_ids"] == tokenizer("Legs?")["input_ids"] and one["label"] == [1]
    assert set(one["labels"]) == {-100} and len(one["labels"]) == len(one["input_ids"])
    pair = ClassificationEncoder(labels=["no", "yes"], text_field="a", text_pair_field="b")
    two = pair.encode({"a": "Legs?", "b": "Eight.", "label": "no"}, WHERE, tokenizer)
    assert two["input_ids"] == tokenizer("Legs?", "Eight.")["input_ids"] and two["label"] == [0]
    assert two["num_first"] == len(tokenizer("Legs?")["input_ids"]) + 1  # and a second </s>


def test_a_conversation_may_end_with_a_question(chat_tokenizer) -> None:
    messages = [{"role": "user", "content": "Legs <|im_end|> of a spider?"}]
    sample = ClassificationEncoder(labels=["a", "b"]).encode({"messages": messages, "label": 1}, WHERE, chat_tokenizer)
    assert chat_tokenizer.decode(sample["input_ids"]) == "<|im_start|>user\nLegs <|im_end|> of a spider?<|im_end|>\n"
    assert sample["input_ids"].count(chat_tokenizer.eos_token_id) == 1  # the text's own is letters


@pytest.mark.parametrize(
    ("labels", "problem_type", "value", "expected"),
    [
        (["no", "yes"], None, "yes", [1]),
        (["no", "yes"], None, 0, [0]),  # counts the labels
        (["3", "1"], None, 1, [1]),  # is a name
        (["false", "true"], None, True, [1]),
        (["a", "b", "c"], MULTI, ["c", "a"], [1, 0, 1]),
        (["a", "b", "c"], MULTI, [], [0, 0, 0]),
        (None, REGRESSION, 2, [2.0]),
        (["low", "high"], REGRESSION, [0.5, 1], [0.5, 1.0]),
        (None, REGRESSION, "-2.5e1", [-25.0]),  # as in a table
        (["low", "high"], REGRESSION, "[0.5, 1]", [0.5, 1.0]),
    ],
)
def test_labels_are_read(build_tokenizer, labels, problem_type, value, expected: list) -> None:
    given = {} if problem_type is None else {"problem_type": problem_type}
    sample = ClassificationEncoder(labels=labels, **given).encode(
        {"text": "a", "label": value}, WHERE, build_tokenizer()
    )
    assert sample["label"] == expected and {type(each) for each in sample["label"]} == {type(expected[0])}


@pytest.mark.parametrize(
    ("given", "changed", "message"),
    [
        (
            {},
            {"label": "maybe"},
            "field 'label' is 'maybe', which is not among the labels (no, yes); fix or remove the",
        ),
        ({}, {"label": 2}, "field 'label' is '2', which is not among the labels (no, yes); fix or remove the record"),
        (
            {"labels": ["1", "2", "3"]},
            {"label": "0"},
            "field 'label' is '0', which is not among the labels (1, 2, 3); fix",
        ),
        ({"labels": ["a", "2"]}, {"label": 0}, "field 'label' is '0', which is not among the labels (a, 2); fix or"),
        (
            {"problem_type": REGRESSION, "labels": None},
            {"label": "nan"},
            "field 'label' must be a number (data.problem_t",
        ),
        (
            {"problem_type": REGRESSION, "labels": None},
            {"label": ""},
            "field 'label' must be a number (data.problem_type",
        ),
        ({}, {"label": 0.5}, "field 'label' must be a label, a text or a whole number, not 0.5; fix or remove the"),
        ({"problem_type": MULTI}, {"label": "no"}, "field 'label' must be a list of labels (data.problem_type=multi_l"),
        (
            {"problem_type": REGRESSION},
            {"label": 1},
            "field 'label' must be a list of 2 numbers (data.problem_type=reg",
        ),
        (
            {"problem_type": REGRESSION},
            {"label": [1, 10**400]},
            "field 'label' must be a list of 2 numbers (data.problem_type=regression), not [1, 1000",
        ),
        ({}, {"text": " "}, "field 'text' is empty; fill it or remove the record"),
        ({"text_field": "body"}, {}, "no field 'body'; the record has 'text', 'label'; set data.text_field"),
        (
            {"text_field": "body", "messages_field": "text"},
            {"text": []},
            "the record holds messages, but the tokenizer",
        ),
    ],
)
def test_a_bad_record_is_named(build_tokenizer, given: dict, changed: dict, message: str) -> None:
    with pytest.raises(UserError) as raised:
        ClassificationEncoder(**{"labels": ["no", "yes"]} | given).encode(
            {"text": "Legs?", "label": "no"} | changed, WHERE, build_tokenizer()
        )
    assert str(raised.value).startswith(f"{WHERE}: {message}")


def test_a_tokenizer_of_words_without_one_for_what_is_unknown(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "legs": 2, "eight": 3}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    encoder = ClassificationEncoder(labels=["no", "yes"])
    assert encoder.encode({"text": "legs eight", "label": 1}, WHERE, tokenizer)["input_ids"] == [0, 2, 3, 1]
    words = TokenClassificationEncoder(labels=["no", "yes"])
    for each, record in (
        (encoder, {"text": "legs of", "label": 1}),
        (words, {"words": ["legs", "of"], "labels": [0, 1]}),
        (SFTEncoder(prompt_template="{prompt}"), {"prompt": "legs", "completion": "of"}),
    ):
        with pytest.raises(UserError, match=f"^{WHERE}: the tokenizer makes no token of '.*of', because"):
            each.encode(record, WHERE, tokenizer)


def test_a_text_that_is_cut_keeps_what_the_tokenizer_puts_at_its_end(build_tokenizer, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=special
    )
    text = "legs " * 30
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "label": "yes"}))
    encoding = Encoding(ClassificationEncoder(labels=["no", "yes"]), tokenizer, 16)
    path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
    found = TokenizedDataset(path, True, True).input_ids(0).tolist()
    assert found == tokenizer(text, truncation=True, max_length=16)["input_ids"] and found[-1] == special[1][1]


def test_labels_are_stored_with_the_tokens_and_survive_truncation_and_packing(tokenizer, tmp_path: Path) -> None:
    records = [{"text": "legs " * count, "label": [count, 0.5]} for count in (1, 30, 2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    encoder = ClassificationEncoder(labels=["a", "b"], problem_type=REGRESSION)
    encoding = Encoding(encoder, tokenizer, 16, LengthPolicy.truncate, OnBadRecord.stop)
    path = prepare_dataset([str(tmp_path / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=tmp_path)
    dataset = TokenizedDataset(path, True, True)
    assert dataset.lengths[1] == 16 and dataset.num_targets.tolist() == [1, 1, 1]
    assert dataset.sample_labels.tolist() == [[1, 0.5], [30, 0.5], [2, 0.5]]
    assert Rows(path, RowPlan(16), False, True).sample_labels(np.array([2])).tolist() == [[2, 0.5]]
    packed = RowPlan(16, Packing.BEST_FIT)
    prepare_rows(path, packed, "train_file", None)
    rows = Rows(path, packed, False, True)
    found = [rows.sample_labels(np.array([row]))[:, 0].tolist() for row in range(len(rows))]
    assert sorted(map(sorted, found)) == [[1, 2], [30]]
    assert rows.sample_labels(np.arange(0)).shape == (0, 2)  # of a micro-batch of an evaluation that has no rows left
    assert [rows.num_targets[row] for row in range(len(rows))] == [len(labels) for labels in found]


def test_documents_are_numbered_at_their_last_tokens() -> None:
    rows = [np.array([1, 1, 2, 3, 3]), np.array([1])]
    assert number_documents(rows, (3, 6)).tolist() == [
        [-100, 0, 1, -100, 2, -100],
        [3, -100, -100, -100, -100, -100],
        [-100] * 6,
    ]
