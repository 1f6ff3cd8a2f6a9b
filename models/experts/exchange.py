"""Rows on their way to the ranks that have their experts, and back: expert parallelism (2006.16668) without a capacity,
so every row is computed and none is padded.

The ranks of a group each have an equal run of a layer's experts. A rank's rows, sorted by expert, are therefore sorted
by rank too. It sends every rank the counts of the rows that are for each of that rank's experts, then the rows, by an
uneven all-to-all; the results take the same way back, and so do gradients, in the backward pass.

All ranks of a group make the same exchanges in the same order, whatever their routers choose: a rank without rows for
another sends it none. The exchanges are operators of their own, whose results `activation_checkpoint_mode=selective`
keeps, so that a recomputed layer sends nothing twice.

S rows of this rank, R rows that it receives, E experts of the layer, G ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import library

from models.parallel.shard import ExpertParallel

# An operator of torch takes no process group, but its name.
_GROUPS: WeakValueDictionary[str, ExpertParallel] = WeakValueDictionary()


@library.custom_op("experts::exchange_counts", mutates_args=())
def exchange_counts(counts: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank the number of rows for each of its experts. counts: int64 [E], this rank's.

    Returns int64 [G, E / G], the rows that this rank gets of each rank for each of its own experts; and int64 [2, G] on
    the host, the numbers of rows to send to each rank, and to receive. The host waits for them, once.
    """
    parallel = _GROUPS[group]
    sent = counts.view(parallel.size, -1)
    received = torch.empty_like(sent)
    with parallel.exchanges.observed():
        dist.all_to_all_single(received, sent, group=parallel.group)
    return received, torch.stack([sent.sum(dim=1), received.sum(dim=1)]).cpu()


@library.custom_op("experts::exchange_rows", mutates_args=())
def exchange_rows(
    rows: torch.Tensor, splits: torch.Tensor, num_received: int, returns: bool, group: str
) -> torch.Tensor:
    """Send rows [S, D], sorted by rank, and return those received [R, D], sorted by the rank they are from.

    splits: int64 [2, G] on the host, as `exchange_counts` returns it. num_received: R. returns: the way back.
    """
    parallel = _GROUPS[group]
    sent, received = splits.flip(0).tolist() if returns else splits.tolist()
    outputs = rows.new_empty(num_received, *rows.shape[1:])
    with parallel.exchanges.observed():
        dist.all_to_all_single(outputs, rows.contiguous(), received, sent, group=parallel.group)
    return outputs


@exchange_rows.register_fake
def _make_received(
    rows: torch.Tensor, splits: torch.Tensor, num_received: int, returns: bool, group: str
) -> torch.Tensor:
    return rows.new_empty(num_received, *rows.shape[1:])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, splits: torch.Tensor, num_received: int, returns: bool, group: str
    ) -> torch.Tensor:
        context.save_for_backward(splits)
        context.num_sent, context.returns, context.group = len(rows), returns, group
        return exchange_rows(rows, splits, num_received, returns, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (splits,) = context.saved_tensors
        sent_back = exchange_rows(gradient, splits, context.num_sent, not context.returns, context.group)
        return sent_back, None, None, None, None


@dataclass(frozen=True)
class Route:
    """The way of one micro-batch's rows through a layer. splits: as `exchange_counts` returns it. num_sent: S. experts:
    int64 [R, 1], the expert of each received row, among this rank's."""

    parallel: ExpertParallel
    splits: torch.Tensor
    num_sent: int
    experts: torch.Tensor

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, D] that this rank receives for its experts. rows: [S, D], sorted by expert."""
        return self._exchange(rows, len(self.experts), returns=False)

    def bring_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results [S, D] of this rank's rows. rows: [R, D], in the order in which they were received."""
        return self._exchange(rows, self.num_sent, returns=True)

    def _exchange(self, rows: torch.Tensor, num_received: int, returns: bool) -> torch.Tensor:
        name = name_group(self.parallel)
        return _Exchange.apply(rows, self.splits, num_received, returns, name)  # type: ignore[no-any-return]


def plan_route(offsets: torch.Tensor, sorted_experts: torch.Tensor, parallel: ExpertParallel) -> Route:
    """Exchange counts. offsets: int32 [E], where the rows of each expert end. sorted_experts: int64 [S], the expert of
    each row."""
    num_own, num_sent = len(offsets) // parallel.size, len(sorted_experts)
    if parallel.group is None:  # in a plan
        splits = torch.empty(2, parallel.size, dtype=torch.int64, device=offsets.device)
        return Route(parallel, splits, num_sent, sorted_experts.new_empty(round(parallel.imbalance * num_sent), 1))
    counts = offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
    received, splits = exchange_counts(counts, name_group(parallel))
    numbers = torch.arange(num_own, device=offsets.device).repeat(parallel.size)
    experts = numbers.repeat_interleave(received.flatten(), output_size=int(splits[1].sum()))
    return Route(parallel, splits, num_sent, experts.unsqueeze(1))


def name_group(parallel: ExpertParallel) -> str:
    """Return the name by which the operators find the group; empty in a plan, which has none."""
    if parallel.group is None:
        return ""
    name: str = parallel.group.group_name
    _GROUPS[name] = parallel
    return name
