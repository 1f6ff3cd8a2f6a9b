"""Plans a run again with keys changed: what each change brings, or what makes a run fit that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from errors import UserError
from models.layers.fused_kernels import fuse_kernels
from models.layers.layer import Layer
from training.config.schema import (
    AUTO,
    CheckpointMode,
    Device,
    FusedKernels,
    Offload,
    OptimizerName,
    RunConfig,
    StateDtype,
)
from training.costs.hardware import GIB
from training.planner.plan import Plan

Changes = Mapping[str, Any]  # values by key: those of a group by `group.key`
Build = Callable[[RunConfig], Plan]  # the plan of a config

# Each gives memory for time, and changes no gradient, as the entries of `SAVING` do
RECOMPUTED: Changes = {"activation_checkpoint_interval": 1, "activation_checkpoint_mode": CheckpointMode.grouped}
_ZERO_2, _ZERO_3, _MOVED = {"zero_stage": 2}, {"zero_stage": 3}, {"activation_offload": True}
_OPTIMIZER, _PARAMETERS = {"offload_optimizer": Offload.cpu}, {"offload_parameters": Offload.cpu}
SAVING: tuple[dict[str, Any], ...] = (
    *(_ZERO_2, _OPTIMIZER, _ZERO_3, _ZERO_3 | _PARAMETERS),
    *(_MOVED, _MOVED | _OPTIMIZER, _MOVED | _ZERO_2, _MOVED | _ZERO_3),
)
# Without them: less time, and less memory of the host
UNUSED: dict[str, Any] = {
    "activation_offload": False,
    "offload_optimizer": Offload.none,
    "zero_stage": 1,
    "offload_parameters": Offload.none,
}
# The optimizer's averages are rounded.
ROUNDED: tuple[Changes, ...] = (
    {"optimizer.state_dtype": StateDtype.bf16},
    {"optimizer.name": OptimizerName.adamw_8bit},
)
# Each takes less time, if not the same, and changes no gradient; larger micro-batches as well.
FUSED: Changes = {"fused_kernels": FusedKernels.auto}
FASTER: tuple[Changes, ...] = (
    {"compile": True},
    {"activation_checkpoint_interval": AUTO, "activation_checkpoint_mode": CheckpointMode.grouped},
)


class Variant(NamedTuple):
    """A run with some keys changed."""

    overrides: str  # as on the command line
    plan: Plan

    def describe(self) -> str:
        return f"{self.overrides} ({self.plan.fullest.memory.peak / GIB:.1f} GiB)"


def advise(config: RunConfig, plan: Plan, layers: Sequence[Layer], build: Build) -> list[Variant]:
    """Return what single changes bring to a run that fits its GPUs; of one that does not those that make it fit, alone,
    else with recomputation, else with rounded averages too. Empty on a CPU that has room.

    config: as it was given, so that what is `auto` is chosen anew. layers: of the model. build: returns the plan of a
    config, as its run would resolve it; raises UserError where the run would.
    """
    levels: list[Sequence[Changes]] = []
    if not plan.fits:
        unused = [{key: value} for key, value in UNUSED.items()]
        levels.append([RECOMPUTED, *SAVING, *ROUNDED, *unused])
        levels += [[{**RECOMPUTED, **more, **changes} for changes in SAVING] for more in ({}, ROUNDED[0])]
    elif plan.run.hardware.device is Device.cuda:
        layout, fused = plan.layout, [FUSED] * bool(fuse_kernels(layers[len(layers) // 2].build_on_meta()))
        larger = {"micro_batch_size": 2 * layout.micro_batch_size, "gradient_accumulation_steps": None}
        levels.append([*fused, *FASTER, {**larger, "global_batch_size": layout.global_batch_size}])
    for level in levels:
        if found := list(_try_level(config, plan, level, build)):
            return found
    return []


def _try_level(config: RunConfig, plan: Plan, level: Sequence[Changes], build: Build) -> Iterator[Variant]:
    """Yield the run with each of these changes that it would not refuse and does not have; where it does not fit, with
    those that make it fit, but for those with more in them than another."""
    enough = list[Changes]()
    for changes in level:
        overrides = render_changes(config, changes)
        if not overrides or any(fewer.items() <= changes.items() for fewer in enough):
            continue
        with suppress(UserError):
            changed = build(apply_changes(config, changes))
            if changed.run.config != plan.run.config and (plan.fits or changed.fits):
                enough.append(changes)
                yield Variant(overrides, changed)


def apply_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """Return the config with these values."""
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})} if group else {key: value})
    return config


def render_changes(config: RunConfig, changes: Changes) -> str:
    """Return the overrides of what is another value in `config`."""
    return " ".join(render_override(key, value) for key, value in changes.items() if attrgetter(key)(config) != value)


def render_override(key: str, value: Any) -> str:
    """Return an override as it is given on the command line."""
    return f"{key.removesuffix('.name')}={render_value(value)}"


def render_value(value: Any) -> str:
    """Return the value of a key as it is given on the command line."""
    return "null" if value is None else str(getattr(value, "value", value)).lower()
