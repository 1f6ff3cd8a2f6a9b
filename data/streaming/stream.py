"""The rows of a stream, tokenized ahead of training by worker processes, in an order that no layout changes.

A block's rows are shuffled among themselves, by (seed, pass, block). Each worker reads the records of all blocks, which
is cheap, and tokenizes every n-th one, so the sequence of rows is the same for any number of workers. No token is
written to the disk: memory holds the blocks that are being trained on and two ahead of each worker.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from console import pluralize
from data.order import permute
from data.storage.encoding import Encoding, encode_batch
from data.storage.rows import RowPlan
from data.storage.summary import BatchCounts
from data.streaming.blocks import Cursor, Position, RecordBlock, read_blocks
from data.streaming.row_block import RowBlock, join_rows, lay_rows
from data.streaming.shards import Shard
from data.worker_processes import iterate_dataset
from errors import UserError

VERSION = 1  # raise it when the same seed and shards give other rows


@dataclass(frozen=True)
class StreamPlan:
    """The inputs that determine the rows of a stream. block_records: see `data/streaming/blocks.py`. key: of the
    files."""

    shards: tuple[Shard, ...]
    encoding: Encoding
    row_plan: RowPlan
    seed: int
    block_records: int
    key: str = "train_file"

    def encode(self, block: RecordBlock) -> "EncodedBlock":
        """Return the rows of a block, shuffled. Raises UserError for a bad record, unless bad records are skipped."""
        encoded = encode_batch(block.records, self.encoding, block.shards)
        rows, position = None, block.position
        if len(encoded.columns["length"]):
            rows = lay_rows(encoded.columns, self.row_plan)
            order = permute(np.arange(len(rows)), len(rows), self.seed, position.pass_number, position.block)
            rows = rows.take(order)
        return EncodedBlock(position, rows, encoded.counts)


@dataclass(frozen=True)
class EncodedBlock:
    """The rows of a block, None where it has none. problem: the message of what is wrong with its records or
    shards."""

    position: Position
    rows: RowBlock | None = None
    counts: BatchCounts = field(default_factory=BatchCounts)
    problem: str = ""


class _EncodedBlocks(IterableDataset):
    """The blocks from a position on; in a worker process, those that are its share."""

    def __init__(self, plan: StreamPlan, position: Position) -> None:
        self._plan, self._position = plan, position

    def __iter__(self) -> Iterator[EncodedBlock]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
        plan, position = self._plan, self._position
        try:
            blocks = read_blocks(plan.shards, position, seed=plan.seed, block_records=plan.block_records, key=plan.key)
            for index, block in enumerate(blocks):
                position = block.position
                if index % count == number:
                    yield plan.encode(block)
        except UserError as error:  # as text: torch would put a stack trace around it
            yield EncodedBlock(position, problem=str(error))


class RowStream:
    """Reads a stream from a cursor on, forward only. counts: of the records that were read so far."""

    def __init__(self, plan: StreamPlan, cursor: Cursor, num_workers: int = 0) -> None:
        self._plan, self._num_workers = plan, num_workers
        self._cursor = cursor
        self._blocks: Iterator[EncodedBlock] | None = None
        self._rows: RowBlock | None = None  # of the block at the cursor
        self._has_rows = {cursor.position.pass_number: cursor != Cursor(Position(cursor.position.pass_number))}
        self.counts = BatchCounts()

    @property
    def cursor(self) -> Cursor:
        """The row that is read next."""
        return self._cursor

    def take(self, count: int) -> RowBlock:
        """Return the next `count` rows. Raises UserError for a bad record, and for shards without any usable one."""
        taken: list[RowBlock] = []
        while count:
            if self._rows is None:
                self._advance()
                continue
            first = self._cursor.row
            last = max(first, min(len(self._rows), first + count))
            if first < last:
                taken.append(self._rows.slice(first, last))
            count -= last - first
            self._cursor = Cursor(self._cursor.position, last)
            if last >= len(self._rows):
                self._rows = None
        return join_rows(taken)

    def close(self) -> None:
        """End the worker processes; nothing is taken afterwards."""
        self._blocks = iter(())

    def _advance(self) -> None:
        """Read the next block; of the first one, the rows before the cursor are left out."""
        if self._blocks is None:
            self._blocks = _iterate_blocks(self._plan, self._cursor.position, self._num_workers)
            row = self._cursor.row
        else:
            row = 0
        block = next(self._blocks)
        if block.problem:
            raise UserError(block.problem)
        self.counts.add(block.counts)
        self._check_pass(block)
        self._rows, self._cursor = block.rows, Cursor(block.position, row)

    def _check_pass(self, block: EncodedBlock) -> None:
        """Raise UserError after a whole pass without a row: the next one has none either."""
        number = block.position.pass_number
        if not self._has_rows.get(number - 1, True):
            reason = f"; the first: {self.counts.examples[0]}" if self.counts.examples else ""
            raise UserError(
                f"{self._plan.key}: none of the {pluralize(self.counts.num_records, 'record')} of its "
                f"{pluralize(len(self._plan.shards), 'shard')} is left to train on{reason}; fix the data, "
                "data.filter, data.length_policy or max_seq_length"
            )
        self._has_rows[number] = self._has_rows.get(number, False) or block.rows is not None


def _iterate_blocks(plan: StreamPlan, position: Position, num_workers: int) -> Iterator[EncodedBlock]:
    blocks = _EncodedBlocks(plan, position)
    if not num_workers:
        return iter(blocks)
    return iterate_dataset(blocks, num_workers=num_workers)
