"""The found layouts as text: a table of the best and the command of the first, or what the nearest one lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from errors import UserError
from extensions.search.command import build_command, list_needs, render_command
from extensions.search.space import VARIED, Candidate
from formatting import render_cost, render_rows, render_seconds
from training.costs.hardware import GIB
from training.plan_command.report import describe_peak
from training.planner.advice import Variant, render_value
from training.planner.plan import Plan

MARGIN = 0.1  # of tokens/s: of published runs, two layouts so near are often in the other order (docs/plan.md)


def render_search(
    candidates: Sequence[Candidate],
    words: Sequence[str],
    width: int | None = None,
    total_steps: int | None = None,
    scored_rows: int = 0,
) -> str:
    """Return the table of the best layouts, where the price of a GPU is known with that of the run, or of a billion
    tokens; how many the plan cannot distinguish from the first; and the command that trains with the first.

    words: the arguments of the search's own command. width: as in `render_rows`. total_steps: of the run; None where
    not known. scored_rows: those that go forward once before training. Raises UserError when none fits.
    """
    first, *others = candidates
    require_fit(first)
    run = first.plan.run
    near = sum(_is_near(candidate.plan.tokens_per_second, first.plan.tokens_per_second) for candidate in others)
    return "\n".join(
        [
            f"the fastest layouts that fit {run.layout.world_size} x {run.hardware.name}, as predicted:",
            "",
            *_render_table(candidates, total_steps, scored_rows, width),
            "",
            _render_margin(f"the first: {near or 'none'} of these"),
            "",
            *list_needs(first),
            render_command(["use:", *build_command(first, words)], width),
        ]
    )


def render_sizes(
    found: Mapping[int, Candidate],
    words: Sequence[str],
    width: int | None = None,
    total_steps: int | None = None,
    scored_rows: int = 0,
) -> str:
    """Return the table of the best layout of each number of GPUs; which of them is fastest, which cheapest, and which
    needs the fewest GPUs, each with its command; and which the plan cannot distinguish from those. found: by
    number, the first that `search_plans` returns. Otherwise as `render_search`.

    Whatever a GPU costs, the cheapest trains the most tokens a second on each.
    """
    best = {size: each for size, each in found.items() if each.plan.fits}
    largest = found[max(found)]
    if not best:
        require_fit(largest)
    name = largest.plan.run.hardware.name
    speeds = {size: each.plan.tokens_per_second for size, each in best.items()}
    per_gpu = {size: speed / size for size, speed in speeds.items()}
    fastest, cheapest = (max(best, key=values.__getitem__) for values in (speeds, per_gpu))
    roles = {"fastest": fastest, "cheapest": cheapest, "fewest GPUs": min(best)}

    def list_near(chosen: int, values: Mapping[int, float]) -> str:
        near = [str(size) for size in best if size != chosen and _is_near(values[size], values[chosen])]
        return f"{' and '.join(near)} GPUs" if near else "none of these"

    choices = list[str]()
    for size in dict.fromkeys(roles.values()):
        costs = (f", {name} {cost}" for name, cost in _price(best[size].plan, total_steps, scored_rows).items())
        choices += [
            "",
            f"{', '.join(role for role, holder in roles.items() if holder == size)}: {size} GPU{'s' * (size > 1)}, "
            f"{speeds[size]:,.0f} tokens/s, {per_gpu[size]:,.0f} per GPU{''.join(costs)}",
            *list_needs(best[size]),
            render_command(["use:", *build_command(best[size], words)], width),
        ]
    near = f"the fastest: {list_near(fastest, speeds)}; to the cheapest: {list_near(cheapest, per_gpu)}"
    return "\n".join(
        [
            f"the fastest layout of each number of {name}, as predicted:",
            "",
            *_render_table(list(best.values()), total_steps, scored_rows, width, {"world_size": list(map(str, best))}),
            "",
            *(f"nothing fits {size} x {name}: {_describe_lack(found[size])}" for size in found if size not in best),
            _render_margin(near),
            *choices,
        ]
    )


def render_other_updates(
    best: Mapping[str, Candidate],
    fastest: Candidate,
    width: int | None = None,
    total_steps: int | None = None,
    scored_rows: int = 0,
) -> str:
    """Return the table of the fastest layout with each change of the update, and which of these the plan cannot
    distinguish from the run's own. best: by overrides. fastest: of the run. Otherwise as `render_search`."""
    speed = fastest.plan.tokens_per_second
    near = [name for name, each in best.items() if _is_near(each.plan.tokens_per_second, speed)]
    return "\n".join(
        [
            "",
            "other updates, whose numbers are not those of this run; the fastest layout with each, as predicted:",
            "",
            *_render_table(list(best.values()), total_steps, scored_rows, width, {"": list(best)}),
            "",
            _render_margin(f"the run's own fastest: {', '.join(near) or 'none of these'}"),
        ]
    )


