"""Megatron's .bin and .idx: written here from the format's public definition, read as documents, never copied."""

from pathlib import Path

import numpy as np
import pytest
from support.corpora import CODES, write_corpus

from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.options import Packing
from data.sources.mixture import Mixture
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenized import CORPORA_FILE, CorpusTokens, TokenizedDataset, load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError


@pytest.fixture
def prepare(tokenizer, tmp_path: Path):
    def run(*entries: str, encoder=None) -> Path:
        encoding = Encoding(encoder or PretrainEncoder(), tokenizer, None)
        return prepare_dataset(
            list(entries), key="train_file", encoding=encoding, cache_dir=tmp_path / "cache", log=None
        )

    return run


def read(path: Path) -> list[list[int]]:
    dataset = TokenizedDataset(path, True, True)
    assert all(np.array_equal(dataset.labels(i), dataset.input_ids(i)) for i in range(len(dataset)))
    return [dataset.input_ids(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("dtype", CODES)
def test_documents_of_each_dtype(prepare, tmp_path: Path, dtype: str) -> None:
    path = prepare(write_corpus(tmp_path / "corpus", dtype=dtype))
    assert read(path) == [[5, 6, 7, 8], [9, 10, 11, 12, 13], [14]]  # empty documents are omitted
    summary = load_summary(path)
    assert (summary.num_samples, summary.num_tokens, summary.num_targets) == (3, 10, 7)
    assert (path / "length.bin").stat().st_size == 12
    assert (path / "input_ids.bin").stat().st_size == (path / "labels.bin").stat().st_size == 0  # not copied


def test_any_of_its_names_is_the_corpus(prepare, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus")
    assert prepare(prefix) == prepare(f"{prefix}.bin") == prepare(f"{prefix}.idx") == prepare(str(tmp_path / "corp*"))
    other = write_corpus(tmp_path / "other", [[[1, 2]]], "int32")
    path = prepare(prefix, other)
    assert read(path)[-2:] == [[14], [1, 2]] and TokenizedDataset(path, True, True).sources.tolist() == [0, 0, 0, 1]
    assert load_summary(path).fingerprints[0] == load_summary(prepare(prefix)).fingerprints[0]
    write_corpus(tmp_path / "corpus", [[[1, 2, 3]]])
    assert read(prepare(prefix)) == [[1, 2, 3]]  # and a changed one is read again


def test_another_corpus_of_the_same_relative_name_is_not_read(
    prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is shared, the working directory is not."""
    for name, documents in (("a", [[[1, 2]]]), ("b", [[[3, 4]]])):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "corpus", documents)
    monkeypatch.chdir(tmp_path / "a")
    path = prepare("corpus")
    monkeypatch.chdir(tmp_path / "b")
    assert prepare(str(tmp_path / "a" / "corpus")) == path and read(path) == [[1, 2]]
    (path / CORPORA_FILE).write_text('["corpus"]')  # as version 1.1 has left it
    assert read(path) == [[1, 2]]


def test_rows_are_those_of_documents(prepare, tmp_path: Path) -> None:
    """Laid end to end and cut where a row is full; positions restart at each document, and its first token is not
    a target."""
    path = prepare(write_corpus(tmp_path / "corpus"))
    plan = RowPlan(6, Packing.CONCATENATE)
    prepare_rows(path, plan, "train_file", None)
    rows = Rows(path, plan, True, True)
    assert [rows.input_ids(row).tolist() for row in range(len(rows))] == [[5, 6, 7, 8, 9, 10], [10, 11, 12, 13, 14]]
    assert rows.position_ids(0).tolist() == [0, 1, 2, 3, 0, 1]
    assert rows.labels(1).tolist() == [-100, 11, 12, 13, -100] and rows.num_targets.tolist() == [4, 3]


def test_a_mixture_of_corpora(prepare, tmp_path: Path) -> None:
    entries = [write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b", [[[1, 2]]])]
    plan = RowPlan(64, Packing.CONCATENATE, Mixture((1.0, 3.0)))
    prepare_rows(prepare(*entries), plan, "train_file", None, names=entries)
    rows = Rows(prepare(*entries), plan, True, True)
    held = [token for row in range(len(rows)) for token in rows.input_ids(row).tolist()]
    assert held.count(5) == 1 and held.count(1) == 9


def test_an_empty_corpus_among_others(prepare, tmp_path: Path) -> None:
    others = [write_corpus(tmp_path / name, documents) for name, documents in (("none", []), ("empty", [[[]]]))]
    assert read(prepare(*others, write_corpus(tmp_path / "corpus"))) == [[5, 6, 7, 8], [9, 10, 11, 12, 13], [14]]


def test_a_row_reads_its_own_part_of_a_document_alone(prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document may be a whole corpus: read whole for each of its rows, the time grew with its square."""
    num_read = 0

    def count(tokens: CorpusTokens, place: slice) -> np.ndarray:
        nonlocal num_read
        num_read += len(found := read_place(tokens, place))
        return found

    read_place = CorpusTokens.__getitem__
    monkeypatch.setattr(CorpusTokens, "__getitem__", count)
    path, plan = prepare(write_corpus(tmp_path / "corpus", [[list(range(3, 203))]])), RowPlan(8, Packing.CONCATENATE)
    prepare_rows(path, plan, "train_file", None)
    rows = Rows(path, plan, True, True)
    held = [token for row in range(len(rows)) for token in rows.input_ids(row).tolist()[row > 0 :]]
    assert held == list(range(3, 203)) and len(rows) == 29
    assert num_read < 3 * len(held)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"magic": b"MMIDIDY\x00\x00"}, "corpus.idx does not begin with MMIDIDX"),
        ({"cut": 20}, "corpus.idx does not begin with MMIDIDX"),
        ({"version": 2}, "corpus.idx has version 2, only 1 is known"),
        ({"code": 7}, r"corpus.idx has dtype code 7 \(float32\), which token ids cannot have"),
        ({"code": 99}, r"corpus.idx has dtype code 99 \(no known dtype\), which token ids cannot have"),
        ({"cut": 60}, "corpus.idx has 60 bytes, its 4 sequences and 5 document boundaries need 122; it is cut off"),
        ({"tail": b"12"}, "corpus.bin has 22 bytes, .*corpus.idx describes 20; one of them is another corpus's"),
        ({"code": 4}, r"corpus.idx: sequence 1 \(counted from 0\) does not begin where the previous one ends"),
        ({"pointers": np.array([0, 6, 9, 18], "<i8")}, "corpus.idx: sequence 2 .* does not begin where"),
        ({"boundaries": np.array([0, 2, 2, 3])}, "document boundaries do not run from 0 to its 4 sequences"),
        ({"boundaries": np.array([0, 3, 2, 4])}, "document boundaries do not run from 0 to its 4 sequences"),
        ({"documents": [[[5, 6]], [[7, 400]]]}, r"corpus.bin: token 3 \(counted from 0\) has the id 400, the"),
        ({"documents": [[[5, -1]]], "dtype": "int32"}, r"corpus.bin: token 1 \(counted from 0\) has the id -1"),
        ({"documents": [[], []]}, "train_file: none of its 2 records is left"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_match_its_corpus(prepare, tmp_path: Path, changed: dict, message: str) -> None:
    prefix = write_corpus(tmp_path / "corpus", **changed)
    with pytest.raises(UserError, match=message):
        prepare(prefix)


def test_corpora_are_for_raw_text_and_whole(prepare, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match="corpus.bin holds token ids without targets; it can be used with"):
        prepare(prefix, encoder=SFTEncoder())
    (tmp_path / "more.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="corpus.bin is tokenized already and others are text"):
        prepare(prefix, str(tmp_path / "more.jsonl"))
    with pytest.raises(UserError, match="matches tokenized corpora .* and other files; give them apart"):
        prepare(str(tmp_path / "*o*"))
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(UserError, match="corpus.bin has no .*corpus.idx next to it; a tokenized corpus is both"):
        prepare(f"{prefix}.bin")
