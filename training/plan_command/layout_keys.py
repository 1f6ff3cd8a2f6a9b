"""A training command at another layout. It imports no torch: `scripts/supervise.py` changes commands too."""

from __future__ import annotations

from collections.abc import Sequence

from training.pipeline.schedules import SCHEDULE_KEYS


def change_keys(command: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the command with these keys in place of its own, without what would be for another layout: a list in
    `partition_method`, and keys of another schedule."""
    values = {name: value for name, _, value in (key.partition("=") for key in keys)}
    others = SCHEDULE_KEYS if "schedule" in values else {}
    names = {*values, *(name for schedule, read in others.items() if schedule != values["schedule"] for name in read)}
    kept = [
        word for word in command if word.partition("=")[0] not in names and not word.startswith("partition_method=[")
    ]
    return [*kept, *keys]
