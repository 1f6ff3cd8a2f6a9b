"""The found layouts as text: a table of the best and the overrides of the first, or what the nearest one lacks."""

from __future__ import annotations

from collections.abc import Sequence

from errors import UserError
from training.config.schema import RunConfig
from training.costs.hardware import GIB, Machine
from training.planner.formatting import render_cost, render_rows, render_seconds
from training.planner.remedies import Remedy, describe_remedies
from training.planner.report import largest_kind
from training.planner.search import SHOWN, Candidate

MARGIN = 0.1  # of tokens/s: of published runs, two layouts so near are often in the other order (docs/plan.md)


def render_search(
    candidates: Sequence[Candidate],
    config: RunConfig,
    hardware: Machine,
    width: int | None = None,
    remedies: Sequence[Remedy] = (),
) -> str:
    """Return the table of the best layouts, with the price of a billion tokens where that of a GPU is known, how many
    are too near to the first to be told apart, and the overrides of the first. width: as in `render_rows`. remedies: of
    the first where none fits.

    Raises UserError when none fits, with what the nearest one lacks.
    """
    fitting = [candidate for candidate in candidates if candidate.plan.fits]
    if not fitting:
        raise UserError(_nothing_fits(candidates[0], config, hardware, remedies))
    shares = any(candidate.sharing.size > 1 for candidate in fitting[:SHOWN])
    divides = any(candidate.sharing.experts > 1 for candidate in fitting[:SHOWN])
    header = (
        "pp",
        *(["cp", "mode"] if shares else []),
        "dp",
        *(["ep"] if divides else []),
        "schedule",
        "micro-batch",
        "micro-batches",
        "checkpoint",
        "saving memory",
        "peak GiB",
        "host GiB",
        "step",
        "tokens/s",
        "MFU",
        *(["1B tokens cost"] if hardware.price_per_hour is not None else []),
    )
    rows = [
        (*_row(candidate, shares, divides), *_price(candidate, hardware.price_per_hour))
        for candidate in fitting[:SHOWN]
    ]
    return "\n".join(
        [
            f"{len(fitting)} of {len(candidates)} layouts fit {config.world_size} x {hardware.name}; "
            "the fastest, as predicted:",
            "",
            *render_rows(header, rows, width),
            "",
            *_render_margin(fitting),
            f"use: {' '.join(fitting[0].overrides)}",
        ]
    )


def _price(candidate: Candidate, price_per_hour: float | None) -> tuple[str, ...]:
    return () if price_per_hour is None else (render_cost(candidate.plan.compute_cost(1e9, price_per_hour)),)


def _render_margin(fitting: Sequence[Candidate]) -> list[str]:
    slowest = (1 - MARGIN) * fitting[0].plan.tokens_per_second
    near = sum(candidate.plan.tokens_per_second > slowest for candidate in fitting[1:])
    return [f"within {MARGIN:.0%} of the first: {near}, which a plan cannot tell apart from it"] if near else []


def _row(candidate: Candidate, shares: bool, divides: bool) -> tuple[str, ...]:
    """shares, divides: with the columns of the ranks that share a sequence, and of those that divide experts."""
    plan, (mode, interval) = candidate.plan, candidate.checkpointing
    layout = plan.layout
    names = {"grouped": str(interval), "every": f"every {interval}", "selective": "selective"}
    return (
        str(layout.num_stages), *([str(candidate.sharing.size), candidate.sharing.mode.value] if shares else []),
        str(layout.dp_size), *([str(candidate.sharing.experts)] if divides else []), layout.schedule,
        str(layout.micro_batch_size), str(layout.gradient_accumulation_steps), names[mode.value], candidate.saving,
        f"{plan.fullest.memory.peak / GIB:.1f}",
        f"{plan.host_bytes / GIB:,.0f}", render_seconds(plan.step_seconds),
        f"{plan.tokens_per_second:,.0f}", f"{plan.mfu:.1%}",
    )  # fmt: skip


def _nothing_fits(nearest: Candidate, config: RunConfig, hardware: Machine, remedies: Sequence[Remedy]) -> str:
    plan = nearest.plan
    missing = []
    if plan.missing_memory > 0:
        kind = largest_kind(plan.fullest)
        missing.append(
            f"{plan.missing_memory / GIB:.1f} GiB on a GPU (stage {plan.fullest.stage_id}; most of it is {kind})"
        )
    if plan.missing_host_memory > 0:
        missing.append(f"{plan.missing_host_memory / GIB:,.0f} GiB of host memory a node")
    return (
        f"no layout fits world_size={config.world_size} x hardware={hardware.name}; "
        f"the nearest ({' '.join(nearest.overrides)}) misses {' and '.join(missing)}; "
        f"{f'it would fit with {describe_remedies(remedies)}; else ' if remedies else ''}"
        "raise world_size, take larger GPUs, or lower max_seq_length"
    )
