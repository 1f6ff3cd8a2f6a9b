"""`plan=search`: every split of the ranks into stages and replicas, every micro-batch size and way of checkpointing,
best first.

The global batch stays what the config says, so each found layout trains the same run; `tensor_parallel_size` stays too.
With another schedule than 1f1b both are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from errors import UserError
from models.layer import Layer
from training.config.schema import CheckpointMode, Offload, RunConfig
from training.distributed.topology import DATA, PIPE, Layout, Topology, build_layout, read_sizes
from training.objectives.registry import get_objective
from training.pipeline.partition import balance, compute_bounds, compute_work
from training.pipeline.pass_times import time_passes
from training.pipeline.schedules import build_schedule, schedule_layout
from training.planner.cost import LayerCost
from training.planner.hardware import GIB, Machine
from training.planner.levers.lever import PlannedRun
from training.planner.plan import Plan, build_fits, compute_plan, count_costs
from training.planner.report import largest_kind, render_rows, render_seconds

# (mode, interval): from keeping all activations to making all of them again. The last takes the same time in groups of
# any size, so the size with the least memory is taken. Where two are equally fast, the first is.
CHECKPOINTING = (
    ((CheckpointMode.grouped, 0),),
    ((CheckpointMode.selective, 1),),
    ((CheckpointMode.every, 4),),
    ((CheckpointMode.every, 2),),
    tuple((CheckpointMode.grouped, interval) for interval in (1, 2, 4, 8)),
)
SHOWN = 10


@dataclass(frozen=True)
class Candidate:
    """A layout that was tried, and the keys that differ from the config's own."""

    overrides: tuple[str, ...]
    plan: Plan


