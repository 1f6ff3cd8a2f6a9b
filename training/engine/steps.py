"""The uses of an engine besides its steps: whether a step was finite, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from console import progress
from models.layers.documents import DocumentBounds
from models.losses.cross_entropy import Loss
from training.engine.engine import Engine


def is_nonfinite(engine: Engine, loss: torch.Tensor) -> bool:
    """Returns whether the last step's loss or gradient was not finite on this rank; other ranks may differ.

    A gradient that was too large for its loss scale (fp16) does not count: the scale is lower in the next step.
    """
    failed = engine.has_skipped_step() and not engine.read_loss_scaler()
    return failed or not loss.isfinite().all().item()


def evaluate(
    engine: Engine,
    micro_batches: Iterator[Any] | None,
    num_micro_batches: int,
    num_terms: int,
    *,
    bounds: DocumentBounds | None = None,
    check: Callable[[], None] = lambda: None,
    prepare: Callable[[int], None] = lambda size: None,
) -> float:
    """Return the mean loss per target token, or per pair, over the evaluation set; the same on every rank.

    micro_batches: from this rank's loader, whose loss is a sum; None on a rank that reads nothing.
    num_micro_batches: of one pipeline. num_terms: of the whole set; both are the same on every rank. bounds: on the
    documents of a micro-batch; None where they are not known. check, prepare: as in `forward_in_groups`.
    """
    engine.module.expect_documents(bounds)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    with progress("evaluating", num_micro_batches, "micro-batches", shown=engine.rank == 0) as bar:
        followed = None if micro_batches is None else bar.follow(micro_batches)
        for output in forward_in_groups(engine, followed, num_micro_batches, check=check, prepare=prepare):
            if engine.module.reports_loss:
                total += output.double()
    dist.all_reduce(total)
    return total.item() / num_terms


def forward_in_groups(
    engine: Engine,
    micro_batches: Iterator[Any] | None,
    num_micro_batches: int,
    loss: Loss | None = None,
    *,
    check: Callable[[], None],
    prepare: Callable[[int], None] = lambda size: None,
) -> Iterator[Any]:
    """Yield what `engine.forward_only` returns, group after group of micro-batches.

    check: called by all ranks between two groups, to end the evaluation there by an exception. The pipeline drains at
    the end of a group, so that one takes about as long as a step: twice its micro-batches, or 4 per stage. prepare:
    called by all ranks before each group, with the number of its micro-batches.
    """
    layout = engine.layout
    size = max(2 * layout.gradient_accumulation_steps, 4 * layout.num_stages)
    for start in range(0, num_micro_batches, size):
        if start:
            check()
        in_group = min(size, num_micro_batches - start)
        prepare(in_group)
        yield from engine.forward_only(micro_batches, in_group, loss)
