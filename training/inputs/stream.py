"""The training data of a run that streams them: its shards, where it begins in them, and what a resume must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data.streaming.blocks import Cursor
from data.streaming.shards import Shard, find_changes

SHARDS = "the shards of train_file"  # what messages call them


@dataclass(frozen=True)
class StreamStart:
    """The beginning of a run in its stream, on which all ranks agree. first_step: the step at which the stream is at
    the cursor."""

    shards: tuple[Shard, ...]
    cursor: Cursor
    first_step: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, the cursor aside."""
        return {"shards": [shard.describe() for shard in self.shards]}


def compare_shards(saved: Mapping[str, Any], start: StreamStart) -> tuple[dict[str, str], dict[str, str]]:
    """Return the shards of a checkpoint and those of this run, in words that differ where they do: name -> value.

    saved: what the checkpoint keeps of its stream.
    """
    before, after = find_changes(saved.get("shards", []), start.to_json()["shards"])
    return {SHARDS: before}, {SHARDS: after}


def resume_stream(
    saved: Mapping[str, Any], start: StreamStart, step: int, say: Callable[[str], None], is_alike: bool = True
) -> StreamStart:
    """Return the stream at the place where the checkpoint of a step left it; at the beginning of the next pass where
    the shards are others, or their rows, which `resume_allow_changes` allows: the place is a number of a row in a block
    of a shard, by the order of before.

    saved: see `compare_shards`. is_alike: whether the order and the rows of a shard are those of before.
    """
    if "cursor" not in saved:  # of a run that did not stream
        return StreamStart(start.shards, Cursor(), step)
    cursor = Cursor.from_json(saved["cursor"])
    before, after = compare_shards(saved, start)
    if before != after or not is_alike:
        cursor = Cursor(cursor.position.next_pass)
        what = "the shards of train_file are others" if before != after else "the rows of train_file are others"
        say(f"resume: {what}; pass {cursor.position.pass_number + 1} over them begins")
    return StreamStart(start.shards, cursor, step)
