"""The schedules by name, and that of a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from errors import UserError
from training.config.schema import RunConfig
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule
from training.pipeline.zero_bubble import ZeroBubble

if TYPE_CHECKING:  # it imports torch, for which a mistyped `schedule` need not wait
    from training.distributed.topology import Layout

SCHEDULES: dict[str, type[Schedule]] = {
    "1f1b": OneForwardOneBackward,
    "interleaved": Interleaved,
    "zero_bubble": ZeroBubble,
}
# The keys that each schedule reads
SCHEDULE_KEYS = {"interleaved": ["virtual_stages_per_rank"], "zero_bubble": ["schedule_memory_limit"]}


def find_schedule(name: str) -> type[Schedule]:
    """Return the class of the value of the key `schedule`. Raises UserError for an unknown one."""
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def build_schedule(layout: Layout) -> Schedule:
    """Return the schedule that a layout runs."""
    found = find_schedule(layout.schedule)
    sizes = layout.num_stages, layout.gradient_accumulation_steps, layout.num_chunks, layout.pass_times
    return found(*sizes, *([layout.max_in_flight] if found.splits_backward else []))


def schedule_layout(layout: Layout, config: RunConfig, num_layers: int) -> Layout:
    """Return the layout under `config.schedule`. Raises UserError where the schedule is unknown or cannot run it."""
    name = config.schedule
    found = find_schedule(name)
    read = {key: getattr(config, key) for key in SCHEDULE_KEYS.get(name, ())}
    num_chunks = found.count_chunks(read.get("virtual_stages_per_rank", 1))
    limit = read.get("schedule_memory_limit")
    scheduled = replace(layout, schedule=name, num_chunks=num_chunks, max_in_flight=limit)
    build_schedule(scheduled).check(num_layers)
    return scheduled
