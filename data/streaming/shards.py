"""The shards of a stream: the files that `train_file` names, and those that a data set of the hub is stored in.

What the order of samples depends on is their list, so a checkpoint keeps it, and names the shards that differ.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.components import TARGET, describe_component
from data.sources.hub import PREFIX as HUB_PREFIX
from data.sources.hub import list_hub_files
from data.sources.indexed import PREFIX as INDEXED_PREFIX
from data.sources.records import COMPONENT_PREFIX, resolve_sources
from errors import UserError
from filesystem import hash_ends

HASHED_BYTES = 2**14  # of each end of a file: there may be a hundred thousand of them
MOST_NAMED = 3  # shards that a message names


@dataclass(frozen=True)
class Shard:
    """A part of the training data that is read from its beginning to its end.

    source: as `data/sources/records.py` names it. part: the number of a file of a data set of the hub; else 0.
    name: without folders. content: its size and a hash of both ends; of a file of the hub, its
    commit.
    """

    source: str
    part: int
    name: str
    content: str

    def describe(self) -> list[str]:
        """Return what a checkpoint keeps: a shard may be moved to another folder."""
        return [self.name, self.content]


def list_shards(entries: Sequence[str], key: str) -> list[Shard]:
    """Return the shards of the files, globs and hub names of a key, in their order. Raises UserError for a source that
    cannot be opened, or needs no streaming."""
    return [shard for source in resolve_sources(entries, key) for shard in _split_source(source, key)]


def _split_source(source: str, key: str) -> list[Shard]:
    if source.startswith(INDEXED_PREFIX):
        raise UserError(
            f"{key}: {source.removeprefix(INDEXED_PREFIX)}.bin is tokenized already, and is read in place; give "
            "data.streaming=false"
        )
    if source.startswith(HUB_PREFIX):
        return [Shard(source, part, *file) for part, file in enumerate(list_hub_files(source))]
    if source.startswith(COMPONENT_PREFIX):
        spec = json.loads(source.removeprefix(COMPONENT_PREFIX))
        state = json.dumps([source, describe_component(spec)])
        return [Shard(source, 0, spec[TARGET], xxhash.xxh3_64_hexdigest(state.encode()))]
    return [Shard(source, 0, Path(source).name, _describe_file(source))]


def _describe_file(source: str) -> str:
    return f"{os.path.getsize(source):,} bytes, hash {hash_ends(Path(source), HASHED_BYTES)[:8]}"


def check_unchanged(shard: Shard, key: str) -> None:
    """Raise UserError for a file that is no longer what it was when the shards were listed: the order of samples, and
    the place at which a resume continues, would be those of another file. key: of the file, for the message."""
    if shard.source.startswith((HUB_PREFIX, COMPONENT_PREFIX)):
        return
    try:
        found = _describe_file(shard.source)
    except OSError:
        return  # what reads it names the reason
    if found != shard.content:
        raise UserError(
            f"{key}: {shard.source} has changed since the run began: it was {shard.content}, is {found}. A stream "
            "reads its files while it trains; put the file back and continue with resume=auto"
        )


def find_changes(before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Return two lists of shards in words, equal where the lists are; otherwise the first shards that differ.

    before, after: of each shard what `Shard.describe` returns.
    """
    names = [f"{len(shards):,} shards" for shards in (before, after)]
    one, two = ([tuple(shard) for shard in shards] for shards in (before, after))
    if one == two:
        return names[0], names[1]
    texts: list[Any] = []
    for name, own, others in zip(names, (one, two), (two, one)):
        found = set(others)
        differing = [f"{shard[0]} of {shard[1]}" for shard in own if shard not in found]
        named = "; ".join(differing[:MOST_NAMED])
        more = f" and {len(differing) - MOST_NAMED:,} more" if len(differing) > MOST_NAMED else ""
        texts.append(f"{name}, among them {named}{more}" if differing else name)
    return (texts[0], texts[1]) if texts[0] != texts[1] else (texts[0], f"{texts[1]} in another order")
