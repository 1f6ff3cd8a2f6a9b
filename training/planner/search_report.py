"""The found layouts as text: a table of the best and the overrides of the first, or what the nearest one lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from errors import UserError
from training.costs.hardware import GIB, Machine
from training.planner.formatting import render_cost, render_rows, render_seconds
from training.planner.remedies import Remedy, describe_remedies
from training.planner.report import largest_kind
from training.planner.search_space import Candidate

MARGIN = 0.1  # of tokens/s: of published runs, two layouts so near are often in the other order (docs/plan.md)


def render_search(
    candidates: Sequence[Candidate],
    hardware: Machine,
    width: int | None = None,
    *,
    remedies: Sequence[Remedy] = (),
    total_steps: int | None = None,
) -> str:
    """Return the table of the best layouts, where the price of a GPU is known with that of the run, or of a billion
    tokens; how many the plan cannot distinguish from the first; and the overrides of the first. width: as in
    `render_rows`. remedies: of the first where none fits. total_steps: of the run; None where not known.

    Raises UserError when none fits, with what the nearest one lacks.
    """
    first, *others = candidates
    if not first.plan.fits:
        raise UserError(_nothing_fits(first, hardware, remedies))
    least = (1 - MARGIN) * first.plan.tokens_per_second
    num_near = sum(candidate.plan.tokens_per_second > least for candidate in others)
    return "\n".join(
        [
            f"the fastest layouts that fit {first.plan.layout.world_size} x {hardware.name}, as predicted:",
            "",
            *render_rows(*_tabulate(candidates, hardware, total_steps), width),
            "",
            _render_margin(f"the first: {num_near or 'none'} of these"),
            f"use: {' '.join(first.overrides)}",
        ]
    )


def render_sizes(
    found: Mapping[int, Sequence[Candidate]],
    hardware: Machine,
    width: int | None = None,
    *,
    total_steps: int | None = None,
) -> str:
    """Return the table of the best layout of each number of GPUs; which of them is fastest, which cheapest, and which
    needs the fewest GPUs, each with its overrides; and which the plan cannot distinguish from those. found: the layouts
    of each, as `search_plans` returns them. total_steps: as in `render_search`.

    Raises UserError when none fits any.
    """
    best = {size: candidates[0] for size, candidates in found.items() if candidates[0].plan.fits}
    if not best:
        raise UserError(_nothing_fits(found[max(found)][0], hardware, ()))
    too_few = [f"{size} x {hardware.name}: {_describe_lack(found[size][0])}" for size in found if size not in best]
    return "\n".join(
        [
            f"the fastest layout of each number of {hardware.name}, as predicted:",
            "",
            *render_rows(*_tabulate(list(best.values()), hardware, total_steps, shows_gpus=True), width),
            "",
            *(f"nothing fits {line}" for line in too_few),
            *_render_choices(best, hardware, total_steps),
        ]
    )


def render_other_updates(
    best: Mapping[str, Candidate],
    fastest: Candidate,
    hardware: Machine,
    width: int | None = None,
    *,
    total_steps: int | None = None,
) -> str:
    """Return the table of the fastest layout with each change of the update, and which of these the plan cannot
    distinguish from the run's own. best: by overrides. fastest: of the run. total_steps: as in `render_search`."""
    header, rows = _tabulate(list(best.values()), hardware, total_steps)
    least = (1 - MARGIN) * fastest.plan.tokens_per_second
    near = [name for name, each in best.items() if least < each.plan.tokens_per_second < least / (1 - MARGIN) ** 2]
    return "\n".join(
        [
            "",
            "other updates, whose numbers are not those of this run; the fastest layout with each, as predicted:",
            "",
            *render_rows(("", *header), [(name, *row) for name, row in zip(best, rows, strict=True)], width),
            "",
            _render_margin(f"the run's own fastest: {', '.join(near) or 'none of these'}"),
        ]
    )


def _render_choices(best: Mapping[int, Candidate], hardware: Machine, total_steps: int | None) -> list[str]:
    """A line for each number of GPUs that is the best in some way, and one of those that are as good within the margin.
    Whatever a GPU costs, the cheapest trains the most tokens a second on each."""

    speeds = {size: candidate.plan.tokens_per_second for size, candidate in best.items()}
    per_gpu = {size: speed / size for size, speed in speeds.items()}
    fastest, cheapest = (max(best, key=values.__getitem__) for values in (speeds, per_gpu))

    def list_near(chosen: int, values: Mapping[int, float]) -> str:
        near = [str(size) for size in best if size != chosen and values[size] > (1 - MARGIN) * values[chosen]]
        return f"{' and '.join(near)} GPUs" if near else "none of these"

    chosen: dict[int, list[str]] = {}
    for name, size in (("fastest", fastest), ("cheapest", cheapest), ("fewest GPUs", min(best))):
        chosen.setdefault(size, []).append(name)
    lines = [
        f"{', '.join(names)}: {size} GPU{'s' * (size > 1)}, {speeds[size]:,.0f} tokens/s, {per_gpu[size]:,.0f} per GPU"
        + "".join(f", {name} {cost}" for name, cost in _price(best[size], hardware, total_steps).items())
        + f"; use: world_size={size} {' '.join(best[size].overrides)}"
        for size, names in chosen.items()
    ]
    near = f"the fastest: {list_near(fastest, speeds)}; to the cheapest: {list_near(cheapest, per_gpu)}"
    return [*lines, _render_margin(near)]