def require_fit(nearest: Candidate, remedies: Sequence[Variant] = ()) -> None:
    """Raise UserError when the nearest layout does not fit, with what it lacks. remedies: what would make it fit."""
    if not nearest.plan.fits:
        alternatives = " or ".join(remedy.describe() for remedy in remedies)
        raise UserError(
            f"no layout fits world_size={nearest.plan.layout.world_size} x hardware={nearest.plan.run.hardware.name}; "
            f"{_describe_lack(nearest)}; {f'it would fit with {alternatives}; else ' if remedies else ''}"
            "raise world_size, take larger GPUs, or lower max_seq_length"
        )


def _describe_lack(nearest: Candidate) -> str:
    plan, missing = nearest.plan, list[str]()
    if plan.missing_memory > 0:
        _, kind = describe_peak(plan)
        missing.append(
            f"{plan.missing_memory / GIB:.1f} GiB on a GPU (stage {plan.fullest.stage_id}; most of it is {kind})"
        )
    if plan.missing_host_memory > 0:
        missing.append(f"{plan.missing_host_memory / GIB:,.0f} GiB of host memory a node")
    return f"the nearest ({' '.join(nearest.overrides) or 'the run as it is'}) misses {' and '.join(missing)}"


def _is_near(speed: float, other: float) -> bool:
    return (1 - MARGIN) * other < speed < other / (1 - MARGIN)


def _render_margin(near: str) -> str:
    return f"a plan cannot tell apart what differs by less than {MARGIN:.0%}; so near to {near}"


def _price(plan: Plan, total_steps: int | None, scored_rows: int) -> dict[str, str]:
    """Return the price of the run with its forward pass before training, or of a billion tokens where its steps are not
    known, by name; empty without one."""
    name, seconds = "1B tokens cost", 1e9 / plan.tokens_per_second
    if total_steps is not None:
        earlier = plan.time_forward(scored_rows) if scored_rows else 0.0
        name, seconds = "run costs", total_steps * plan.step_seconds + earlier
    price = plan.price(seconds)
    return {} if price is None else {name: render_cost(price)}


def _render_table(
    candidates: Sequence[Candidate],
    total_steps: int | None,
    scored_rows: int,
    width: int | None,
    first: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:
    """The lines of a table with a row for each candidate: the keys in which any of them differs from the run, by their
    names, and what the plan predicts. first: the first columns, by name."""
    changed = {key for candidate in candidates for key in candidate.changed}
    keys = [key for key in VARIED if key in changed and key not in _OF_THE_BATCH]
    prices = [_price(candidate.plan, total_steps, scored_rows) for candidate in candidates]
    columns: dict[str, Sequence[str]] = {
        **first,
        **{key: [render_value(getattr(candidate.keys, key)) for candidate in candidates] for key in keys},
        **{name: [read(candidate) for candidate in candidates] for name, read in _FIGURES.items()},
        **{name: [price[name] for price in prices] for name in prices[0]},
    }
    return render_rows(tuple(columns), list(zip(*columns.values(), strict=True)), width)


_OF_THE_BATCH = ("gradient_accumulation_steps", "global_batch_size")  # the same in all layouts
_FIGURES: dict[str, Callable[[Candidate], str]] = {
    "replicas": lambda candidate: str(candidate.plan.layout.dp_size),
    "micro-batches": lambda candidate: str(candidate.plan.layout.gradient_accumulation_steps),
    "peak GiB": lambda candidate: f"{candidate.plan.fullest.memory.peak / GIB:.1f}",
    "host GiB": lambda candidate: f"{candidate.plan.host_bytes / GIB:,.0f}",
    "step": lambda candidate: render_seconds(candidate.plan.step_seconds),
    "tokens/s": lambda candidate: f"{candidate.plan.tokens_per_second:,.0f}",
    "MFU": lambda candidate: f"{candidate.plan.mfu:.1%}",
}
