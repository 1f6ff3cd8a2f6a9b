"""Queries and documents against what the tokenizer makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.configs import build_config
from support.tiny import save_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from data.options import LengthPolicy
from data.storage.length import fit_group
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from extensions.retrieval.encoders import EmbeddingEncoder, RerankEncoder, RetrievalEncoder
from training.inputs.datasets import prepare_file

RECORD = {"query": "which wraps", "positive": "textwrap wraps lines of text", "negatives": ["json", "a calendar"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """One that puts tokens around texts."""
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


@pytest.mark.parametrize("num_negatives", [0, 2])
@pytest.mark.parametrize("max_seq_length", [64, 8])
def test_texts_are_those_of_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, num_negatives: int, max_seq_length: int
) -> None:
    """Also where they are cut: the end token stays."""
    encoder = EmbeddingEncoder(num_negatives=num_negatives, query_prompt="Q: ", document_prompt="D: ")
    samples = encoder.encode(RECORD, "here", tokenizer)
    assert isinstance(samples, tuple)
    fitted, counts = fit_group(samples, "here", LengthPolicy.truncate, max_seq_length)
    texts = ["Q: which wraps", "D: textwrap wraps lines of text", "D: json", "D: a calendar"][: 2 + num_negatives]
    expected = tokenizer(texts, truncation=True, max_length=max_seq_length)["input_ids"]
    assert [sample["input_ids"] for sample in fitted] == expected
    assert (counts.num_truncated > 0) == (max_seq_length == 8)


@pytest.mark.parametrize("max_seq_length", [64, 20])
def test_pairs_are_those_of_the_tokenizer(tokenizer: PreTrainedTokenizerFast, max_seq_length: int) -> None:
    """Documents are cut, never the query."""
    samples = RerankEncoder(num_negatives=2).encode(RECORD, "here", tokenizer)
    assert isinstance(samples, tuple)
    fitted, _ = fit_group(samples, "here", LengthPolicy.truncate, max_seq_length)
    documents = [RECORD["positive"], *RECORD["negatives"]]
    expected = [
        tokenizer(RECORD["query"], document, truncation="only_second", max_length=max_seq_length)["input_ids"]
        for document in documents
    ]
    assert [sample["input_ids"] for sample in fitted] == expected
    assert max(map(len, expected)) == (20 if max_seq_length == 20 else max(map(len, expected)))


@pytest.mark.parametrize(
    ("encoder", "unread"),
    [
        (RerankEncoder(num_negatives=2), 3),
        (EmbeddingEncoder(num_negatives=2, document_prompt="a text that is about one of the modules: "), 3),
        (EmbeddingEncoder(num_negatives=2, query_prompt="a question about one of the modules: "), 1),
        (EmbeddingEncoder(num_negatives=2), 4),  # room for the tokenizer's own tokens alone
    ],
)
def test_samples_without_a_token_of_their_text_are_counted(
    tokenizer: PreTrainedTokenizerFast, encoder: RetrievalEncoder, unread: int
) -> None:
    """Up to the length at which the first of them has one."""
    samples = encoder.encode(RECORD, "here", tokenizer)
    assert isinstance(samples, tuple)
    before = max(sample["num_first"] for sample in samples)
    for max_seq_length, expected in ((before + 1, unread), (before + 2, 0), (64, 0)):
        _, counts = fit_group(samples, "here", LengthPolicy.truncate, max_seq_length)
        assert counts.num_without_text == expected
        assert ("raise max_seq_length" in "".join(counts.describe())) == (expected > 0)


OWN_ENCODER = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Encoder:
    def encode(self, record, location, tokenizer):
        texts = [tokenizer(record[name])["input_ids"] for name in ("query", "positive")]
        return tuple({"input_ids": ids, "labels": [-100] * len(ids)} for ids in texts)
"""


@pytest.mark.parametrize("kind", [("data=embedding",), ("data=rerank", "data.num_negatives=1")])
def test_samples_of_a_user_defined_encoder_need_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...]
) -> None:
    (tmp_path / "own_texts.py").write_text(OWN_ENCODER)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD) + "\n")
    given = (f"train_file={tmp_path}/train.jsonl", f"data.cache_dir={tmp_path}/cache")
    config = build_config(*kind, *given, "data.encoder={_target_: own_texts.Encoder}")
    tokenizer = save_tokenizer(tmp_path / "model")
    dataset = TokenizedDataset(prepare_file(config, "train_file", tokenizer, None), True, True)
    texts = [dataset.input_ids(number).tolist() for number in range(len(dataset))]
    assert texts == tokenizer([RECORD["query"], RECORD["positive"]])["input_ids"]
    assert dataset.num_targets.tolist() == [1, 1] and dataset.sample_labels is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positive": " "}, "here: field 'positive' is empty; fill it or remove the record"),
        ({"negatives": ["json", 3]}, "here: field 'negatives', text 2 must be text, not int"),
        ({"negatives": "json"}, "here: field 'negatives' has 1 text, and data.num_negatives=2; give a lower number"),
    ],
)
def test_records_that_lack_texts_are_named(
    tokenizer: PreTrainedTokenizerFast, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        EmbeddingEncoder(num_negatives=2).encode({**RECORD, **changes}, "here", tokenizer)
