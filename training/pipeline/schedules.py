"""The schedules by name, and that of a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from errors import UserError
from training.config.schema import RunConfig
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule

if TYPE_CHECKING:  # it imports torch, for which a mistyped `schedule` need not wait
    from training.distributed.topology import Layout

SCHEDULES: dict[str, type[Schedule]] = {
    "1f1b": OneForwardOneBackward,
    "interleaved": Interleaved,
}


def find_schedule(name: str) -> type[Schedule]:
    """The value of the key `schedule`. Raises UserError for an unknown one."""
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def build_schedule(layout: Layout) -> Schedule:
    """The schedule that a layout runs."""
    return find_schedule(layout.schedule)(layout.num_stages, layout.gradient_accumulation_steps, layout.num_chunks)


def schedule_layout(layout: Layout, config: RunConfig, num_layers: int) -> Layout:
    """The layout under `config.schedule`. Raises UserError where the schedule is unknown or cannot run it."""
    name = config.schedule
    scheduled = replace(layout, schedule=name, num_chunks=find_schedule(name).count_chunks(config))
    build_schedule(scheduled).check(num_layers)
    return scheduled
