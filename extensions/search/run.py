"""The texts of `plan=search`, over one number of GPUs or over several."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from errors import UserError
from extensions.search.report import render_other_updates, render_search, render_sizes, require_fit
from extensions.search.search import search_plans
from extensions.search.space import Candidate, SharedModels
from models.adapters.options import AdapterName
from training.config.schema import RunConfig
from training.costs.hardware import Machine, complete_hardware
from training.inputs.estimates import count_steps, estimate_scored, estimate_steps
from training.plan_command.run import (
    check_world_size,
    describe_model,
    list_notes,
    plan_config,
    resolve_planned,
)
from training.planner.advice import ROUNDED, Changes, advise, apply_changes, render_changes
from training.resolution.resolve import check_keys

SHARED_AS = 3  # layouts of a search, whose ways to share are tried with other updates
ADAPTED: tuple[Changes, ...] = (
    {"adapter.name": AdapterName.lora},
    {"adapter.name": AdapterName.lora, "adapter.load_in_4bit": True},
)


def search(config: RunConfig, width: int | None) -> Iterator[str]:
    """Yield a search as text: over one number of GPUs, then what other updates would make of it; or over the numbers in
    `world_size`. width: of the tables in characters; None: no limit. Raises UserError, also where nothing fits."""
    configs = [config]
    if isinstance(config.world_size, list):
        configs = [replace(config, world_size=size) for size in dict.fromkeys(config.world_size)]
        if config.global_batch_size is None:
            raise UserError(
                f"world_size={config.world_size} compares runs of one global batch, and none is given; "
                "give global_batch_size=N"
            )
    config, described = configs[0], describe_model(config)
    model = resolve_planned(config, described)
    machines = [complete_hardware(each.hardware, each.precision, check_world_size(each)) for each in configs]
    yield from list_notes(config, model)
    machine, models = machines[0], SharedModels(config, model)
    searched = [search_plans(each, models, its) for each, its in zip(configs, machines, strict=True)]
    found, nearest = searched[0], searched[0][0]
    batch_size = nearest.plan.layout.global_batch_size
    total, _ = estimate_steps(config, batch_size, model.architecture)
    scored = estimate_scored(config, batch_size, model.architecture) if model.objective.scored else None
    known = count_steps(config, total), scored or 0
    if len(configs) > 1:
        best = {int(each.world_size): first for each, (first, *_) in zip(configs, searched)}
        yield render_sizes(best, sys.argv[1:], width, *known)
        return
    if not nearest.plan.fits:
        require_fit(nearest, advise(nearest.keys, nearest.plan, model.layers, partial(plan_config, machine=machine)))
    yield render_search(found, sys.argv[1:], width, *known)
    if others := try_other_updates(config, models, machine, found):
        yield render_other_updates(others, nearest, width, *known)


def try_other_updates(
    config: RunConfig, models: SharedModels, machine: Machine, found: Sequence[Candidate]
) -> dict[str, Candidate]:
    """Return the fastest layout with each change of the update, by its overrides; shared as the best few are, or
    without tensor parallelism where the run would refuse it."""
    among = list(dict.fromkeys(candidate.sharing for candidate in found[:SHARED_AS] if candidate.plan.fits))
    whole = [sharing._replace(tensor_parallel_size=1, sequence_parallel=False) for sharing in among]
    best = {}
    for overrides, changed in list_other_updates(config):
        with suppress(UserError):
            check_keys(changed, has_accelerator=True)
            own = models if changed.adapter == config.adapter else SharedModels(changed, resolve_planned(changed))
            try:
                nearest, *_ = search_plans(changed, own, machine, most=1, among=among)
            except UserError:  # weights in 4 bits are in no shards
                nearest, *_ = search_plans(changed, own, machine, most=1, among=list(dict.fromkeys(whole)))
            if nearest.plan.fits:
                best[overrides] = nearest
    return best


def list_other_updates(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield (overrides, config) of runs that take less memory and train the model by another update: with rounded
    averages of the optimizer, adapters, and adapters of weights in 4 bits."""
    for changes in (*ROUNDED, *(ADAPTED if config.adapter.name is AdapterName.none else ())):
        if overrides := render_changes(config, changes):
            yield overrides, apply_changes(config, changes)
