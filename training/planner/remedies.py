"""Finds changes that make a plan fit: plans again with one key changed, then with several that leave the run's numbers
as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple

from errors import UserError
from models.adapters.options import AdapterName, AdapterOptions
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import CheckpointMode, Offload, OptimizerName, RunConfig, StateDtype
from training.config.validate import check_config
from training.costs.hardware import GIB
from training.planner.plan import Plan

# Each gives memory for time, and changes no gradient; from the cheapest on.
EXACT: tuple[dict[str, Any], ...] = (
    {"activation_checkpoint_interval": 1, "activation_checkpoint_mode": CheckpointMode.grouped},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"activation_offload": True},
    {"offload_optimizer": Offload.cpu},
    {"offload_parameters": Offload.cpu, "zero_stage": 3},
)
# Each gives time, and memory of the GPU, for memory of the host.
BACK: tuple[dict[str, Any], ...] = (
    {"offload_optimizer": Offload.none},
    {"activation_offload": False},
    {"offload_parameters": Offload.none},
)
# The optimizer's averages are rounded.
ROUNDED: tuple[dict[str, Any], ...] = ({"state_dtype": StateDtype.bf16}, {"name": OptimizerName.adamw_8bit})


class Remedy(NamedTuple):
    """Overrides, and the plan of the run with them."""

    overrides: str
    plan: Plan

    def describe(self) -> str:
        return f"{self.overrides} ({self.plan.fullest.memory.peak / GIB:.1f} GiB)"


def describe_remedies(remedies: Sequence[Remedy]) -> str:
    """Return the alternatives as words: overrides, each with the GiB that the fullest stage then needs."""
    return " or ".join(remedy.describe() for remedy in remedies)


def find_remedies(plan: Plan, config: RunConfig, build: Callable[[RunConfig], Plan]) -> list[Remedy]:
    """Return the remedies that make the plan fit by themselves, else combinations of several that do. build: plans a
    config."""
    back = BACK if plan.missing_host_memory > 0 else ()
    alone = [_try(config, changes, build) for changes in (*EXACT, *ROUNDED, *back)]
    if fitting := [remedy for remedy in alone if remedy is not None and remedy.plan.fits]:
        return fitting
    offloading = [changes for changes in EXACT if changes.get("zero_stage") != 3]  # they do not go together
    sharding = [changes for changes in EXACT if "offload_optimizer" not in changes]
    together = [_collect(plan, config, [*chain, *ROUNDED[:1]], build) for chain in (offloading, sharding)]
    return [remedy for remedy in together if remedy is not None]


def _collect(
    plan: Plan, config: RunConfig, chain: Sequence[dict[str, Any]], build: Callable[[RunConfig], Plan]
) -> Remedy | None:
    """Add changes that reduce the missing memory one by one until the plan fits, then drop those that it does not need.
    None where it never fits."""
    collected: list[dict[str, Any]] = []
    best = Remedy("", plan)
    for changes in chain:
        found = _try(config, _merge([*collected, changes]), build)
        if found is not None and _measure_lack(found.plan) < _measure_lack(best.plan):
            collected, best = [*collected, changes], found
            if best.plan.fits:
                break
    for changes in collected if best.plan.fits else []:
        fewer = [each for each in collected if each is not changes]
        found = _try(config, _merge(fewer), build)
        if found is not None and found.plan.fits:
            collected, best = fewer, found
    return best if best.plan.fits else None


def _measure_lack(plan: Plan) -> float:
    """Return the bytes by which a plan exceeds the memory of a GPU and of a host."""
    return max(plan.missing_memory, 0) + max(plan.missing_host_memory, 0)


def _merge(collected: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for changes in collected for key, value in changes.items()}


def list_other_updates(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield (overrides, config) of runs that take less memory and train the model by another update: with rounded
    averages of the optimizer, adapters, and adapters of weights in 4 bits."""
    for changes in ROUNDED:
        if (changed := _change(config, changes)) != config:
            yield _render_all(changes), changed
    if config.adapter.name is AdapterName.none:
        lora = AdapterOptions(name=AdapterName.lora)
        yield "adapter=lora", replace(config, adapter=lora)
        yield "adapter=lora adapter.load_in_4bit=true", replace(config, adapter=replace(lora, load_in_4bit=True))


def _change(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    names = {field.name for field in fields(config.optimizer)}
    optimizer_changes = {key: value for key, value in changes.items() if key in names}
    others = {key: value for key, value in changes.items() if key not in optimizer_changes}
    return replace(config, optimizer=replace(config.optimizer, **optimizer_changes), **others)


def _try(config: RunConfig, changes: Mapping[str, Any], build: Callable[[RunConfig], Plan]) -> Remedy | None:
    """None where the config has it, or cannot have it."""
    changed = _change(config, changes)
    if changed == config:
        return None
    with suppress(UserError):
        check_config(changed, has_accelerator=True)
        check_together(CheckedConfig(changed))
        return Remedy(_render_all(changes), build(changed))
    return None


def _render_all(changes: Mapping[str, Any]) -> str:
    return " ".join(_render(key, value) for key, value in changes.items())


def _render(key: str, value: Any) -> str:
    written = getattr(value, "value", value)
    if isinstance(value, OptimizerName):
        return f"optimizer={written}"
    name = "optimizer.state_dtype" if isinstance(value, StateDtype) else key
    return f"{name}={str(written).lower() if isinstance(value, bool) else written}"
