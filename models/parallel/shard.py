"""Tensors of which each rank of a group has a shard: the layout of shards, gathering them, and sums over the ranks with
gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from models.parallel.exchanges import Exchanges


@dataclass(frozen=True)
class TensorParallel:
    """This rank in its tensor-parallel group. group: None where no communication is needed. splits_sequence: whether
    each rank has a part of the sequence between the blocks of a layer (`models/parallel/sequence.py`)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    splits_sequence: bool = False


NO_TP = TensorParallel()


@dataclass(frozen=True)
class ContextParallel:
    """This rank among those that split each sequence. group: None where no communication is needed. is_ring: whether
    keys and values are passed around, instead of heads (`models/parallel/ring.py`); it determines the chunks of a rank.
    exchanges: measures those of this group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    is_ring: bool = False
    exchanges: Exchanges = field(default_factory=Exchanges, compare=False, repr=False)

    @property
    def num_chunks(self) -> int:
        """The number of equal chunks that a sequence is cut into."""
        return 2 * self.size if self.is_ring else self.size

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of this rank, in its order. Around a ring an early and a late one, so that all ranks have the same
        number of earlier tokens to attend to."""
        return (self.rank, 2 * self.size - 1 - self.rank) if self.is_ring else (self.rank,)

    def take(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of a tensor that has all tokens along `dim`: a view, unless it has several chunks."""
        if self.size == 1:
            return tensor
        length = tensor.shape[dim] // self.num_chunks
        chunks = [tensor.narrow(dim, chunk * length, length) for chunk in self.chunks]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)


NO_CP = ContextParallel()


@dataclass(frozen=True)
class ExpertParallel:
    """This rank among those that have the experts of each layer together, an equal run of them each. group: None where
    no communication is needed, as in a plan. exchanges: measures those of this group. imbalance: of a plan, the rows
    that this rank's experts get, as a multiple of an even share."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    exchanges: Exchanges = field(default_factory=Exchanges, compare=False, repr=False)
    imbalance: float = 1


NO_EP = ExpertParallel()


@dataclass(frozen=True)
class LayerRanks:
    """This rank in the groups that have a layer together: its weights, its sequences, its experts."""

    parallel: TensorParallel = NO_TP
    parts: ContextParallel = NO_CP
    expert_parallel: ExpertParallel = NO_EP


WHOLE_LAYERS = LayerRanks()


def find_length_multiple(parts: ContextParallel, sequence_parallel_size: int) -> int:
    """Return what the length of rows is a multiple of.

    parts: of their tokens, by context parallelism. sequence_parallel_size: ranks that have a part of those between the
    blocks of a layer; 1 without.
    """
    return math.lcm(parts.num_chunks, parts.size * sequence_parallel_size)


def split_evenly(length: int, size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each rank's run of `length` indices; the first ones have one more where it does not
    divide."""
    sizes = [length // size + (rank < length % size) for rank in range(size)]
    return [(stop - width, stop) for stop, width in zip(accumulate(sizes), sizes, strict=True)]


@dataclass(frozen=True)
class ShardLayout:
    """The positions of a rank's shard in the flattened whole tensor: in each `stride` elements, the runs (first
    element, length).

    strides: those that the shard has elements of, as runs (first stride, number); empty for all of them.
    """

    stride: int
    runs: tuple[tuple[int, int], ...]
    strides: tuple[tuple[int, int], ...] = ()

    def list_runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of the elements `start` to `stop` of the flattened shard: (first in it, first in the whole,
        length)."""
        in_stride = sum(length for _, length in self.runs)
        for period in range(start // in_stride, -(-stop // in_stride)):
            first = period * in_stride
            for offset, length in self.runs:
                low, high = max(start, first), min(stop, first + length)
                if low < high:
                    yield low, self._find_stride(period) * self.stride + offset + low - first, high - low
                first += length

    def _find_stride(self, number: int) -> int:
        """The number in the whole tensor of a stride of the shard."""
        for first, count in self.strides:
            if number < count:
                return first + number
            number -= count
        return number


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is sharded: along dimension `dim`, which is several matrices of these `sizes` end to end, usually
    one.

    Each is sharded by itself, and a rank's runs of them are end to end too.
    """

    dim: int
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        return sum(self.sizes)

    def intervals(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) along `dim` of a rank's shard, one run for each of the `sizes`."""
        firsts = (stop - length for stop, length in zip(accumulate(self.sizes), self.sizes, strict=True))
        runs = (split_evenly(length, size)[rank] for length in self.sizes)
        return [(first + start, first + stop) for first, (start, stop) in zip(firsts, runs, strict=True)]

    def width(self, rank: int, size: int) -> int:
        """Return the length of a rank's shard along `dim`."""
        return sum(stop - start for start, stop in self.intervals(rank, size))

    def locate(self, shape: Sequence[int], parallel: TensorParallel | ExpertParallel) -> ShardLayout:
        """Return the layout of this rank's shard. shape: the shard's."""
        inner = math.prod(shape[self.dim + 1 :])
        runs = ((start * inner, (stop - start) * inner) for start, stop in self.intervals(parallel.rank, parallel.size))
        return ShardLayout(self.length * inner, tuple(runs))

    def take(self, whole: torch.Tensor, parallel: TensorParallel | ExpertParallel) -> torch.Tensor:
        """Return this rank's shard: a view, unless it has several runs."""
        runs = [
            whole.narrow(self.dim, start, stop - start) for start, stop in self.intervals(parallel.rank, parallel.size)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs, self.dim)

    def gather(self, shard: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
        """Return the whole tensor from the shards of all ranks of the group, which all call it."""
        rows = shard.movedim(self.dim, 0)
        # Collectives need equal shapes: the shorter shards are sent with rows that are not read.
        sent = rows.new_zeros(self.width(0, parallel.size), *rows.shape[1:])
        sent[: len(rows)] = rows
        shards = [torch.empty_like(sent) for _ in range(parallel.size)]
        dist.all_gather(shards, sent, group=parallel.group)
        whole = rows.new_empty(self.length, *rows.shape[1:])
        for rank, received in enumerate(shards):
            first = 0
            for start, stop in self.intervals(rank, parallel.size):
                whole[start:stop] = received[first : first + stop - start]
                first += stop - start
        return whole.movedim(0, self.dim).contiguous()


def sum_backward(tensor: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return the tensor; its gradient is summed over the ranks."""
    return _SumBackward.apply(tensor, parallel)


def sum_forward(tensor: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return the sum of the tensors over the ranks, each of which gets its gradient."""
    return _SumForward.apply(tensor, parallel)


def sum_parts(tensor: torch.Tensor, parallel: ContextParallel) -> torch.Tensor:
    """Return the sum of the tensors over the ranks, which all compute the same from it and each count their share: the
    gradients are summed too. The tensor itself where a rank has whole sequences."""
    return tensor if parallel.size == 1 else _SumParts.apply(tensor, parallel)


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
        context.parallel = parallel
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_over_ranks(gradient, context.parallel), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
        return sum_over_ranks(tensor, parallel)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, parallel: ContextParallel) -> torch.Tensor:
        context.parallel = parallel
        return sum_over_ranks(tensor, parallel)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_over_ranks(gradient, context.parallel), None


def sum_over_ranks(tensor: torch.Tensor, parallel: TensorParallel | ContextParallel) -> torch.Tensor:
    """Return the sum as a new tensor; a copy without a group, as in a plan."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    if parallel.group is not None:
        dist.all_reduce(total, group=parallel.group)
    return total
