"""The tokenized cache: its contents, when it is rebuilt, and that it is whole or absent."""

import csv
import errno
import gzip
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.tiny import save_tokenizer

import filesystem
from data.encoders.sft import SFTEncoder
from data.options import LengthPolicy, OnBadRecord
from data.storage import disk, tokenizing
from data.storage.disk import estimate_size
from data.storage.encoding import Encoding
from data.storage.file_report import save_skipped
from data.storage.tokenized import TokenizedDataset, load_summary, read_skipped
from data.storage.tokenizing import prepare_dataset
from errors import UserError

RECORDS = [{"prompt": f"How many {'legs ' * (n % 5)}{n}?", "completion": f"Eight {n}."} for n in range(12)]


@dataclass(frozen=True)
class SlowEncoder(SFTEncoder):
    """Writes a line to `trace` for every record that it encodes."""

    folder: str = ""  # not the file itself: its content would be a part of the key

    @property
    def trace(self) -> Path:
        return Path(self.folder) / "trace"

    def split(self, record, location, tokenizer, counts):
        with open(self.trace, "a") as file:
            file.write(f"{location}\n")
        time.sleep(0.02)
        return super().split(record, location, tokenizer, counts)


@dataclass(frozen=True)
class BrokenEncoder(SFTEncoder):
    def split(self, record, location, tokenizer, counts):
        raise KeyError("a bug, not a mistake of the user")


@dataclass(frozen=True)
class DyingEncoder(SFTEncoder):
    """Kills its process, unless that is `parent`."""

    parent: int = 0

    def split(self, record, location, tokenizer, counts):
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().split(record, location, tokenizer, counts)


@dataclass(frozen=True)
class LabelEncoder:
    """Gives the labels `first`, and `later` from the record `place` on."""

    first: tuple[float, ...]
    later: tuple[float, ...]
    place: int

    def encode(self, record, location, tokenizer):
        number = int(re.findall(r"\d+", record["completion"])[0])
        return {"input_ids": [1, 2], "labels": [1, 2], "label": list(self.first if number < self.place else self.later)}


@dataclass(frozen=True)
class WritingEncoder(SFTEncoder):
    """Adds a line to the file `name` in `folder` for each record."""

    folder: str = ""
    name: str = "log.txt"

    def split(self, record, location, tokenizer, counts):
        with open(os.path.join(self.folder, self.name), "a") as stream:
            stream.write("\n")
        return super().split(record, location, tokenizer, counts)


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
        encoding = {"encoder": SFTEncoder(), "tokenizer": tokenizer, "max_seq_length": 64}
        encoding |= {name: changes.pop(name) for name in set(changes) & {field.name for field in fields(Encoding)}}
        options = {
            "entries": [str(train_file)],
            "key": "train_file",
            "encoding": Encoding(**encoding),
            "cache_dir": train_file.parent / "cache",
            "log": lines.append,
        }
        return prepare_dataset(**(options | changes)), lines

    return call


def list_cache(train_file: Path) -> list[str]:
    return sorted(name for name in os.listdir(train_file.parent / "cache") if not name.endswith(".lock"))


@pytest.mark.parametrize("name", ["log.txt", "train.jsonl"])
def test_tokens_of_a_file_that_changes_meanwhile_are_not_stored(prepare, train_file: Path, name: str) -> None:
    whole = str(train_file.parent / name)
    with pytest.raises(
        UserError, match="^train_file: a file changed while it was tokenized, one of the records or one"
    ):
        prepare(encoder=WritingEncoder(name=whole))
    assert list_cache(train_file) == []
    folder = train_file.parent / "logs"
    folder.mkdir()
    first, second = (prepare(encoder=WritingEncoder(folder=str(folder))) for _ in range(2))
    assert first[0] == second[0] and "cached in" in second[1][-1] and (folder / "log.txt").is_file()


