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

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import constants, get_session

from data.sources.formats import RawRecord, encode_row
from errors import UserError

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")
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
    """Return the cache files of the data set's current version, which change when the source does."""
    return sorted("/".join(Path(file["filename"]).parts[-VERSION_PARTS:]) for file in load_hub(source).cache_files)


def read_hub(source: str) -> Iterator[RawRecord]:
    """Yield every record, in order."""
    for number, record in enumerate(load_hub(source), start=1):
        # A column may hold dates or bytes, which JSON cannot express; the fields that are trained on are text.
        yield encode_row(record, f"{source}: record {number}")


@cache
def load_hub(source: str) -> Dataset:
    """Load the data set of a source. Raises `UserError` when it cannot be loaded."""
    name, options = parse_hub(source)
    try:
        with _offline_unless_reached(name):
            return load_dataset(name, options.get("config"), split=options["split"], revision=options.get("revision"))
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
