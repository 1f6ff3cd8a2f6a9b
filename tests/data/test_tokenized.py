"""The tokenized cache: what is in it, when it is made again, and that it is whole or not there."""

import json
import multiprocessing
import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pytest

from data.sft import SFTEncoder
from data.tokenized import TokenizedDataset, prepare_dataset
from errors import UserError

RECORDS = [{"prompt": f"How many {'legs ' * (n % 5)}{n}?", "completion": f"Eight {n}."} for n in range(12)]


@dataclass(frozen=True)
class SlowEncoder(SFTEncoder):
    """Leaves a line in `trace` for every record that it encodes."""

    trace: str = ""

    def encode(self, record, location, tokenizer, max_seq_length):
        with open(self.trace, "a") as file:
            file.write(f"{location}\n")
        time.sleep(0.02)
        return super().encode(record, location, tokenizer, max_seq_length)


@dataclass(frozen=True)
class BrokenEncoder(SFTEncoder):
    def encode(self, record, location, tokenizer, max_seq_length):
        raise KeyError("a bug, not a mistake of the user")


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture
def prepare(train_file: Path, tokenizer):
    """`prepare(**changes)`: `prepare_dataset` on the file; returns the path and the logged lines."""

    def call(**changes) -> tuple[Path, list[str]]:
        lines: list[str] = []
        options = {
            "files": str(train_file),
            "key": "train_file",
            "encoder": SFTEncoder(),
            "tokenizer": tokenizer,
            "max_seq_length": 64,
            "cache_dir": train_file.parent / "cache",
            "log": lines.append,
        }
        return prepare_dataset(**(options | changes)), lines

    return call


def list_cache(train_file: Path) -> list[str]:
    return sorted(name for name in os.listdir(train_file.parent / "cache") if not name.endswith(".lock"))


def test_columns_hold_what_the_encoder_made(prepare, tokenizer) -> None:
    path, lines = prepare(max_seq_length=15)
    data = TokenizedDataset(path, reads_inputs=True, reads_labels=True)
    samples = [SFTEncoder().encode(record, "", tokenizer, 15) for record in RECORDS]
    assert len(data) == len(samples)
    for index, sample in enumerate(samples):
        assert data.input_ids(index).tolist() == sample["input_ids"]
        assert data.labels(index).tolist() == sample["labels"]
        assert data.lengths[index] == len(sample["input_ids"])
        assert data.num_targets[index] == sum(label != -100 for label in sample["labels"][1:])
    truncated = sum(sample["truncated"] for sample in samples)
    assert 0 < truncated < 12
    tokens, targets = data.lengths.sum(), data.num_targets.sum()
    expected = f"12 samples, {tokens} tokens, {targets} target tokens, {truncated} samples truncated"
    assert lines == [f"train_file: {expected}; tokenized into {path}"]


def test_processes_make_the_same_data(prepare, tmp_path: Path) -> None:
    one = TokenizedDataset(prepare()[0], True, True)
    two = TokenizedDataset(prepare(num_proc=2, cache_dir=tmp_path / "other")[0], True, True)
    assert [one.input_ids(i).tolist() for i in range(12)] == [two.input_ids(i).tolist() for i in range(12)]


