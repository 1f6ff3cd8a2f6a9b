"""Plans of composed configs, as the command makes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from extensions.search.search import SHOWN, search_plans
from extensions.search.space import Candidate, SharedModels
from training.config.schema import RunConfig
from training.costs.hardware import Machine, complete_hardware
from training.planner import run
from training.planner.plan import Plan
from training.planner.run import ModelFolder, build_plan, resolve_planned
from training.resolution.resolve import ResolvedModel, resolve_model
from training.resolution.target import Target

Builder = partial[Plan]  # of a config


def describe_machine(config: RunConfig) -> Machine:
    return complete_hardware(config.hardware, config.precision, config.world_size)


def plan_config(config: RunConfig) -> Plan:
    return run.plan_config(config, describe_machine(config))


def build_planner(config: RunConfig) -> Builder:
    """Returns what plans `config` with other keys, on the same model and machine."""
    return partial(build_plan, model=resolve_planned(config), machine=describe_machine(config))


def share_models(config: RunConfig) -> SharedModels:
    return SharedModels(config, resolve_planned(config))


def search_config(config: RunConfig, most: int = SHOWN) -> list[Candidate]:
    return search_plans(config, share_models(config), describe_machine(config), most=most)


def resolve_described(config: RunConfig, architecture: PretrainedConfig, world_size: int) -> ResolvedModel:
    """The resolved model of an architecture that lies in no folder, for ranks without GPUs."""
    return resolve_model(config, ModelFolder(Path("model"), architecture), Target(world_size, has_accelerator=False))
