"""Bytes and kernels of a pass besides products, and the shapes of these, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from models.experts.exchange import exchange_rows
from training.config.schema import CheckpointMode
from training.costs.trace import trace_passes
from training.costs.traffic import NO_TRAFFIC, Traffic, count_remade, count_traffic
from training.pipeline.activation_checkpoint import ActivationCheckpointing

N, D = 10, 8
ELEMENTS = N * D


class Block(nn.Module):
    """A product, an activation function and a residual, another product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) + x)


def count(run: Callable[[], torch.Tensor], module: nn.Module | None = None, *, fuses: bool = False) -> list[Traffic]:
    """Return the traffic of both passes of what `run` computes."""
    trace = trace_passes(lambda: (run(),), module or nn.Module())
    assert trace.backward is not None
    return count_traffic((trace.forward, trace.backward), fuses)


@pytest.mark.parametrize(
    ("fuses", "moved", "kernels"),
    [
        (False, 2 + 3, 4),  # relu reads one and writes one, the sum reads two and writes one
        (True, 2 + 1, 3),  # the first product's result and x are read, what the second takes is written
    ],
)
def test_what_a_forward_pass_moves(fuses: bool, moved: int, kernels: int) -> None:
    for shape in ((N, D), (2, N // 2, D)):  # a product of more than two dimensions is one of two, and a view
        with torch.device("meta"):
            block, x = Block(), torch.empty(*shape)
        forward, _ = count(lambda block=block, x=x: block(x), block, fuses=fuses)
        assert forward == Traffic(4 * moved * ELEMENTS, kernels, ((N, D, D), (N, D, D)))


@pytest.mark.parametrize(("fuses", "moved", "kernels"), [(False, 2 + 3, 2), (True, 2 + 1, 1)])
def test_what_selective_checkpointing_makes_again(fuses: bool, moved: int, kernels: int) -> None:
    """All between the products."""
    with torch.device("meta"):
        block, x = Block(), torch.empty(N, D)
    trace = trace_passes(lambda: (block(x),), block)
    assert count_remade(trace.forward, fuses) == Traffic(4 * moved * ELEMENTS, kernels)


def test_torch_makes_as_much_again() -> None:
    block = nn.Sequential(Block(), nn.ReLU(), Block())
    again = partial(ActivationCheckpointing(1, CheckpointMode.selective).build_function(draws=False), block)
    inputs = (torch.randn(N, D, requires_grad=True) for _ in range(2))
    plain, selective = (
        trace_passes(lambda run=run, x=x: (run(x),), block) for run, x in zip((block, again), inputs, strict=True)
    )
    assert plain.backward is not None and selective.backward is not None
    (kept,), (made_again,) = (count_traffic([each.backward], fuses=False) for each in (plain, selective))
    remade = count_remade(plain.forward, fuses=False)
    assert remade != NO_TRAFFIC
    assert (made_again.moved - kept.moved, made_again.kernels - kept.kernels) == (remade.moved, remade.kernels)


def test_fused_kernels_make_again_what_they_did_not_write() -> None:
    """Back through relu and the sum: the gradient of the sum and relu's result, in 16 bits, are read; both gradients
    that flow on are one result each, of which the product takes one and the other is the pass's."""
    with torch.device("meta"):
        block, x = Block(), torch.empty(N, D, requires_grad=True)
    _, back = count(lambda: block(x), block, fuses=True)
    assert back.kernels == 4 + 2  # four products, relu's gradient, and the sum of x's two gradients
    assert back.moved == (4 + 2 + 4 + 4 + 4 + 4) * ELEMENTS


def test_views_and_allocations_move_nothing() -> None:
    x = torch.empty(N, D, device="meta")
    forward, _ = count(lambda: torch.empty_like(x.view(D, N).t().expand(3, N, D)))
    assert forward == Traffic()


def test_rows_for_other_ranks_go_through_memory() -> None:
    rows, splits = torch.empty(N, D, device="meta"), torch.empty(2, 2, dtype=torch.int64, device="meta")
    forward, _ = count(lambda: exchange_rows(torch.relu(rows), splits, N, False, "").relu(), fuses=True)
    assert forward == Traffic(4 * (2 + 2) * ELEMENTS, 3)  # on both sides read and written


def test_scores_are_moved_by_their_products_too() -> None:
    queries = torch.empty(3, N, D, device="meta")
    forward, _ = count(lambda: torch.bmm(queries, queries.transpose(1, 2)).softmax(-1))
    assert forward == Traffic(4 * (3 * 2 * ELEMENTS + 3 * 3 * N * N), 2)


def test_products_of_both_passes_are_known_by_their_shapes() -> None:
    linear, x = nn.Linear(3, 5, device="meta"), torch.empty(7, 3, device="meta", requires_grad=True)
    forward, back = count(lambda: linear(x), linear)
    assert forward.products == ((7, 3, 5),)
    assert sorted(back.products) == [(5, 7, 3), (7, 5, 3)]  # the weight's gradient, and that of x