def test_columns_hold_what_the_encoder_made(prepare, tokenizer) -> None:
    path, lines = prepare(max_seq_length=15)
    data = TokenizedDataset(path, reads_inputs=True, reads_labels=True)
    whole = [SFTEncoder().encode(record, "", tokenizer) for record in RECORDS]
    assert len(data) == len(whole)
    for index, sample in enumerate(whole):
        assert data.input_ids(index).tolist() == sample["input_ids"][:15]
        assert data.labels(index).tolist() == sample["labels"][:15]
        assert data.lengths[index] == min(15, len(sample["input_ids"]))
        assert data.num_targets[index] == sum(label != -100 for label in sample["labels"][1:15])
    lengths = [len(sample["input_ids"]) for sample in whole]
    truncated, lost = sum(length > 15 for length in lengths), sum(max(0, length - 15) for length in lengths)
    lost_targets = sum(label != -100 for sample in whole for label in sample["labels"][15:])
    assert 0 < truncated < 12
    tokens, targets = data.lengths.sum(), data.num_targets.sum()
    size = f"12 samples, {tokens} tokens, {targets} target tokens"
    assert lines[1:] == [f"train_file: tokenized into {path}"]  # the counts are shown once, by file
    lost_tokens = f"{lost} tokens lost by it ({lost_targets} of them targets)"
    assert load_summary(path).describe().split("\n") == [
        f"12 records; {size}", "12 turns of the assistant", f"{truncated} samples truncated", lost_tokens
    ]  # fmt: skip
    assert data.num_cut is not None and data.num_cut.sum() == lost


def test_processes_make_the_same_data(prepare, tmp_path: Path) -> None:
    one = TokenizedDataset(prepare()[0], True, True)
    two = TokenizedDataset(prepare(num_proc=2, cache_dir=tmp_path / "other")[0], True, True)
    assert [one.input_ids(i).tolist() for i in range(12)] == [two.input_ids(i).tolist() for i in range(12)]