def _price(candidate: Candidate, hardware: Machine, total_steps: int | None) -> dict[str, str]:
    """Return the price of the run, or of a billion tokens where its steps are not known, by name; empty without one."""
    if hardware.price_per_hour is None:
        return {}
    plan = candidate.plan
    name, tokens = ("1B tokens cost", 1e9) if total_steps is None else ("run costs", total_steps * plan.tokens_per_step)
    return {name: render_cost(plan.compute_cost(tokens, hardware.price_per_hour))}


def _render_margin(near: str) -> str:
    return f"a plan cannot tell apart what differs by less than {MARGIN:.0%}; so near to {near}"


def _tabulate(
    candidates: Sequence[Candidate], hardware: Machine, total_steps: int | None, shows_gpus: bool = False
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and a row for each candidate; a column of ranks in which all are 1 is omitted."""
    columns = {name: [read(candidate) for candidate in candidates] for name, read in _COLUMNS.items()}
    omitted = [name for name in ("tp", "cp", "ep") if {*columns[name]} == {"1"}] + ["GPUs"] * (not shows_gpus)
    shown = {name: cells for name, cells in columns.items() if name not in omitted}
    for candidate in candidates:
        for name, cost in _price(candidate, hardware, total_steps).items():
            shown.setdefault(name, []).append(cost)
    return tuple(shown), list(zip(*shown.values(), strict=True))


def _name_checkpointing(candidate: Candidate) -> str:
    mode, interval = candidate.checkpointing
    return {"grouped": str(interval), "every": f"every {interval}", "selective": "selective"}[mode.value]


def _name_tensor(candidate: Candidate) -> str:
    size = candidate.keys.tensor_parallel_size
    return f"{size}{' sp' if candidate.keys.sequence_parallel and size > 1 else ''}"


def _name_sequences(candidate: Candidate) -> str:
    size, mode = candidate.keys.context_parallel_size, candidate.keys.context_parallel_mode
    return f"{size} {mode.value}" if size > 1 else "1"


_COLUMNS: dict[str, Callable[[Candidate], str]] = {
    "GPUs": lambda candidate: str(candidate.plan.layout.world_size),
    "pp": lambda candidate: str(candidate.plan.layout.num_stages),
    "tp": _name_tensor,
    "cp": _name_sequences,
    "dp": lambda candidate: str(candidate.plan.layout.dp_size),
    "ep": lambda candidate: str(candidate.keys.expert_parallel_size),
    "schedule": lambda candidate: candidate.plan.layout.schedule,
    "micro-batch": lambda candidate: str(candidate.plan.layout.micro_batch_size),
    "micro-batches": lambda candidate: str(candidate.plan.layout.gradient_accumulation_steps),
    "checkpoint": _name_checkpointing,
    "saving memory": lambda candidate: candidate.saving,
    "peak GiB": lambda candidate: f"{candidate.plan.fullest.memory.peak / GIB:.1f}",
    "host GiB": lambda candidate: f"{candidate.plan.host_bytes / GIB:,.0f}",
    "step": lambda candidate: render_seconds(candidate.plan.step_seconds),
    "tokens/s": lambda candidate: f"{candidate.plan.tokens_per_second:,.0f}",
    "MFU": lambda candidate: f"{candidate.plan.mfu:.1%}",
}


def _nothing_fits(nearest: Candidate, hardware: Machine, remedies: Sequence[Remedy]) -> str:
    return (
        f"no layout fits world_size={nearest.plan.layout.world_size} x hardware={hardware.name}; "
        f"{_describe_lack(nearest)}; "
        f"{f'it would fit with {describe_remedies(remedies)}; else ' if remedies else ''}"
        "raise world_size, take larger GPUs, or lower max_seq_length"
    )


def _describe_lack(nearest: Candidate) -> str:
    plan = nearest.plan
    missing = []
    if plan.missing_memory > 0:
        kind = largest_kind(plan.fullest)
        missing.append(
            f"{plan.missing_memory / GIB:.1f} GiB on a GPU (stage {plan.fullest.stage_id}; most of it is {kind})"
        )
    if plan.missing_host_memory > 0:
        missing.append(f"{plan.missing_host_memory / GIB:,.0f} GiB of host memory a node")
    return f"the nearest ({' '.join(nearest.overrides)}) misses {' and '.join(missing)}"
