"""Data sets of the hub, or of a folder, through `datasets`: `hf:NAME`, `hf:NAME:SPLIT`, or
`hf:NAME?config=...&split=...&revision=...` with any of the three options.

`datasets` looks for changes at the source each time a run starts, and caches each version in a folder of its own. The
name of that folder is part of the key of our tokenized cache.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl

import pyarrow
import xxhash
from datasets import Dataset, DatasetBuilder, IterableDataset, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetsError
from huggingface_hub import constants, get_session

from data.sources.formats import RawRecord, encode_row
from errors import UserError

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")
BATCH_RECORDS = 1000  # that are read at a time
HUB_SECONDS = 5  # timeout of the request that checks whether the hub can be reached
VERSION_PARTS = 5  # NAME/CONFIG-HASH/VERSION/HASH/file.arrow: the same wherever the cache is


def parse_hub(source: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of a source. Raises `UserError` for unknown or empty options."""
    name, has_options, query = source.removeprefix(PREFIX).partition("?")
    if not has_options:
        name, _, split = name.partition(":")
        return name, {"split": split or "train"}
    options = dict(parse_qsl(query, keep_blank_values=True))
    wrong = [key for key in options if key not in OPTIONS or not options[key]]
    if wrong or not options or not name:
        raise UserError(
            f"{source}: cannot be read; give hf:NAME?config=...&split=...&revision=... with one of the three or more"
        )
    return name, {"split": "train", **options}


def describe_hub(source: str) -> list[str]:
    """Return the cache files of the data set's current version, which change when the source does; of one that is held
    in memory, which has none, a hash of its records."""
    dataset = load_hub(source)
    files = sorted("/".join(Path(file["filename"]).parts[-VERSION_PARTS:]) for file in dataset.cache_files)
    return files or [_hash_records(dataset)]


def _hash_records(dataset: Dataset) -> str:
    digest = xxhash.xxh3_128(str(dataset.features).encode())
    for batch in dataset.data.table.to_batches():
        digest.update(batch.serialize())
    return digest.hexdigest()


def read_hub(source: str) -> Iterator[RawRecord]:
    """Yield every record, in order."""
    for number, record in enumerate(load_hub(source), start=1):
        # A column may hold dates or bytes, which JSON cannot express; the fields that are trained on are text.
        yield encode_row(record, f"{source}: record {number}")


@cache
def load_hub(source: str) -> Dataset:
    """Load the data set of a source. Raises `UserError` when it cannot be loaded."""
    name, options = parse_hub(source)
    with _explaining(source), _offline_unless_reached(name):
        return load_dataset(name, options.get("config"), split=options["split"], revision=options.get("revision"))


@cache
def open_hub(source: str) -> IterableDataset:
    """Open the data set of a source without downloading it. Raises `UserError` when it cannot be opened."""
    with _explaining(source), _offline_unless_reached(parse_hub(source)[0]):
        return _open_builder(source).as_streaming_dataset(split=parse_hub(source)[1]["split"])


def list_hub_files(source: str) -> list[tuple[str, str]]:
    """Return name and version of each file that the data set is stored in: of the hub its commit, of a folder the time
    of its change. Raises `UserError` when it cannot be opened."""
    number, builder = open_hub(source).num_shards, _open_builder(source)
    files = (builder.config.data_files or {}).get(parse_hub(source)[1]["split"], [])
    if len(files) == number:
        versions = [" ".join(map(str, origin)) for origin in files.origin_metadata]
        return [(str(file).rpartition("/")[2], version) for file, version in zip(files, versions, strict=True)]
    version = xxhash.xxh3_64_hexdigest(repr((builder.hash, builder.config.data_files, number)).encode())
    return [(f"file {place + 1}", version) for place in range(number)]  # such as those in an archive


def read_hub_file(source: str, file: int, first: int = 0) -> Iterator[RawRecord]:
    """Yield every record of one of the files of `list_hub_files`, without the `first` ones. Nothing is kept on the
    disk. Raises `UserError` when it cannot be read."""
    dataset = open_hub(source)
    part = dataset.shard(dataset.num_shards, file)
    number = first
    try:
        # `iter` and not `__iter__`, which shares the records out among the workers of a torch DataLoader
        for batch in part.skip(first).iter(BATCH_RECORDS):
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield encode_row(dict(zip(batch, values)), f"{source}: file {file + 1}, record {number}")
    except (OSError, ValueError, DatasetsError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{source}: file {file + 1} cannot be read after record {number}: {reason}; check the network and the file"
        ) from None


@cache
def _open_builder(source: str) -> DatasetBuilder:
    name, options = parse_hub(source)
    return load_dataset_builder(name, options.get("config"), revision=options.get("revision"))


@contextmanager
def _explaining(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{source}: cannot be loaded: {reason}; check the name, the split and the config "
            "(hf:NAME?config=...&split=...) and the network"
        ) from None


@contextmanager
def _offline_unless_reached(name: str) -> Iterator[None]:
    """Switch to offline mode where the hub cannot be reached: huggingface_hub 2.4.0 would retry for 23 s before it
    looks for a copy in its cache.
    """
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or not (os.path.isdir(name) or _reaches_hub())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _reaches_hub() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # of whichever HTTP library huggingface_hub uses
        return False
    return True
