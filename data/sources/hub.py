"""Data sets of the hub, or of a folder, through `datasets`: `hf:NAME`, `hf:NAME:SPLIT`, or
`hf:NAME?config=...&split=...&revision=...`, with any of the three.

`datasets` looks for changes at the source each time a run starts, and keeps what it has read of each state in a folder
of its own, whose name is therefore a part of the name of our tokens.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import constants, get_session

from data.sources.formats import RawRecord, drop_absent
from errors import UserError

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")
HUB_SECONDS = 5  # to answer at all
FOLDERS_OF_A_STATE = 5  # NAME/CONFIG-HASH/VERSION/HASH/file.arrow: the same wherever the cache lies


def parse_hub(source: str) -> tuple[str, dict[str, str]]:
    """The name and the options of a source. Raises `UserError` for options that are none."""
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
    """What names the state of the data set: another one, and other tokens, once the source has changed."""
    return sorted("/".join(Path(file["filename"]).parts[-FOLDERS_OF_A_STATE:]) for file in load_hub(source).cache_files)


def read_hub(source: str) -> Iterator[RawRecord]:
    """Every record, in order."""
    for number, record in enumerate(load_hub(source), start=1):
        # A column may hold dates or bytes, which JSON has no word for; the fields that are trained on are text.
        yield RawRecord(f"{source}: record {number}", json.dumps(drop_absent(record), default=str))


@cache
def load_hub(source: str) -> Dataset:
    """Raises `UserError` when it cannot be loaded."""
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
    """Without a network the hub is asked again and again for 23 s (huggingface_hub 2.4.0); offline, it looks for a copy
    in its cache at once.
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
    except Exception:  # of whichever HTTP library the hub is asked with
        return False
    return True
