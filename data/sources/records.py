"""From the value of `train_file` or `eval_file` to raw records.

A source is one file, whose name gives its format (`data/sources/formats.py`), `hf:NAME`, a data set of the hub
(`data/sources/hub.py`), a tokenized corpus (`data/sources/indexed.py`), or `own:SPEC`, a user-defined function that
returns records (`data/components.py`). A record travels as JSON text and is parsed where it is tokenized, so that
parsing is spread over the processes too. An error in a file raises `UserError`; one in a single record travels with
it, so that the record can be skipped.
"""

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.components import TARGET, build_component
from data.sources import formats
from data.sources.formats import RawRecord, describe_json_error, read_file
from data.sources.hub import PREFIX as HUB_PREFIX
from data.sources.hub import load_hub, parse_hub, read_hub
from data.sources.indexed import PREFIX as INDEXED_PREFIX
from data.sources.indexed import find_prefix
from errors import UserError

COMPONENT_PREFIX = "own:"
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def resolve_sources(files: str | Sequence[str], key: str) -> list[str]:
    """Expand a path, a glob, `hf:NAME`, or a list of these into sources; `key` is the config key that errors name."""
    entries = [files] if isinstance(files, str) else list(files or ())
    if not entries or not all(isinstance(entry, str) and entry for entry in entries):
        raise UserError(f"{key} is empty; give a path, a glob, a list of these, or hf:NAME")
    return [source for entry in entries for source in _resolve_entry(entry, key)]


def _resolve_entry(entry: str, key: str) -> list[str]:
    if entry.startswith(HUB_PREFIX):
        parse_hub(entry)
    if entry.startswith((HUB_PREFIX, COMPONENT_PREFIX)):
        return [entry]
    path = os.path.expanduser(entry)
    # An existing file takes precedence over a pattern: its name may hold brackets.
    matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    prefixes = [find_prefix(match) for match in matches or [path]]
    if any(prefixes):
        if not all(prefixes):
            raise UserError(f"{key}: {path} matches tokenized corpora (.bin, .idx) and other files; give them apart")
        return [f"{INDEXED_PREFIX}{prefix}" for prefix in dict.fromkeys(prefixes)]
    files = [match for match in matches if os.path.isfile(match)]
    if not files:
        raise UserError(f"{key}: {_describe_missing(path)}")
    for file in files:
        if not os.access(file, os.R_OK):
            raise UserError(f"{key}: no permission to read {file}; change its mode or its owner")
    return files


def _describe_missing(path: str) -> str:
    if os.path.isdir(path):
        return f"{path} is a folder; give the files in it, for instance {os.path.join(path, '*.jsonl')}"
    what = "no file matches" if glob.has_magic(path) else "no such file:"
    where = "" if os.path.isabs(path) else f" (relative to {os.getcwd()})"
    return f"{what} {path}{where}; check the path"


def read_records(source: str) -> Iterator[RawRecord]:
    """Yield every record of a source, in order. Raises `UserError` for a source that cannot be read."""
    if source.startswith(COMPONENT_PREFIX):
        return _read_own(source)
    return read_hub(source) if source.startswith(HUB_PREFIX) else read_file(source)


def estimate_num_records(source: str, first: Sequence[RawRecord]) -> float | None:
    """Estimate the number of records of a source; None for a user-defined function, which would have to be called.

    first: the first records of this source or of one like it.
    """
    if source.startswith(COMPONENT_PREFIX):
        return None
    return len(load_hub(source)) if source.startswith(HUB_PREFIX) else formats.estimate_num_records(source, first)


def name_component_source(spec: Mapping[str, Any]) -> str:
    """Return the source that stands for the records of a user-defined function; its text is part of the cache's key."""
    return COMPONENT_PREFIX + json.dumps(dict(spec), sort_keys=True)


def _read_own(source: str) -> Iterator[RawRecord]:
    spec = json.loads(source.removeprefix(COMPONENT_PREFIX))
    for number, record in enumerate(build_component(spec, TARGET), start=1):
        location = f"{spec[TARGET]}: record {number}"
        try:
            yield RawRecord(location, json.dumps(record))
        except (TypeError, ValueError) as error:
            yield RawRecord(
                location,
                problem=f"{location}: cannot be written as JSON: {error}; return text, numbers, lists and dicts",
            )


def parse_record(location: str, json_text: str) -> dict:
    """Return the record as a dict. Raises `UserError` naming `location` for text that is not one JSON object."""
    try:
        record = json.loads(
            json_text.rstrip("\r\n")
        )  # else an error at the end is reported in column 1 of the next line
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{location}: not valid JSON: {describe_json_error(error)}; fix or remove the line "
            "(JSON lines hold one whole object per line)"
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{location}: a record must be a JSON object, not a {type(record).__name__}; fix or remove it")
    if HALF_PAIR.search(json_text):  # UTF-8 text holds none but in such an escape, and whole pairs are escaped so too
        _check_characters(record, location)
    return record


def _check_characters(record: dict, location: str) -> None:
    """Raise `UserError` for half of a surrogate pair in a record: tokenizers and files take whole characters alone."""
    for name, value in record.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                f"{location}: field {name!a} holds half of a surrogate pair, which is not a character; fix or remove "
                "the record"
            ) from None