def test_many_chunks_are_indexed_right(prepare, tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": "", "completion": str(n)}) + "\n" for n in range(2500)))
    data = TokenizedDataset(prepare(entries=[str(path)])[0], True, False)
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
    encoder = SlowEncoder(folder=str(train_file.parent))
    path, _ = prepare(encoder=encoder)
    trace = encoder.trace.read_text()
    again, lines = prepare(encoder=encoder)
    assert (
        again == path and encoder.trace.read_text() == trace and len(trace.splitlines()) == 2 * 12
    )  # and 12 for the estimate of the size
    assert len(lines) == 1 and "cached in" in lines[0]


def test_every_change_of_the_tokens_rebuilds_it(prepare, train_file: Path, build_tokenizer) -> None:
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
    path, lines = prepare()
    assert lines[-1].endswith(f"tokenized into {path}")
    paths.append(path)
    assert len(set(paths)) == len(paths)


def test_how_the_tokenizer_was_last_called_changes_nothing(prepare, build_tokenizer) -> None:
    tokenizer = build_tokenizer()
    path, _ = prepare(tokenizer=tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert prepare(tokenizer=tokenizer)[0] == path


def test_two_processes_at_once_do_it_once(prepare, train_file: Path) -> None:
    encoder = SlowEncoder(folder=str(train_file.parent))
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
    assert len(encoder.trace.read_text().splitlines()) == 2 * 12  # as one alone
    lines = sorted(answers[0][1] + answers[1][1])
    assert ["cached" in line for line in lines] == [True, False, False, False]
    assert (
        "tokenized into" in lines[1]
        and lines[2].startswith("train_file: tokenizing about 12")
        and lines[3].startswith("waiting for another process")
    )


def test_two_hosts_at_once_without_common_locks_both_get_it(
    prepare, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lock holds for one host, both write; the first one's folder stays, and the other's vanishes."""
    monkeypatch.setattr("data.storage.cache.lock_file", lambda file, on_wait: nullcontext())
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    encoder = SlowEncoder(folder=str(train_file.parent))

    def work(host: str) -> None:
        monkeypatch.setattr(filesystem.socket, "gethostname", lambda: host)
        barrier.wait()
        try:
            path, _ = prepare(encoder=encoder)
            results.put(TokenizedDataset(path, False, True).lengths.tolist())
        except Exception as error:
            results.put(repr(error))

    processes = [context.Process(target=work, args=(host,)) for host in ("a", "b")]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert answers[0] == answers[1] and len(answers[0]) == 12
    assert len(encoder.trace.read_text().splitlines()) == 2 * 2 * 12  # each as one alone
    assert len(list_cache(train_file)) == 1


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


@pytest.mark.parametrize("num_proc", [1, 2])
def test_bad_records_are_skipped_and_counted(prepare, train_file: Path, num_proc: int) -> None:
    bad = [b'{"prompt": "a"}', b'{"prompt": "a"', b'{"prompt": "\xff"}', b"[]"]
    good = train_file.read_bytes().splitlines()
    train_file.write_bytes(b"\n".join([good[0], *bad, *good[1:]]))
    path, _ = prepare(on_bad_record=OnBadRecord.skip, num_proc=num_proc)
    assert len(TokenizedDataset(path, True, True)) == 12
    assert load_summary(path).describe().startswith("16 records; 12 samples, ")
    assert f"\n4 of 16 records skipped as bad, such as {train_file}:" in load_summary(path).describe()
    skipped = list(read_skipped(path))
    assert len(skipped) == 4 and skipped[0].startswith(f"{train_file}:2: no field 'completion'")
    assert skipped[2].startswith(f"{train_file}:4: not UTF-8 text")
    listed = train_file.parent / "out" / "skipped.txt"
    for key in ("train_file", "eval_file", "eval_file"):  # a run, and evaluations in its folder
        save_skipped({key: path}, listed)
    assert listed.read_text().splitlines() == [f"{key}_file: {each}" for key in ("train", "eval") for each in skipped]
    named = r"train.jsonl:2: no field 'completion'.* \(data.on_bad_record=skip leaves such records out\)$"
    with pytest.raises(UserError, match=named):
        prepare()  # a run that does not skip does not find the other's cache


def test_nothing_left_of_the_records(prepare, train_file: Path) -> None:
    train_file.write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(UserError) as caught:
        prepare(on_bad_record=OnBadRecord.skip)
    expected = "train_file: none of its 3 records is left: 3 skipped as bad, 0 dropped as too long; the first: "
    assert str(caught.value).startswith(f"{expected}{train_file}:1: no field 'completion'")
    assert list_cache(train_file) == []
    train_file.write_text(json.dumps({"prompt": "legs " * 99, "completion": "b"}))
    with pytest.raises(UserError, match="0 skipped as bad, 1 dropped as too long; fix the data, data.length_policy"):
        prepare(length_policy=LengthPolicy.drop)


def test_lengths_are_fitted_as_the_policy_says(prepare) -> None:
    dropped, _ = prepare(length_policy=LengthPolicy.drop, max_seq_length=15)
    split, _ = prepare(length_policy=LengthPolicy.split, max_seq_length=15)
    whole, _ = prepare(max_seq_length=None)
    words = [load_summary(path).describe() for path in (dropped, split, whole)]
    count = [len(TokenizedDataset(path, False, False)) for path in (dropped, whole, split)]
    assert 0 < count[0] < count[1] == 12 < count[2]
    assert f"{12 - count[0]} samples too long and dropped" in words[0] and f"{12 - count[0]} samples split" in words[1]
    targets = [TokenizedDataset(path, False, False).num_targets.sum() for path in (whole, split)]
    assert targets[0] == targets[1] and "tokens lost" not in words[2]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a flipped byte of a token": lambda path: flip_a_byte(path / "input_ids.bin"),
    "a flipped byte of an offset": lambda path: flip_a_byte(path / "offset.bin"),
    "a flipped byte of the summary": lambda path: flip_a_byte(path / "summary.json"),
    "cut off": lambda path: os.truncate(path / "labels.bin", 100),
    "a file less": lambda path: (path / "offset.bin").unlink(),
    "a summary of nothing": lambda path: (path / "summary.json").write_text("{}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_reported_and_rebuilt(prepare, name: str) -> None:
    path, _ = prepare()
    before = TokenizedDataset(path, True, False).input_ids(3).tolist()
    DAMAGE[name](path)
    again, lines = prepare()
    assert again == path and TokenizedDataset(path, True, False).input_ids(3).tolist() == before
    assert lines[0].startswith(f"train_file: the tokenized data in {path} is damaged (") and "rebuilt" in lines[0]
    assert "tokenized into" in lines[2] and "cached in" in prepare()[1][0]


def test_bytes_are_compared_where_that_is_asked_for_alone(prepare) -> None:
    """Once a run on each host: the other ranks go by sizes."""
    path, _ = prepare()
    flip_a_byte(path / "labels.bin")
    assert "cached in" in prepare(compares_bytes=False)[1][0]
    assert "labels.bin: its bytes are not those that were written" in prepare()[1][0]


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_source_of_the_same_size_and_time_but_other_bytes_is_tokenized_again(
    prepare, train_file: Path, place: str
) -> None:
    path, _ = prepare()
    status, text = train_file.stat(), train_file.read_text()
    old, new = ("How many 0?", "How many 7?") if place == "first" else ("Eight 11.", "Seven 11.")
    assert old in text
    train_file.write_text(text.replace(old, new))
    os.utime(train_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert train_file.stat().st_mtime_ns == status.st_mtime_ns and train_file.stat().st_size == status.st_size
    again, lines = prepare()
    assert again != path and "tokenized into" in lines[-1]


@pytest.mark.parametrize("place", [4, 6], ids=["within a batch", "between batches"])
@pytest.mark.parametrize(
    ("first", "later", "kinds"),
    [
        ((1, 0), (0.5, 2.0), ("2 int", "2 float")),
        ((1,), (1, 0, 1), ("1 int", "3 int")),
        ((1, 0), (), ("none", "2 int")),
        ((1,), (np.float32(0.5),), ("1 int", "1 float")),
    ],
)
def test_labels_of_two_kinds_are_refused(prepare, first, later, kinds, place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many numbers in all as a multiple of the samples, which could be cut into rows of wrong labels."""
    monkeypatch.setattr(tokenizing, "MAX_BATCH_RECORDS", 3)
    with pytest.raises(UserError) as refused:
        prepare(encoder=LabelEncoder(first, later, place))
    name = f"{LabelEncoder.__module__}.LabelEncoder"
    assert f"data.encoder={name} gives some samples {kinds[0]} as `label` and others {kinds[1]};" in str(refused.value)


def test_labels_of_one_kind_are_kept(prepare) -> None:
    labels = TokenizedDataset(prepare(encoder=LabelEncoder((1.0, 0.5), (2.0, 0.0), 4))[0], False, False).sample_labels
    assert labels.tolist() == [[1.0, 0.5]] * 4 + [[2.0, 0.0]] * 8


def test_a_bug_keeps_its_own_type_and_leaves_nothing(prepare, train_file: Path) -> None:
    with pytest.raises(KeyError, match="a bug"):
        prepare(encoder=BrokenEncoder())
    assert list_cache(train_file) == []


def test_what_killed_processes_left_is_cleared(prepare, train_file: Path) -> None:
    """This host deletes its own at once, and those of another one, which may be at work, after a day without change."""
    path, _ = prepare()
    own, old, new = (path.with_name(f"{path.name}.{host}.tmp") for host in (socket.gethostname(), "old", "new"))
    for left in (own, old, new):
        shutil.copytree(path, left)
    shutil.rmtree(path)
    for file in (old, *old.iterdir()):
        os.utime(file, (0, time.time() - 100_000))
    assert prepare()[0] == path and list_cache(train_file) == [path.name, new.name]


def test_damaged_tokens_that_cannot_be_deleted_are_not_used(
    prepare, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a file that another process has open leaves its folder."""
    path, _ = prepare()
    written = (path / "input_ids.bin").read_bytes()
    (path / "input_ids.bin").write_bytes(bytes(len(written)))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    assert prepare()[0] == path and (path / "input_ids.bin").read_bytes() == written


def test_a_file_without_records(prepare, train_file: Path) -> None:
    train_file.write_text("\n\n")
    with pytest.raises(UserError, match=f"^train_file holds no records \\({train_file}\\)"):
        prepare()
    assert list_cache(train_file) == []


def test_a_cache_that_cannot_be_written(prepare, train_file: Path) -> None:
    with pytest.raises(UserError, match="the cache of tokenized data cannot be written: .*; choose another folder"):
        prepare(cache_dir=train_file / "cache")


def test_a_disk_without_room_stops_it_before_it_starts(
    prepare, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SlowEncoder(folder=str(train_file.parent))
    monkeypatch.setattr("data.storage.disk.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError) as caught:
        prepare(encoder=encoder)
    cache = train_file.parent / "cache"
    message = (
        f"train_file: the tokenized data will need about 1.[0-9]+ kB, but {cache} has 1 kB free; "
        "make room, or choose another folder with data.cache_dir"
    )
    assert re.fullmatch(message, str(caught.value)) and list_cache(train_file) == []
    assert len(encoder.trace.read_text().splitlines()) == 12


def test_a_disk_that_fills_up_meanwhile(prepare, train_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.storage.tokenizing.TokenizedWriter.append", append)
    with pytest.raises(
        UserError,
        match="train_file: the disk that holds .*/cache is full; "
        "make room, or choose another folder with data.cache_dir",
    ):
        prepare()
    assert list_cache(train_file) == []


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_gzip(path: Path, records: list[dict]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))


def write_zstd(path: Path, records: list[dict]) -> None:
    path.write_bytes(
        pyarrow.Codec("zstd").compress("".join(json.dumps(record) + "\n" for record in records).encode(), asbytes=True)
    )


def write_array(path: Path, records: list[dict]) -> None:
    path.write_text(json.dumps(records))


def write_parquet(path: Path, records: list[dict]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(records), path)


def write_table(path: Path, records: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(records[0]))
        table.writeheader()
        table.writerows(records)


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.jsonl.zst": write_zstd,
    "a.json": write_array,
    "a.parquet": write_parquet,
    "a.csv": write_table,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_log_says_how_much_disk_it_will_need(prepare, tmp_path: Path, name: str) -> None:
    """The estimate from the first 200 of 3,000 records is within 10% of the disk space used."""
    lengths = np.random.default_rng(0).integers(1, 40, 3000)
    records = [{"prompt": f"{n} legs?", "completion": "Eight legs. " * int(length)} for n, length in enumerate(lengths)]
    WRITERS[name](tmp_path / name, records)
    path, lines = prepare(entries=[str(tmp_path / name)], max_seq_length=256)
    found_size = re.fullmatch(
        r"train_file: tokenizing about ([0-9,]+) records; they will need about ([0-9.]+) (kB|MB) of disk in .* free\)",
        lines[0],
    )
    assert int(found_size[1].replace(",", "")) == pytest.approx(3000, rel=0.1)
    found = sum(file.stat().st_size for file in path.iterdir())
    assert float(found_size[2]) * {"kB": 10**3, "MB": 10**6}[found_size[3]] == pytest.approx(found, rel=0.1)


def test_no_size_is_logged_where_no_record_is_a_sample(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "?"}] * 3)
    encoding = Encoding(SFTEncoder(), save_tokenizer(tmp_path / "tokenizer"), 256)
    assert estimate_size([[str(tmp_path / "a.jsonl")]], encoding) is None


def test_a_damaged_file_among_whole_ones_is_named(prepare, tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", RECORDS)
    (tmp_path / "2.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(UserError, match=f"^{tmp_path}/2.parquet cannot be read after row 0"):
        prepare(entries=[str(tmp_path / "*.parquet")])


def test_a_process_that_is_killed_is_reported(prepare, tmp_path: Path) -> None:
    """As the kernel does when memory runs out: nothing hangs, and no file remains."""
    path = tmp_path / "many.jsonl"
    write_jsonl(path, RECORDS * 500)
    with pytest.raises(
        UserError, match="a process that tokenizes was killed, usually out of memory; lower data.num_proc"
    ):
        prepare(entries=[str(path)], encoder=DyingEncoder(parent=os.getpid()), num_proc=2)
    assert list_cache(path) == []


def test_nothing_is_left_in_the_cache_of_datasets(prepare, train_file, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    path, _ = prepare(num_proc=2)
    assert not (tmp_path / "home").exists()
    assert list_cache(train_file) == [path.name]
    assert not [name for name in os.listdir(path) if "tmp" in name or name.startswith("cache-")]
    assert "Tokenizing" not in capfd.readouterr().err  # no progress bars in a log file


@pytest.mark.parametrize("size", [1, 2])
def test_a_very_long_record_is_tokenized_once(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Not for an estimate too: a record of 20 MB takes a minute of a core."""
    monkeypatch.setattr(disk, "SAMPLE_CHARACTERS", 2000)
    record = {"prompt": "a", "completion": "legs " * 200 * size}
    (tmp_path / "a.jsonl").write_text((json.dumps(record) + "\n") * 3)
    estimate = estimate_size([[str(tmp_path / "a.jsonl")]], Encoding(SFTEncoder(), tokenizer, 64))
    assert estimate is None if size == 2 else estimate is not None and estimate.num_records == 3