def search_plans(
    config: RunConfig, architecture: PretrainedConfig, layers: Sequence[Layer], hardware: Machine
) -> list[Candidate]:
    """All layouts, those that fit first and by tokens/s, then those that do not by the memory they miss.

    Raises UserError when the global batch cannot be cut for any split.
    """
    world_size = config.world_size
    assert world_size is not None
    candidates = []
    costs: dict[int, list[LayerCost]] = {}  # by micro-batch size
    work = [compute_work(layer) for layer in layers]
    total = _global_batch_size(config, world_size, len(layers))
    given = {axis: size for axis, size in read_sizes(config).items() if axis != PIPE}
    for num_stages, micro_batch_size in _list_layouts(world_size // math.prod(given.values()), len(layers), total):
        topology = Topology.of(world_size, **given, **{PIPE: num_stages})
        layout = Layout(topology, micro_batch_size, total // (micro_batch_size * topology.size(DATA)))
        if micro_batch_size not in costs:
            costs[micro_batch_size] = count_costs(config, architecture, layers, layout)
        scheduled = list(_list_schedules(layout, config, len(layers)))
        splits = [
            compute_bounds(layers, num_stages, _method(config), schedule=build_schedule(each)) for each in scheduled
        ]
        for (layout, bounds), choices, offload in itertools.product(
            zip(scheduled, splits, strict=True), CHECKPOINTING, Offload
        ):
            tried = []
            for mode, interval in choices:
                keys = replace(
                    config,
                    activation_checkpoint_mode=mode,
                    activation_checkpoint_interval=interval,
                    offload_optimizer=offload,
                )
                timed = time_passes(layout, keys, layers, bounds, get_objective(keys).remakes_logits)
                run = PlannedRun(keys, timed, architecture.vocab_size, hardware)
                plan = compute_plan(costs[micro_batch_size], bounds, run)
                if layout.num_chunks == 1 and _may_fit_otherwise(plan, config):
                    other = balance(work, num_stages, build_fits(costs[micro_batch_size], run)) or bounds
                    plan = compute_plan(costs[micro_batch_size], other, run)
                tried.append(Candidate(_overrides(layout, mode, interval, offload), plan))
            candidates.append(min(tried, key=lambda candidate: candidate.plan.fullest.memory.peak))
    if not candidates:
        raise UserError(
            f"global_batch_size={total} can be cut for no split of world_size={world_size}; "
            "give a multiple of a divisor of it"
        )
    return sorted(candidates, key=_rank)


def _list_schedules(layout: Layout, config: RunConfig, num_layers: int) -> Iterator[Layout]:
    """The layout under 1F1B and under the schedule that the config asks for, where that can run it; one stage has no
    bubble to fill."""
    for name in dict.fromkeys(("1f1b", config.schedule if layout.num_stages > 1 else "1f1b")):
        with suppress(UserError):
            yield schedule_layout(layout, replace(config, schedule=name), num_layers)


def _may_fit_otherwise(plan: Plan, config: RunConfig) -> bool:
    """Whether other stages have room for what the fullest one has too much of, and `balanced` may give it to them."""
    total = sum(stage.memory.peak for stage in plan.stages)
    return _method(config) == "balanced" and plan.missing_memory > 0 and total <= len(plan.stages) * plan.memory_limit


def _rank(candidate: Candidate) -> tuple[bool, float]:
    plan = candidate.plan
    return (
        (False, -plan.tokens_per_second)
        if plan.fits
        else (True, max(plan.missing_memory, 0) + max(plan.missing_host_memory, 0))
    )


def _global_batch_size(config: RunConfig, world_size: int, num_layers: int) -> int:
    if config.global_batch_size is not None:
        return config.global_batch_size
    return build_layout(config, world_size, num_layers, has_accelerator=True).global_batch_size


def _method(config: RunConfig) -> str:
    """A list of layers a stage serves one number of stages only."""
    return "balanced" if isinstance(config.partition_method, list) else config.partition_method


def _list_layouts(world_size: int, num_layers: int, global_batch_size: int) -> Iterator[tuple[int, int]]:
    """(num_stages, micro_batch_size) that divide the ranks and the global batch; micro-batches in powers of two.

    world_size: in groups that share layers.
    """
    for num_stages in range(1, min(world_size, num_layers) + 1):
        dp_size = world_size // num_stages
        if world_size % num_stages or global_batch_size % dp_size:
            continue
        micro_batch_size = 1
        while global_batch_size // dp_size % micro_batch_size == 0:
            yield num_stages, micro_batch_size
            micro_batch_size *= 2


def _overrides(layout: Layout, mode: CheckpointMode, interval: int, offload: Offload) -> tuple[str, ...]:
    return (
        f"num_stages={layout.num_stages}",
        f"micro_batch_size={layout.micro_batch_size}",
        "gradient_accumulation_steps=null",
        f"global_batch_size={layout.global_batch_size}",
        f"activation_checkpoint_interval={interval}",
        f"activation_checkpoint_mode={mode.value}",
        f"offload_optimizer={offload.value}",
        f"schedule={layout.schedule}",
    )


def render_search(
    candidates: Sequence[Candidate], config: RunConfig, hardware: Machine, width: int | None = None
) -> str:
    """The best layouts and the overrides of the first. width: as of `render_rows`.

    Raises UserError when none fits, with what the nearest one misses.
    """
    fitting = [candidate for candidate in candidates if candidate.plan.fits]
    if not fitting:
        raise UserError(_nothing_fits(candidates[0], config, hardware))
    header = (
        "pp",
        "dp",
        "micro-batch",
        "micro-batches",
        "checkpoint",
        "offload",
        "peak GiB",
        "host GiB",
        "step",
        "tokens/s",
        "MFU",
    )
    rows = [_row(candidate) for candidate in fitting[:SHOWN]]
    return "\n".join(
        [
            f"{len(fitting)} of {len(candidates)} layouts fit {config.world_size} x {hardware.name}; "
            "the fastest, as predicted:",
            "",
            *render_rows(header, rows, width),
            "",
            f"use: {' '.join(fitting[0].overrides)}",
        ]
    )


def _row(candidate: Candidate) -> tuple[str, ...]:
    plan, keys = candidate.plan, dict(override.split("=") for override in candidate.overrides)
    layout = plan.layout
    chunks = f" x {layout.num_chunks} chunks" if layout.num_chunks > 1 else ""
    return (
        f"{layout.num_stages}{chunks}", str(layout.dp_size), str(layout.micro_batch_size),
        str(layout.gradient_accumulation_steps), _name_checkpointing(keys), keys["offload_optimizer"],
        f"{plan.fullest.memory.peak / GIB:.1f}",
        f"{plan.host_bytes / GIB:,.0f}", render_seconds(plan.step_seconds),
        f"{plan.tokens_per_second:,.0f}", f"{plan.mfu:.1%}",
    )  # fmt: skip


def _name_checkpointing(keys: dict[str, str]) -> str:
    mode, interval = keys["activation_checkpoint_mode"], keys["activation_checkpoint_interval"]
    return {"grouped": interval, "every": f"every {interval}", "selective": "selective"}[mode]


def _nothing_fits(nearest: Candidate, config: RunConfig, hardware: Machine) -> str:
    plan = nearest.plan
    missing = []
    if plan.missing_memory > 0:
        kind = largest_kind(plan.fullest)
        missing.append(
            f"{plan.missing_memory / GIB:.1f} GiB on a card (stage {plan.fullest.stage_id}; most of it is {kind})"
        )
    if plan.missing_host_memory > 0:
        missing.append(f"{plan.missing_host_memory / GIB:,.0f} GiB of host memory a node")
    return (
        f"no layout fits world_size={config.world_size} x hardware={hardware.name}; "
        f"the nearest ({' '.join(nearest.overrides)}) misses {' and '.join(missing)}; "
        "raise world_size, take larger cards, or lower max_seq_length"
    )
