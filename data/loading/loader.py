"""Stage-aware loaders: inputs where the first layer is, targets where the loss is, placeholders between.

A micro-batch is a `Batch` (`batch.py`); the half that a rank does not read is None. A rank that has a part of each
sequence, one or several of equal chunks, gets the tokens and targets of that part (shifted before they are cut), and
whole positions and segments.

A row is one sample, or several that are packed (`data/storage/rows.py`); the order and micro_batch_size count rows.
Rows that stay together, such as the two answers of a preference, count as one there: a micro-batch of pairs has 2 B
rows, of which 2 i and 2 i + 1 are a pair. Packed, a pair is in one row; documents 2 i and 2 i + 1 are a pair in both.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from batch import Batch, Inputs, Side, Targets
from data.collator import Collator, PadRight, defer_targets, number_documents, pad_segments, shift_labels
from data.loading.columns import ReadColumn, ReadRows
from data.loading.row_lengths import compute_seq_length
from data.loading.row_source import RowSource
from data.loading.step_totals import BatchShape, StepTotals, compute_step_totals, count_further
from data.options import MeanOver, Packing, PadTo, RowTargets
from data.order import GlobalOrder, Ids, micro_batch_ids
from data.storage.rows import RowPlan, Rows, list_rows
from data.storage.sample_names import name_samples
from data.worker_processes import iterate_dataset


@dataclass(frozen=True)
class LoaderOptions:
    """Which parts this rank reads, and the shape of its micro-batches. The rank of a single stage reads both halves."""

    reads_inputs: bool  # the rank holds the first layer
    reads_labels: bool  # the rank holds the loss
    dp_rank: int
    dp_size: int
    micro_batch_size: int
    row_plan: RowPlan
    pad_token_id: int
    chunks: tuple[int, ...] = (0,)  # those of each sequence that the rank reads, in this order
    num_chunks: int = 1  # equal chunks per sequence
    length_multiple: int = 1  # T is a multiple of this and of num_chunks
    pad_to: PadTo = PadTo.longest
    row_targets: RowTargets = RowTargets.next_tokens
    mean_over: MeanOver = MeanOver.targets
    num_workers: int = 0
    pin_memory: bool = False
    collator: Collator = field(default_factory=PadRight)
    num_further: int = 0  # depths of further tokens that are predicted
    columns: tuple[ReadColumn, ...] = ()  # what a micro-batch carries besides tokens and targets

    @property
    def reads_nothing(self) -> bool:
        return not (self.reads_inputs or self.reads_labels)

    @property
    def max_seq_length(self) -> int:
        return self.row_plan.max_seq_length

    @property
    def rows_per_group(self) -> int:
        return self.row_plan.rows_per_group

    def take_micro_batch(self, ids: Ids, number: int) -> Ids:
        """Return the ids of this rank's micro-batch `number`. ids: those of a global batch, or all."""
        return micro_batch_ids(
            ids, number, dp_rank=self.dp_rank, dp_size=self.dp_size, micro_batch_size=self.micro_batch_size
        )

    @property
    def num_parts(self) -> int:
        """The number of ranks that share each sequence."""
        return self.num_chunks // len(self.chunks)

    def take_part(self, tokens: Tensor) -> Tensor:
        """Return this rank's chunks of rows [B, T]."""
        width = tokens.shape[1] // self.num_chunks
        return torch.cat([tokens[:, chunk * width : (chunk + 1) * width] for chunk in self.chunks], dim=1)

    def compute_seq_length(self, lengths: np.ndarray) -> int:
        """Return T of a step whose rows have these lengths."""
        return compute_seq_length(
            lengths, self.pad_to, self.max_seq_length, math.lcm(self.num_chunks, self.length_multiple)
        )


@dataclass(frozen=True)
class _Step:
    """A step, as its micro-batches share it."""

    number: int
    rows: RowSource
    groups: np.ndarray  # int64 [global_batch_size], of the rows
    seq_length: int
    totals: StepTotals
    further_terms: tuple[int, ...]  # the targets of each further depth


