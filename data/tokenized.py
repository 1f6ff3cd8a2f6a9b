"""Tokenized once, on disk, memory-mapped.

`prepare_dataset` writes `cache_dir/KEY`, an Arrow folder of `datasets`, where KEY hashes everything that the tokens
depend on: the files (path, size, time of change), the tokenizer, the encoder's options, the length. A second run finds
it and starts at once; of two processes at once one works and the other waits. The folder appears whole, by a rename,
or not at all.
`TokenizedDataset` opens it and holds only the columns that this rank reads.

Columns: input_ids and labels (lists of int32), length and num_targets (int32; targets are counted after the shift).
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from data.records import HUB_PREFIX, parse_record, read_records, resolve_sources
from data.sample import Encoder, count_targets
from errors import UserError

FORMAT_VERSION = 1  # raise it when the same options begin to give other tokens or columns
SUMMARY_FILE = "summary.json"
BACKEND_CALL_STATE = ("truncation", "padding")
RAW_FEATURES = Features({"location": Value("string"), "text": Value("string")})
TOKENIZED_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "length": Value("int32"),
        "num_targets": Value("int32"),
        "truncated": Value("bool"),
    }
)


@dataclass(frozen=True)
class Summary:
    """What a tokenized folder holds; kept in it, for the log of later runs."""

    num_samples: int
    num_tokens: int
    num_targets: int
    num_truncated: int

    def describe(self) -> str:
        return (
            f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.num_targets:,} target tokens,"
            f" {self.num_truncated:,} samples truncated"
        )


def prepare_dataset(
    files: str | Sequence[str],
    *,
    key: str,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    cache_dir: str | Path,
    num_proc: int = 1,
    log: Callable[[str], None] = print,
) -> Path:
    """Tokenize the files unless that is done already, and return the folder for `TokenizedDataset`.

    `key` is the config key of the files (`train_file`, `eval_file`), named by errors and by the line that is logged.
    Raises `UserError` for whatever is wrong with the files or a record.
    """
    sources = resolve_sources(files, key)
    encoding = {"encoder": encoder, "tokenizer": tokenizer, "max_seq_length": max_seq_length}
    path = Path(cache_dir) / compute_cache_key(sources, **encoding)
    origin = "cached in"
    if not path.exists():
        with _lock(path.with_suffix(".lock"), log):
            if not path.exists():  # another process may have made it while this one waited
                _write_dataset(path, sources, key, encoding, num_proc)
                origin = "tokenized into"
    summary = Summary(**json.loads((path / SUMMARY_FILE).read_text()))
    log(f"{key}: {summary.describe()}; {origin} {path}")
    return path


def compute_cache_key(
    sources: Sequence[str], encoder: Encoder, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> str:
    """A hash of everything that the tokens depend on."""
    state = {
        "format_version": FORMAT_VERSION,
        "sources": [_describe_source(source) for source in sources],
        "tokenizer": _describe_tokenizer(tokenizer),
        "encoder": f"{type(encoder).__module__}.{encoder!r}",
        "max_seq_length": max_seq_length,
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]


def _describe_source(source: str) -> list:
    if source.startswith(HUB_PREFIX):
        return [source]
    status = os.stat(source)
    return [os.path.abspath(source), status.st_size, status.st_mtime_ns]


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict:
    state = {
        "class": type(tokenizer).__name__,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    if not tokenizer.is_fast:
        return state | {"vocab": tokenizer.get_vocab(), "added": sorted(map(str, tokenizer.get_added_vocab().items()))}
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These are what the last call asked for, not what the tokenizer is; `encode` asks for neither.
    return state | {"backend": {name: part for name, part in backend.items() if name not in BACKEND_CALL_STATE}}


@contextmanager
def _lock(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """A kernel lock: it ends with the process that holds it, however that ends. The empty file stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")
    except OSError as error:
        raise UserError(f"the cache of tokenized data cannot be written: {error}; choose another folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that tokenizes the same data (it holds {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_dataset(path: Path, sources: list[str], key: str, encoding: dict[str, Any], num_proc: int) -> None:
    temporary = path.with_suffix(".tmp")
    # One that exists is of a process that was killed: the lock says that nobody else writes here.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _quiet_progress_bars():
            _tokenize_sources(temporary, sources, key, encoding, num_proc)
        os.rename(temporary / "final", path)
    except Exception as error:
        user_error = _find_user_error(error)
        if user_error is None:
            raise
        raise user_error from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenize_sources(folder: Path, sources: list[str], key: str, encoding: dict[str, Any], num_proc: int) -> None:
    """Leave the finished dataset in `folder/final`; what `datasets` caches on the way lies in `folder` too."""
    raw = Dataset.from_generator(
        _generate_rows,
        RAW_FEATURES,
        cache_dir=str(folder / "raw"),
        gen_kwargs={"sources": tuple(sources), "key": key},
        fingerprint="raw",
    )
    processes = min(num_proc, len(raw))
    tokenized = raw.map(
        _tokenize_batch,
        batched=True,
        remove_columns=raw.column_names,
        features=TOKENIZED_FEATURES,
        fn_kwargs=encoding,
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(folder / "tokenized.arrow"),
        new_fingerprint="tokenized",  # nothing is looked up by it, and hashing a tokenizer takes seconds
        desc=f"Tokenizing {key}",
    )
    tokenized.remove_columns("truncated").save_to_disk(folder / "final")
    (folder / "final" / SUMMARY_FILE).write_text(json.dumps(asdict(_summarize(tokenized))))


def _generate_rows(sources: Sequence[str], key: str) -> Iterator[dict[str, str]]:
    is_empty = True
    for source in sources:
        for location, text in read_records(source):
            is_empty = False
            yield {"location": location, "text": text}
    if is_empty:
        raise UserError(f"{key} holds no records ({', '.join(sources)}); give a file that does")


def _tokenize_batch(
    rows: dict[str, list[str]], encoder: Encoder, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> dict[str, list]:
    samples = [
        encoder.encode(parse_record(location, text), location, tokenizer, max_seq_length)
        for location, text in zip(rows["location"], rows["text"])
    ]
    return {
        "input_ids": [sample["input_ids"] for sample in samples],
        "labels": [sample["labels"] for sample in samples],
        "length": [len(sample["input_ids"]) for sample in samples],
        "num_targets": [count_targets(sample["labels"]) for sample in samples],
        "truncated": [sample["truncated"] for sample in samples],
    }


def _summarize(tokenized: Dataset) -> Summary:
    def total(column: str) -> int:
        return int(tokenized.data.column(column).to_numpy().sum(dtype=np.int64))

    return Summary(len(tokenized), total("length"), total("num_targets"), total("truncated"))


def _find_user_error(error: BaseException | None) -> UserError | None:
    """`datasets` wraps what its generators and processes raise; the message for the user is down the chain."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def _quiet_progress_bars() -> Iterator[None]:
    """No bars in log files; those of a terminal stay."""
    silence = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if silence:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            datasets.enable_progress_bars()


class TokenizedDataset:
    """A tokenized folder, memory-mapped: a rank touches only the columns it reads, lengths and target counts aside."""

    def __init__(self, path: str | Path, reads_inputs: bool, reads_labels: bool) -> None:
        self._arguments = (path, reads_inputs, reads_labels)
        table = datasets.load_from_disk(str(path)).data
        self.lengths: np.ndarray = table.column("length").to_numpy()  # [num_samples]
        self.num_targets: np.ndarray = table.column("num_targets").to_numpy()  # [num_samples]
        held = [name for name, reads in (("input_ids", reads_inputs), ("labels", reads_labels)) if reads]
        self._columns = {name: _ListColumn(table.column(name)) for name in held}

    def __reduce__(self) -> tuple:
        # A worker process that is spawned opens the folder itself: pickling the views would copy the data.
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.lengths)

    def input_ids(self, index: int) -> np.ndarray:
        return self._read("input_ids", index)

    def labels(self, index: int) -> np.ndarray:
        return self._read("labels", index)

    def _read(self, name: str, index: int) -> np.ndarray:
        if name not in self._columns:
            raise RuntimeError(f"this rank does not hold {name}: the dataset was opened without that column")
        return self._columns[name][index]


class _ListColumn:
    """Zero-copy rows of an Arrow column of lists; indexing through `datasets` costs a hundred times as much."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._values = [chunk.values.to_numpy() for chunk in chunks]
        self._starts = np.cumsum([0] + [len(chunk) for chunk in chunks])

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"sample {index} of {self._starts[-1]}")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        begin, end = self._offsets[chunk][index - self._starts[chunk] :][:2]
        return self._values[chunk][begin:end]
