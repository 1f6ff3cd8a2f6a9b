"""The plan against published GPU runs of others: throughput, memory, and layouts that ran out of memory.

    python benchmarks/published.py [--source NAME] [--gpu NAME] [--every 1] [--worst 10] [--network SOURCE=GB/s]
        [--plot FILE]

Every row of `benchmarks/published_runs/` that this project can run is planned as `plan=true` plans it, in one process,
on the file of `conf/hardware/` of its GPU. Measured over predicted tokens/s has a median, the constant; what is left is
how far a run is from the plan times its constant. Prints both by source and GPU, with one constant each; by GPU, with
one constant for all sources; and for one half of the sources, whose constant the other half is held against; next to
the rank correlation the one that random errors of `RANDOM_ERROR` in the median would leave of the measured speeds. Then
how often two layouts are in the measured order, by how far apart the plan has them; how far a source's own runs of one
layout are apart; memory, of what was measured; what was called too large; the worst rows; and what was not planned.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_parts.causes import find_memory_cause, find_speed_cause
from benchmarks.published_parts.measures import RANDOM_ERROR, correlate_ranks, find_quantile, simulate_rank
from benchmarks.published_parts.planned import Planned, plan_all
from benchmarks.published_parts.rows import OUT_OF_MEMORY, RUNS, PublishedRun, read_runs

APART = (0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)  # shares of tokens/s by which two plans differ
FEWEST = 5  # runs that a rank correlation is given for
# Columns that may differ between two measurements of one layout
MEASURED = ("id", "where", "model", "assumed", "doubt", "tokens_per_s_per_gpu", "step_s", "memory_gib", "memory_is")
NEAR, NEARER = 0.12, 0.05  # of measured memory
# Half of the sources: the constant of a GPU is taken from these, and the others are held against it
HALF = ("aleph_alpha", "zero_bubble", "dgxc_24.11", "llm_foundry", "kempner", "dlperf_megatron")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="", help="only rows whose source contains this")
    parser.add_argument("--gpu", default="", help="only rows on this GPU")
    parser.add_argument("--every", type=int, default=1, help="plan one row of so many, to see it sooner")
    parser.add_argument("--worst", type=int, default=10, help="rows to print")
    parser.add_argument("--network", default="", help="SOURCE=GB/s: of a GPU between nodes, where that is left open")
    parser.add_argument("--plot", type=Path, default=None, help="draw predicted against measured tokens/s")
    arguments = parser.parse_args()
    start = time.perf_counter()

    def select(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
        chosen = [run for run in runs if arguments.source in run.source and arguments.gpu in (run.gpu, "")]
        source, _, rate = arguments.network.partition("=")
        return [
            replace(run, network=float(rate)) if run.source == source else run for run in chosen[:: arguments.every]
        ]

    runs, failures = select(read_runs(RUNS)), select(read_runs(OUT_OF_MEMORY))
    if not runs:
        gpus = ", ".join(sorted({run.gpu for run in read_runs(RUNS)}))
        parser.error(f"no run of --source {arguments.source!r} on --gpu {arguments.gpu!r}; the GPUs are {gpus}")
    planned, refused = plan_all(runs)
    failed, refused_failures = plan_all(failures)
    print(render_speed(planned))
    print(render_order(planned))
    print(render_repeated(planned))
    print(render_memory(planned))
    print(render_failures(planned, failed))
    print(render_worst(planned, arguments.worst))
    print(render_refused("runs", runs, refused), render_refused("failures", failures, refused_failures), sep="\n")
    if arguments.plot:
        draw(planned, arguments.plot)
        print(f"picture: {arguments.plot}")
    print(f"\n{len(planned) + len(failed)} plans; {time.perf_counter() - start:.0f} s in all")


def render_speed(planned: Sequence[Planned]) -> str:
    """Return the table of throughput. Rows of each source and GPU have a constant of their own; those of a GPU, of all
    sources, share one; and both halves of the sources have that of the first half."""
    lines = [
        f"| runs | | with stages | rank correlation | of random errors of {RANDOM_ERROR:.0%} | constant "
        "| left: median | p90 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for source, gpu in dict.fromkeys((each.run.source, each.run.gpu) for each in planned):
        rows = [each for each in planned if (each.run.source, each.run.gpu) == (source, gpu)]
        lines.append(_render_group(f"{source}, {gpu}", rows, rows))
    for gpu in dict.fromkeys(each.run.gpu for each in planned):
        rows = [each for each in planned if each.run.gpu == gpu]
        lines.append(_render_group(f"**all {gpu}**", rows, rows))
        fitted = [each for each in rows if each.run.source in HALF]
        others = [each for each in rows if each.run.source not in HALF]
        if fitted and others:
            lines.append(_render_group(f"{gpu}, half of the sources", fitted, fitted))
            lines.append(_render_group(f"{gpu}, other half", others, fitted))
        if staged := [each for each in rows if each.run.has_stages]:
            lines.append(_render_group(f"{gpu}, with stages", staged, rows))
    return "\n".join(lines) + "\n"


def _render_group(name: str, rows: Sequence[Planned], constant_of: Sequence[Planned]) -> str:
    constant = statistics.median(each.ratio for each in constant_of)
    left = sorted(abs(each.ratio / constant - 1) for each in rows)
    measured = [each.run.tokens_per_s_per_gpu or 0.0 for each in rows]
    rank = correlate_ranks(measured, [each.tokens_per_s_per_gpu for each in rows]) if len(rows) >= FEWEST else None
    bound = simulate_rank(measured) if len(rows) >= FEWEST else None
    staged = sum(each.run.has_stages for each in rows)
    ranks = " | ".join("-" if value is None else f"{value:.2f}" for value in (rank, bound))
    return (
        f"| {name} | {len(rows)} | {staged} | {ranks} | {constant:.2f} "
        f"| {statistics.median(left):.0%} | {find_quantile(left, 0.9):.0%} |"
    )


def render_order(planned: Sequence[Planned]) -> str:
    """Return how many pairs of layouts are in the measured order: of one model and batch on the same GPUs, by one
    source, by how far their predicted tokens/s differ."""
    alike: dict[tuple[object, ...], list[Planned]] = {}
    for each in planned:
        run = each.run
        alike.setdefault((run.source, run.gpu, run.gpus, run.model, run.seq, run.global_batch), []).append(each)
    pairs = [pair for rows in alike.values() for pair in combinations(rows, 2)]
    lines = ["| two layouts of one run differ by, as predicted | pairs | in the measured order |", "|---|---|---|"]
    for low, high in pairwise((*APART, math.inf)):
        found = [_is_in_order(*pair) for pair in pairs if low <= _count_apart(*pair) < high]
        if found:
            words = f"{low:.0%} to {high:.0%}" if high < math.inf else f"more than {low:.0%}"
            lines.append(f"| {words} | {len(found)} | {sum(found) / len(found):.0%} |")
    return "\n".join(lines) + "\n"


def _count_apart(first: Planned, second: Planned) -> float:
    """By which share the slower plan is slower."""
    speeds = first.tokens_per_s_per_gpu, second.tokens_per_s_per_gpu
    return 1 - min(speeds) / max(speeds)


def _is_in_order(first: Planned, second: Planned) -> bool:
    measured = (first.run.tokens_per_s_per_gpu or 0) - (second.run.tokens_per_s_per_gpu or 0)
    return measured * (first.tokens_per_s_per_gpu - second.tokens_per_s_per_gpu) > 0


def render_repeated(planned: Sequence[Planned]) -> str:
    """Return how far runs of one layout by one source, in all columns but `MEASURED`, are from their median."""
    alike: dict[tuple[object, ...], list[float]] = {}
    for each in planned:
        key = tuple(value for name, value in asdict(each.run).items() if name not in MEASURED)
        alike.setdefault((each.run.source, *key), []).append(each.run.tokens_per_s_per_gpu or 0.0)
    apart: dict[object, list[float]] = {}
    for (source, *_), speeds in alike.items():
        if len(speeds) > 1:
            middle = statistics.median(speeds)
            apart.setdefault(source, []).extend(abs(speed / middle - 1) for speed in speeds)
    lines = ["| layouts measured more than once | runs | from their median: median | most |", "|---|---|---|---|"]
    lines += [
        f"| {source} | {len(off)} | {statistics.median(off):.1%} | {max(off):.0%} |" for source, off in apart.items()
    ]
    return "\n".join(lines) + "\n"


def render_memory(planned: Sequence[Planned]) -> str:
    """Return the table of peak memory, by source and by what was measured, which is what is predicted; and all that
    state it."""
    lines = [
        f"| memory | what was measured | runs | predicted / measured: median | p10 | p90 | within {NEARER:.0%} "
        f"| within {NEAR:.0%} | cause |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [each for each in planned if each.run.memory_gib]
    for source, measured in dict.fromkeys((each.run.source, each.run.memory_is) for each in rows):
        group = [each for each in rows if (each.run.source, each.run.memory_is) == (source, measured)]
        cause = "not stated what" if measured == "not stated" else find_memory_cause(source, measured)
        lines.append(_render_ratios(f"{source} | {measured}", group, cause))
    for measured in dict.fromkeys(each.run.memory_is for each in rows if each.run.memory_is != "not stated"):
        group = [each for each in rows if each.run.memory_is == measured]
        lines.append(_render_ratios(f"**all** | {measured}", group, ""))
    if stated := [each for each in rows if each.run.memory_is != "not stated"]:
        lines.append(_render_ratios("**all** | that is stated", stated, ""))
    return "\n".join(lines) + "\n"


def _render_ratios(name: str, rows: Sequence[Planned], cause: str) -> str:
    ratios = sorted(each.memory_ratio for each in rows)
    shares = [sum(abs(ratio - 1) <= bound for ratio in ratios) / len(ratios) for bound in (NEARER, NEAR)]
    return (
        f"| {name} | {len(ratios)} | {statistics.median(ratios):.2f} | {find_quantile(ratios, 0.1):.2f} "
        f"| {find_quantile(ratios, 0.9):.2f} | {shares[0]:.0%} | {shares[1]:.0%} | {cause if shares[1] < 1 else ''} |"
    )


def render_failures(planned: Sequence[Planned], failed: Sequence[Planned]) -> str:
    """Return how many of the layouts that ran out of memory, and of those that ran, the plan calls too large: by
    source, of all, and of those that state what they recompute."""
    groups = {
        source: [[each for each in rows if each.run.source == source] for rows in (failed, planned)]
        for source in dict.fromkeys(each.run.source for each in [*failed, *planned])
    }
    groups["**all**"] = [[*failed], [*planned]]
    groups["**all that state what they recompute**"] = [
        [each for each in rows if "recompute" not in each.run.assumed.split()] for rows in (failed, planned)
    ]
    lines = ["| called too large | ran out of memory | ran |", "|---|---|---|"]
    lines += [f"| {name} | {' | '.join(map(_count_too_large, group))} |" for name, group in groups.items()]
    return "\n".join(lines) + "\n"


def _count_too_large(rows: Sequence[Planned]) -> str:
    too_large = sum(each.memory_gib > each.limit_gib for each in rows)
    return f"{too_large} of {len(rows)} ({too_large / len(rows):.0%})" if rows else "-"


def render_worst(planned: Sequence[Planned], count: int) -> str:
    """Return the rows that are furthest from the plan times the constant of their GPU."""
    constants = {
        gpu: statistics.median(each.ratio for each in planned if each.run.gpu == gpu)
        for gpu in {each.run.gpu for each in planned}
    }

    def off(each: Planned) -> float:
        factor = each.ratio / constants[each.run.gpu]
        return max(factor, 1 / factor)

    lines = ["| worst | layout | measured / (constant x predicted) | predicted step | cause |", "|---|---|---|---|---|"]
    for each in sorted(planned, key=off, reverse=True)[:count]:
        run = each.run
        layout = (
            f"{run.model} {run.seq}, {run.gpus} x {run.gpu}, tp{run.tp} pp{run.pp} dp{run.dp}, "
            f"{each.plan.layout.gradient_accumulation_steps} x {run.micro_batch}, recompute {run.recompute}"
        )
        cause = "; ".join(filter(None, (find_speed_cause(run), run.assumed and f"assumed: {run.assumed}", run.doubt)))
        factor = each.ratio / constants[run.gpu]
        lines.append(f"| {run.id} {run.source} | {layout} | {factor:.2f} | {explain(each)} | {cause} |")
    return "\n".join(lines) + "\n"


def explain(each: Planned) -> str:
    """Return what the predicted step is made of."""
    plan = each.plan
    total = plan.step_seconds
    slowest = max(plan.stages, key=lambda stage: stage.pass_seconds)
    passes = plan.layout.gradient_accumulation_steps * slowest.pass_seconds
    sums = plan.layout.gradient_accumulation_steps * slowest.sending_seconds
    parts = {
        "passes": passes - sums,
        "tensor parallel": sums,
        "waiting": plan.pipeline_seconds - passes,
        "replicas": plan.reduce_seconds,
        "optimizer": plan.optimizer_seconds,
    }
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds > 0.01 * total)


def render_refused(what: str, runs: Sequence[PublishedRun], refused: dict[str, list[PublishedRun]]) -> str:
    """Return how many rows were not planned, by reason."""
    counts = sorted(((len(rows), reason) for reason, rows in refused.items()), reverse=True)
    total = sum(count for count, _ in counts)
    return "\n".join([f"{what}: {total} of {len(runs)} not planned", *(f"  {n:4} {reason}" for n, reason in counts)])


def draw(planned: Sequence[Planned], file: Path) -> None:
    """Write a PNG: predicted against measured tokens/s of a GPU, both logarithmic, a color for each source."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.4), layout="constrained")
    axes = figure.subplots()
    sources = dict.fromkeys(each.run.source for each in planned)
    for number, source in enumerate(sources):
        rows = [each for each in planned if each.run.source == source]
        axes.scatter(
            [each.run.tokens_per_s_per_gpu for each in rows],
            [each.tokens_per_s_per_gpu for each in rows],
            s=14, alpha=0.7, linewidths=0, color=f"C{number % 10}", marker="o" if number < 10 else "^", label=source,
        )  # fmt: skip
    ends = [20.0, 2e5]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.8, 1.25):
        axes.plot(ends, [factor * end for end in ends], color="gray", linewidth=0.5, linestyle="--")
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends,
        xlabel="measured tokens/s of a GPU", ylabel="predicted, constants of conf/hardware",
    )  # fmt: skip
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=140)


if __name__ == "__main__":
    main()
