"""The training data of a run that streams them: its shards, where it begins in them, and what a resume must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.streaming.blocks import Cursor
from data.streaming.shards import Shard, find_changes, list_shards
from data.streaming.stream import VERSION, StreamPlan
from errors import UserError
from training.config.schema import RunConfig
from training.inputs.datasets import build_encoding, build_row_plan, describe_choices, list_entries

KEY = "train_file"
SHARDS = "the shards of train_file"  # what messages call them


@dataclass(frozen=True)
class StreamStart:
    """What all ranks must agree on. first_step: the step at which the stream is at the cursor."""

    shards: tuple[Shard, ...]
    cursor: Cursor
    first_step: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, the cursor aside."""
        return {"shards": [shard.describe() for shard in self.shards]}


def open_stream(config: RunConfig) -> StreamStart | None:
    """Return the beginning of the run's stream, None for a run that streams nothing. Raises UserError for shards that
    cannot be opened."""
    if not config.data.streaming or config.evaluate_only:
        return None
    return StreamStart(tuple(list_shards(list_entries(config, KEY), KEY)), Cursor())


def describe_stream(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return what determines the rows of a stream beyond its shards: name -> value."""
    return describe_choices(config) | {
        "data.streaming": f"true, order {VERSION}",
        "data.shuffle_block": str(config.data.shuffle_block),
        "the hash of encoder, tokenizer and their options": build_encoding(config, KEY, tokenizer).compute_key([]),
    }


def compare_shards(saved: Mapping[str, Any], start: StreamStart) -> tuple[dict[str, str], dict[str, str]]:
    """Return the shards of a checkpoint and those of this run, in words that differ where they do: name -> value.

    saved: what the checkpoint keeps of its stream.
    """
    before, after = find_changes(saved.get("shards", []), start.to_json()["shards"])
    return {SHARDS: before}, {SHARDS: after}


def resume_stream(saved: Mapping[str, Any], start: StreamStart, step: int, say: Callable[[str], None]) -> StreamStart:
    """Return the stream at the place where the checkpoint of a step left it; at the beginning of the next pass where
    the shards are others, which `resume_allow_changes` allows. saved: see `compare_shards`."""
    if "cursor" not in saved:  # of a run that did not stream
        return StreamStart(start.shards, Cursor(), step)
    cursor = Cursor.from_json(saved["cursor"])
    before, after = compare_shards(saved, start)
    if before != after:
        cursor = Cursor(cursor.position.next_pass)
        say(f"resume: the shards of train_file are others; pass {cursor.position.pass_number + 1} over them begins")
    return StreamStart(start.shards, cursor, step)


def build_stream_plan(config: RunConfig, start: StreamStart, tokenizer: PreTrainedTokenizerBase) -> StreamPlan:
    """Return what the rows of the stream depend on. Raises UserError where this rank finds other shards than the main
    one, or cannot open them."""
    own = open_stream(config)
    assert own is not None
    before, after = compare_shards(start.to_json(), own)
    if before != after:
        raise UserError(
            f"train_file: this host has other shards than the main one: {before[SHARDS]} there, {after[SHARDS]} here; "
            "give all hosts the same files"
        )
    return StreamPlan(
        shards=own.shards,
        encoding=build_encoding(config, KEY, tokenizer),
        row_plan=build_row_plan(config, KEY),
        seed=config.seed,
        block_records=config.data.shuffle_block,
        key=KEY,
    )