class StepLoader(ABC):
    """The micro-batches of any range of steps; where their rows come from, a subclass knows."""

    def __init__(self, options: LoaderOptions, global_batch_size: int, gradient_accumulation_steps: int) -> None:
        self._options = options
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._step: _Step | None = None  # the last one
        per_step = options.micro_batch_size * options.dp_size * gradient_accumulation_steps
        if per_step != global_batch_size:
            raise ValueError(f"the ranks read {per_step} samples a step, the order has {global_batch_size}")

    @abstractmethod
    def _open_step(self, step: int) -> tuple[RowSource, np.ndarray]:
        """Return rows, and which of their groups are the step's global batch, int64 [global_batch_size]."""

    def describe_position(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint at the step keeps; nothing where samples are a function of the step."""
        return {}

    def describe_records(self) -> str:
        """Return in words what became of the records that were read; empty where that was known before the run."""
        return ""

    def close(self) -> None:
        """Forget the last step, and end what reads ahead of it where that outlives the iterators."""
        self._step = None

    def step_totals(self, step: int) -> StepTotals:
        """Return the totals of the step's global batch."""
        return self._describe(step).totals

    def iterate(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """Yield the gradient_accumulation_steps micro-batches of each step from `start_step` to before `end_step`."""
        per_step = self._gradient_accumulation_steps
        return _iterate(self._build_batch, range(start_step * per_step, end_step * per_step), self._options)

    def _build_batch(self, index: int) -> Batch:
        number, micro_batch = divmod(index, self._gradient_accumulation_steps)
        options, step = self._options, self._describe(number)
        groups = options.take_micro_batch(step.groups, micro_batch)
        terms = (step.totals.count_terms(options.mean_over), *step.further_terms)
        shares = options.dp_size * options.num_parts * self._gradient_accumulation_steps
        denominators = [max(1, count) / shares for count in terms]  # without a target the sum is 0, and so is the loss
        return _collate(step.rows, groups, step.seq_length, denominators=denominators, options=options)

    def _describe(self, number: int) -> _Step:
        if self._step is None or self._step.number != number:
            options = self._options
            rows, groups = self._open_step(number)
            row_ids = list_rows(groups, options.rows_per_group)
            seq_length = options.compute_seq_length(rows.lengths[row_ids])
            shape = None
            if isinstance(options.collator, PadRight):
                shape = BatchShape(options.micro_batch_size * options.rows_per_group, seq_length)
            totals = compute_step_totals(rows, row_ids, options.row_plan.group_size, shape)
            further = count_further(rows, row_ids, options.num_further) if options.reads_labels else ()
            self._step = _Step(number, rows, groups, seq_length, totals, further)
        return self._step


class TrainLoader(StepLoader):
    """The micro-batches of a tokenized folder, in the global order. first: the loader of the forward pass before each
    step, if any."""

    first: "TrainLoader | PlaceholderLoader | None" = None

    def __init__(
        self, path: str | Path, options: LoaderOptions, order: GlobalOrder, gradient_accumulation_steps: int
    ) -> None:
        self._order, self._path = order, Path(path)
        self._rows = _open_rows(path, options, order.num_samples)
        super().__init__(options, order.global_batch_size, gradient_accumulation_steps)

    def __len__(self) -> int:
        return self._order.steps_per_epoch

    def name_samples(self, step: int) -> str:
        """Return the samples of the step's global batch in words."""
        samples = self._rows.list_samples(list_rows(self._order.sample_ids(step), self._options.rows_per_group))
        return f"samples of train_file: {name_samples(self._path, samples)}"

    def _open_step(self, step: int) -> tuple[RowSource, np.ndarray]:
        return self._rows, self._order.sample_ids(step)


class EvalLoader:
    """Every sample exactly once over all data-parallel ranks, in the same number of micro-batches on each.

    A short batch is filled with rows whose labels are all -100: they add 0 to the sum of losses. first: the loader of
    the forward pass before the evaluation, if there is one.
    """

    first: "EvalLoader | PlaceholderLoader | None" = None

    def __init__(self, path: str | Path, options: LoaderOptions, num_samples: int) -> None:
        self._options = options
        self._num_samples = num_samples
        self._rows = _open_rows(path, options, num_samples)
        self._seq_length = options.compute_seq_length(self._rows.lengths)
        self.num_targets = int(self._rows.num_targets.sum(dtype=np.int64))
        self.num_micro_batches = _count_eval_micro_batches(num_samples, options)

    def __len__(self) -> int:
        return self.num_micro_batches

    def iterate(self) -> Iterator[Batch]:
        """Yield `num_micro_batches` batches whose loss is a sum; over all ranks they hold `num_targets` targets."""
        return _iterate(self._build_batch, range(self.num_micro_batches), self._options)

    def _build_batch(self, index: int) -> Batch:
        options = self._options
        ids = options.take_micro_batch(range(self._num_samples), index)
        return _collate(
            self._rows, ids, self._seq_length, denominators=[1.0] * (1 + options.num_further), options=options
        )


class ScoringLoader:
    """Every row exactly once over all data-parallel ranks, the longest first, in chunks of micro-batches of one shape.

    For values of single rows: the rows of a group are not kept together. A short chunk ends with rows whose labels are
    all -100.
    """

    def __init__(self, path: str | Path, options: LoaderOptions, micro_batches: int, num_done: int = 0) -> None:
        """micro_batches: how many of them a chunk has on each data-parallel rank; the last one may have fewer.
        num_done: rows to leave out, the first in this order, which no layout changes."""
        self._options = options
        self._rows = Rows(path, options.row_plan, options.reads_inputs, options.reads_labels)
        self._ids = np.argsort(-self._rows.lengths, kind="stable")[num_done:]
        self._per_chunk = micro_batches * options.micro_batch_size * options.dp_size

    def __len__(self) -> int:
        return -(-len(self._ids) // self._per_chunk)

    def count_rows(self, number: int) -> int:
        """Return the rows of a chunk, over all data-parallel ranks."""
        return min(self._per_chunk, len(self._ids) - number * self._per_chunk)

    def chunk(self, number: int) -> tuple[Iterator[Batch], list[np.ndarray]]:
        """Return the micro-batches of this rank in a chunk, and the rows in each."""
        options = self._options
        ids = self._ids[number * self._per_chunk : (number + 1) * self._per_chunk]
        seq_length = options.compute_seq_length(self._rows.lengths[ids])
        rows = [options.take_micro_batch(ids, index) for index in range(_count_eval_micro_batches(len(ids), options))]
        batches = (
            _collate(self._rows, batch_rows, seq_length, denominators=[1.0], options=options) for batch_rows in rows
        )
        return batches, rows


def read_singly(options: LoaderOptions, path: Path) -> LoaderOptions:
    """Return options with which a `ScoringLoader` reads the samples of a folder, each in a row of its own, in
    micro-batches of no more tokens than those of training. options: of training, by pairs or packed rows for example.
    """
    plan, alone = options.row_plan, RowPlan(options.max_seq_length)
    if plan.packing is Packing.NONE:
        return replace(options, row_plan=alone, micro_batch_size=options.micro_batch_size * plan.group_size)
    # A packed row is full with any padding, and a sample of it is short
    singly = replace(options, row_plan=alone, pad_to=PadTo.longest)
    per_row = options.max_seq_length // singly.compute_seq_length(Rows(path, alone, False, False).lengths)
    return replace(singly, micro_batch_size=options.micro_batch_size * per_row)


class PlaceholderLoader:
    """The loader of a rank between the first layer and the loss: a length for logs, and no data.

    `iterate` returns the placeholder itself; the engine of such a rank never reads a batch from it.
    """

    first: "TrainLoader | EvalLoader | PlaceholderLoader | None" = None

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def iterate(self, start_step: int = 0, end_step: int = 0) -> "PlaceholderLoader":
        return self

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __next__(self) -> NoReturn:
        self._refuse()

    def __getitem__(self, index: int) -> NoReturn:
        self._refuse()

    def step_totals(self, step: int) -> NoReturn:
        self._refuse()

    def describe_position(self, step: int) -> dict[str, Any]:
        """Return nothing: the main rank reads inputs, and writes what a checkpoint keeps."""
        return {}

    def close(self) -> None:
        """There is nothing to end."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "this rank holds neither the first layer nor the loss, so it has no data: nothing may read a batch here"
        )


def build_train_loader(
    path: str | Path, options: LoaderOptions, order: GlobalOrder, gradient_accumulation_steps: int
) -> TrainLoader | PlaceholderLoader:
    """Build the training loader of this rank; its `len` is the number of steps of an epoch."""
    if options.reads_nothing:
        return PlaceholderLoader(order.steps_per_epoch)
    return TrainLoader(path, options, order, gradient_accumulation_steps)


def build_eval_loader(path: str | Path, options: LoaderOptions, num_samples: int) -> EvalLoader | PlaceholderLoader:
    """Build the evaluation loader of this rank; its `len` is the number of micro-batches, the same on every rank."""
    if options.reads_nothing:
        return PlaceholderLoader(_count_eval_micro_batches(num_samples, options))
    return EvalLoader(path, options, num_samples)


def _count_eval_micro_batches(num_samples: int, options: LoaderOptions) -> int:
    return -(-num_samples // (options.micro_batch_size * options.dp_size))


def _open_rows(path: str | Path, options: LoaderOptions, num_rows: int) -> Rows:
    rows = Rows(path, options.row_plan, options.reads_inputs, options.reads_labels)
    # Ranks that disagree on the number of steps hang, which happens where a node has other files.
    agreed = num_rows * options.rows_per_group
    if len(rows) != agreed:
        raise RuntimeError(f"{path} holds {len(rows)} samples, but the ranks agreed on {agreed}")
    if rows.lengths.max() > options.max_seq_length:
        raise RuntimeError(f"{path} holds samples longer than max_seq_length={options.max_seq_length}")
    return rows


def _collate(
    rows: RowSource,
    groups: np.ndarray | range,
    seq_length: int,
    *,
    denominators: Sequence[float],
    options: LoaderOptions,
) -> Batch:
    """denominators: of the loss, and of those of further tokens."""
    ids = list_rows(groups, options.rows_per_group)
    shape = (options.micro_batch_size * options.rows_per_group, seq_length)
    inputs: Inputs | None = None
    targets: Targets | None = None
    if options.reads_inputs or options.num_further:
        segment_ids = pad_segments([rows.segment_ids(i) for i in ids], shape)
    if options.reads_inputs:
        read = [rows.input_ids(i) for i in ids], [rows.position_ids(i) for i in ids]
        input_ids, position_ids = options.collator.collate_inputs(*read, shape, options.pad_token_id)
        columns = _load_columns(Side.first_stage, ReadRows(rows, ids, input_ids, options.take_part), options)
        inputs = Inputs(options.take_part(input_ids), position_ids, segment_ids, columns)
    if options.reads_labels:
        whole = _collate_targets(rows, ids, shape, options)
        columns = _load_columns(Side.loss, ReadRows(rows, ids, whole, options.take_part), options)
        first, *others = [torch.tensor(each, dtype=torch.float64) for each in denominators]
        further = tuple(
            Targets.find(options.take_part(defer_targets(whole, segment_ids, depth)), other)
            for depth, other in enumerate(others, start=1)
        )
        targets = Targets.find(options.take_part(whole), first, columns=columns, further=further)
    return Batch(inputs, targets)


def _load_columns(side: Side, rows: ReadRows, options: LoaderOptions) -> dict[str, Tensor]:
    return {each.column.name: each.load(rows) for each in options.columns if each.column.side is side}


def _collate_targets(rows: RowSource, ids: np.ndarray, shape: tuple[int, int], options: LoaderOptions) -> Tensor:
    """Return the targets of whole rows, int64 [B, T]."""
    if options.row_targets is RowTargets.last_tokens:
        return number_documents([rows.segment_ids(i) for i in ids], shape)
    return shift_labels(options.collator.collate_labels([rows.labels(i) for i in ids], shape))


class _MicroBatches(Dataset[Batch]):
    def __init__(self, build_batch: Callable[[int], Batch]) -> None:
        self._build_batch = build_batch

    def __getitem__(self, index: int) -> Batch:
        return self._build_batch(index)


def _iterate(build_batch: Callable[[int], Batch], indices: range, options: LoaderOptions) -> Iterator[Batch]:
    if not (options.num_workers or options.pin_memory):
        return map(build_batch, indices)
    return iterate_dataset(
        _MicroBatches(build_batch), num_workers=options.num_workers, pin_memory=options.pin_memory, sampler=indices
    )
