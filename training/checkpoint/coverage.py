"""Checks that all ranks together save all state of every trained parameter: no rank can know what another omits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from errors import UserError
from training.checkpoint.blockwise_state import SCALE_MARK
from training.checkpoint.optimizer_state import SCALAR, WEIGHT, is_own_master
from training.distributed.ranks import raise_together
from training.engine.engine import Engine
from training.pipeline.placement import render_shard
from training.pipeline.weight_sharding import whole_shape


@dataclass(frozen=True)
class Coverage:
    """The parameters that a rank trains, and the optimizer state that it saves.

    trained: name of a parameter, with its shard -> number of elements. saved: name of a fragment in the file -> number
    of elements. in_fp32: the names of trained parameters that are their own master weights.
    """

    trained: Mapping[str, int]
    saved: Mapping[str, int]
    in_fp32: Set[str] = frozenset()


def check_coverage(
    engine: Engine, saved: Mapping[str, torch.Tensor], step: int, group: dist.ProcessGroup | None = None
) -> None:
    """Check that every element of the optimizer's state is saved by exactly one rank. All ranks call it.

    saved: as `collect_state` returns it. group: of all ranks; rank 0 compares. Raises UserError, together on all ranks,
    when state of a trained parameter is missing or saved twice.
    """
    parameters = {
        f"{name}{render_shard(placed.shard)}": p
        for name, p, placed in engine.module.named_hf_parameters()
        if p.requires_grad
    }
    own = Coverage(
        {name: whole_shape(p).numel() for name, p in parameters.items()},
        {key: tensor.numel() for key, tensor in saved.items()},
        frozenset(name for name, p in parameters.items() if is_own_master(engine, p)),
    )
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered, dst=0, group=group)
    gap = None if gathered is None else find_gap(gathered)
    error = None
    if gap is not None:
        error = UserError(
            f"saving: {gap}, so step {step} is not saved; the checkpoints before it are untouched. It is a fault of "
            "the project, or of a package: pip install -r requirements.txt, then continue with resume=auto"
        )
    raise_together(error)


def find_gap(ranks: Sequence[Coverage]) -> str | None:
    """Return, in words, the first elements of a trained parameter that no rank or several ranks save; None when each
    element of each kind of state is saved once."""
    trained = sorted({item for rank in ranks for item in rank.trained.items()})
    by_kind, in_fp32 = _list_fragments(ranks), {name for rank in ranks for name in rank.in_fp32}
    for name, count in trained:
        for kind, fragments in by_kind.items():
            if kind == WEIGHT and name in in_fp32:
                continue
            reached = 0
            for start, length in [*sorted(fragments.get(name, [])), (count, 0)]:
                if start != reached:
                    who = "no rank holds" if start > reached else "several ranks hold"
                    low, high = sorted((start, reached))
                    return f"{who} elements {low} to {high - 1} of the optimizer's {kind} of '{name}'"
                reached += length
    return None


def _list_fragments(ranks: Sequence[Coverage]) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Kind of state -> parameter -> (first element, number of elements) of each fragment of it."""
    by_kind: dict[str, dict[str, list[tuple[int, int]]]] = {WEIGHT: {}}
    for key, length in (item for rank in ranks for item in rank.saved.items()):
        kind, _, label = key.partition("/")
        name, _, start = label.rpartition("@")
        if kind != SCALAR and SCALE_MARK not in kind:  # scales belong to blocks, whose elements are counted
            by_kind.setdefault(kind, {}).setdefault(name, []).append((int(start), length))
    return by_kind
