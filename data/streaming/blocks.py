"""The records of a stream, block by block: a function of the seed and the list of shards.

In each pass the shards come in another order, drawn from (seed, pass), and are read one after the other. Consecutive
records are a block, which ends after `block_records`, or at a number of characters, and always with the pass. A block
knows nothing of those before it, so a stream continues at any of them without a record being tokenized twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from console import pluralize
from data.order import permute
from data.sources.formats import RawRecord
from data.sources.offsets import RecordOffset, read_from
from data.streaming.shards import Shard, check_unchanged
from errors import UserError

MAX_BLOCK_CHARACTERS = 2**24  # a record may be a whole book
START = RecordOffset()


@dataclass(frozen=True)
class Position:
    """Where a block begins. pass_number, block: counted from 0, the block within its pass. shard: a position in the
    pass's order of shards."""

    pass_number: int = 0
    block: int = 0
    shard: int = 0
    offset: RecordOffset = START

    @property
    def next_pass(self) -> "Position":
        """The beginning of the pass after this one."""
        return Position(self.pass_number + 1)


@dataclass(frozen=True)
class Cursor:
    """Where a stream continues: at a row of a block. row: counted from 0, in the order of training."""

    position: Position = Position()
    row: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Cursor":
        """Return the cursor of `to_json`."""
        position = dict(fields["position"])
        return cls(Position(**position | {"offset": RecordOffset(**position["offset"])}), fields["row"])


@dataclass
class RecordBlock:
    """Consecutive records. shards: the number of the shard of each, as the list has them."""

    position: Position
    records: list[RawRecord] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    num_characters: int = 0


def order_shards(num_shards: int, seed: int, pass_number: int) -> np.ndarray:
    """Return the shards of a pass in its order, int64 [num_shards]."""
    return permute(np.arange(num_shards), num_shards, seed, pass_number)


def read_blocks(
    shards: Sequence[Shard], position: Position, *, seed: int, block_records: int, key: str
) -> Iterator[RecordBlock]:
    """Yield the blocks from `position` on, pass after pass, without end.

    key: of the files, for messages. Raises UserError for a shard that cannot be read or has changed since it was
    listed, and where none holds a record.
    """
    while True:
        found = False
        for block in _read_pass(shards, position, seed, block_records, key):
            found = True
            yield block
        if not found and position == Position(position.pass_number):
            raise UserError(f"{key} holds no records ({pluralize(len(shards), 'shard')}); give files that do")
        position = position.next_pass


def _read_pass(
    shards: Sequence[Shard], start: Position, seed: int, block_records: int, key: str
) -> Iterator[RecordBlock]:
    order = order_shards(len(shards), seed, start.pass_number).tolist()
    block = RecordBlock(start)
    for index in range(start.shard, len(order)):
        shard = shards[order[index]]
        check_unchanged(shard, key)
        offset = start.offset if index == start.shard else START
        for record, after in read_from(shard.source, shard.part, offset):
            block.records.append(record)
            block.shards.append(order[index])
            block.num_characters += len(record.text)
            if len(block.records) == block_records or block.num_characters >= MAX_BLOCK_CHARACTERS:
                yield block
                block = RecordBlock(replace(block.position, block=block.position.block + 1, shard=index, offset=after))
    if block.records:
        yield block