def test_many_chunks_are_indexed_right(prepare, tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": "", "completion": str(n)}) + "\n" for n in range(2500)))
    data = TokenizedDataset(prepare(files=str(path))[0], True, False)
    assert len(data) == len({tuple(data.input_ids(n)) for n in range(2500)}) == 2500
    for index in (0, 999, 1000, 1001, 1999, 2000, 2499):
        assert len(data.input_ids(index)) == data.lengths[index] == len(str(index)) + 2
    for index in (-1, 2500):
        with pytest.raises(IndexError):
            data.input_ids(index)


def test_a_rank_holds_only_the_columns_it_reads(prepare) -> None:
    path, _ = prepare()
    first, last = TokenizedDataset(path, True, False), TokenizedDataset(path, False, True)
    assert first.input_ids(0).dtype == np.int32 and len(last.labels(0)) == last.lengths[0]
    with pytest.raises(RuntimeError, match="does not hold labels"):
        first.labels(0)
    with pytest.raises(RuntimeError, match="does not hold input_ids"):
        last.input_ids(0)


def test_pickling_opens_the_folder_again(prepare) -> None:
    data = TokenizedDataset(prepare()[0], True, False)
    content = pickle.dumps(data)
    assert len(content) < 1000
    assert pickle.loads(content).input_ids(5).tolist() == data.input_ids(5).tolist()


def test_a_second_run_finds_it(prepare, train_file: Path) -> None:
    encoder = SlowEncoder(trace=str(train_file.parent / "trace"))
    path, _ = prepare(encoder=encoder)
    again, lines = prepare(encoder=encoder)
    assert again == path and len(Path(encoder.trace).read_text().splitlines()) == 12
    assert len(lines) == 1 and "cached in" in lines[0]


def test_whatever_changes_the_tokens_makes_it_again(prepare, train_file: Path, build_tokenizer) -> None:
    paths = [
        prepare()[0],
        prepare(max_seq_length=63)[0],
        prepare(encoder=SFTEncoder(prompt_template="{prompt} "))[0],
        prepare(tokenizer=build_tokenizer(chat_template="x"))[0],
        prepare(tokenizer=build_tokenizer(puts_bos=True))[0],
        prepare(tokenizer=build_tokenizer(eos_token="<|im_end|>"))[0],
    ]
    text = train_file.read_text()
    train_file.write_text(text.replace("Eight 3.", "Seven 3."))  # the same size
    paths.append(prepare()[0])
    assert len(set(paths)) == len(paths)


def test_how_the_tokenizer_was_last_called_changes_nothing(prepare, build_tokenizer) -> None:
    tokenizer = build_tokenizer()
    path, _ = prepare(tokenizer=tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert prepare(tokenizer=tokenizer)[0] == path


def test_two_processes_at_once_do_it_once(prepare, train_file: Path) -> None:
    encoder = SlowEncoder(trace=str(train_file.parent / "trace"))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()

    def work() -> None:
        barrier.wait()
        results.put(prepare(encoder=encoder))

    processes = [context.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert answers[0][0] == answers[1][0]
    assert len(Path(encoder.trace).read_text().splitlines()) == 12
    lines = sorted(answers[0][1] + answers[1][1])
    assert ["cached" in line for line in lines] == [True, False, False]
    assert "tokenized into" in lines[1] and lines[2].startswith("waiting for another process")


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"}', "train.jsonl:13: no field 'completion'"),
        (b'{"prompt": "a"', "train.jsonl:13: not valid JSON: "),
        (b'{"prompt": "\xff"}', "train.jsonl:13: not UTF-8 text"),
    ],
)
def test_a_bad_record_comes_out_bare_and_leaves_nothing(prepare, train_file, num_proc, line, message) -> None:
    train_file.write_bytes(train_file.read_bytes() + line + b"\n")
    with pytest.raises(UserError) as caught:
        prepare(num_proc=num_proc)
    assert type(caught.value) is UserError and message in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert list_cache(train_file) == []


def test_a_bug_keeps_its_own_type_and_leaves_nothing(prepare, train_file: Path) -> None:
    with pytest.raises(KeyError, match="a bug"):
        prepare(encoder=BrokenEncoder())
    assert list_cache(train_file) == []


def test_what_a_killed_process_left_is_cleared(prepare, train_file: Path) -> None:
    path, _ = prepare()
    path.rename(path.with_suffix(".tmp"))
    assert prepare()[0] == path and list_cache(train_file) == [path.name]


def test_a_file_without_records(prepare, train_file: Path) -> None:
    train_file.write_text("\n\n")
    with pytest.raises(UserError, match=f"^train_file holds no records \\({train_file}\\)"):
        prepare()
    assert list_cache(train_file) == []


def test_a_cache_that_cannot_be_written(prepare, train_file: Path) -> None:
    with pytest.raises(UserError, match="the cache of tokenized data cannot be written: .*; choose another folder"):
        prepare(cache_dir=train_file / "cache")


def test_nothing_is_left_in_the_cache_of_datasets(prepare, train_file, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    path, _ = prepare(num_proc=2)
    assert not (tmp_path / "home").exists()
    assert list_cache(train_file) == [path.name]
    assert not [name for name in os.listdir(path) if "tmp" in name or name.startswith("cache-")]
    assert "Tokenizing" not in capfd.readouterr().err  # no progress bars in a log file
    assert not datasets.are_progress_bars_disabled()
