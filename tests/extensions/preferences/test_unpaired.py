"""Single answers with a label: the tokens of a pair's answer, the label, and errors of bad records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.chat_families import build_tokenizer as build_of_family
from support.tiny import read_runs

from data.storage.encoding import Encoding
from data.storage.tokenized import TokenizedDataset
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from extensions.preferences.encoders import PreferenceEncoder, UnpairedEncoder
from extensions.preferences.mismatched import mismatched_path, prepare_mismatched

RECORD = {"prompt": "Legs of a {spider}?", "completion": "Eight.", "label": True}
WHERE = "liked.jsonl:3"


def test_labels_of_a_table_are_texts(build_tokenizer) -> None:
    for text, label in (("true", True), ("False", False), ("FALSE", False)):
        assert UnpairedEncoder().encode(RECORD | {"label": text}, WHERE, build_tokenizer())["desirable"] is label


@pytest.mark.parametrize("label", [True, False])
def test_an_answer_has_the_tokens_of_one_of_a_pair_and_its_label(build_tokenizer, label: bool) -> None:
    tokenizer = build_tokenizer(puts_bos=True)
    sample = UnpairedEncoder().encode(RECORD | {"label": label}, WHERE, tokenizer)
    assert read_runs(sample, tokenizer) == [("masked", "<s>Legs of a {spider}?\n"), ("loss", "Eight.</s>")]
    assert sample["desirable"] is label
    renamed = {"question": RECORD["prompt"], "answer": RECORD["completion"], "liked": label}
    names = {"prompt_field": "question", "completion_field": "answer", "label_field": "liked"}
    assert UnpairedEncoder(**names).encode(renamed, WHERE, tokenizer) == sample


def test_messages_and_texts_may_be_mixed(chat_tokenizer) -> None:
    prompt, answer = {"role": "user", "content": "Legs?"}, {"role": "assistant", "content": "Eight."}
    pair = {"prompt": [prompt], "chosen": [answer], "rejected": "Five."}
    chosen, _ = PreferenceEncoder().encode(pair, WHERE, chat_tokenizer)
    for record in ({"prompt": [prompt], "completion": [answer]}, {"prompt": "Legs?", "completion": [answer]}):
        sample = UnpairedEncoder().encode(record | {"label": True}, WHERE, chat_tokenizer)
        assert sample == chosen | {"desirable": True}


def test_a_chat_template_is_not_ignored(chat_tokenizer) -> None:
    pair = {"prompt": "Legs?", "chosen": "Eight.", "rejected": "Five."}
    messages = {"prompt": [{"role": "user", "content": "Legs?"}]}
    for encoder, record in ((UnpairedEncoder(chat_template="t"), RECORD), (PreferenceEncoder(chat_template="t"), pair)):
        with pytest.raises(UserError, match="data.chat_template=t is not applied .* give the prompt or the answer as"):
            encoder.encode(record, WHERE, chat_tokenizer)
        assert encoder.encode(record | messages, WHERE, chat_tokenizer)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": "yes"}, "field 'label' must be true or false, not 'yes'; fix or remove the record"),
        ({"label": 1}, "field 'label' must be true or false, not 1; fix or remove the record"),
        ({"label": None}, "field 'label' must be true or false, not None; fix or remove the record"),
        ({"completion": " "}, "field 'completion' is empty; fill it or remove the record"),
        ({"completion": 8}, "field 'completion' must be text, not int; fix or remove the record"),
        ({"prompt": 8}, "field 'prompt' must be text, not int; fix or remove the record"),
    ],
)
def test_a_bad_record_is_named(build_tokenizer, changed: dict, message: str) -> None:
    with pytest.raises(UserError) as raised:
        UnpairedEncoder().encode(RECORD | changed, WHERE, build_tokenizer())
    assert str(raised.value) == f"{WHERE}: {message}"


def test_a_record_without_a_label_is_named(build_tokenizer) -> None:
    with pytest.raises(UserError, match="no field 'label'; the record has 'prompt', 'completion'; set .*data.label_f"):
        UnpairedEncoder().encode({"prompt": "Legs?", "completion": "Eight."}, WHERE, build_tokenizer())


def test_reasoning_that_is_not_trained_on_is_of_the_answer(tmp_path: Path) -> None:
    tokenizer = build_of_family("Qwen3")
    said = [("Legs?", "An insect.", "Six."), ("Legs?", "An arachnid.", "Eight."), ("Eyes?", "A spider.", "Eight.")]
    file = tmp_path / "liked.jsonl"
    lines = [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer, "reasoning": thought}],
            "label": thought != "An insect.",
        }
        for question, thought, answer in said
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    encoding = Encoding(UnpairedEncoder(train_on_reasoning=False), tokenizer, 256, label_key="desirable")
    path = prepare_dataset([str(file)], key="train_file", encoding=encoding, cache_dir=tmp_path / "cache")
    prepare_mismatched(path, 256, "train_file", 1)
    dataset = TokenizedDataset(mismatched_path(path), True, True)
    texts = [tokenizer.decode(dataset.input_ids(sample)) for sample in range(3)]
    others = [2, 2, 0]  # not the other answer to one's own prompt
    for (question, _, _), text, other in zip(said, texts, others, strict=True):
        _, thought, answer = said[other]
        assert text.endswith(
            f"{question}<|im_end|>\n<|im_start|>assistant\n<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"
        )
        assert text.count("<think>") == 1
