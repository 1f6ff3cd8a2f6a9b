"""Plans of composed configs, as the command makes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from support.configs import compose_config
from transformers import PretrainedConfig

from extensions.search.search import SHOWN, search_plans
from extensions.search.space import Candidate, SharedModels
from training.config.schema import RunConfig, to_typed
from training.costs.hardware import Machine, complete_hardware
from training.plan_command import run
from training.plan_command.run import ModelFolder, build_plan, resolve_planned
from training.planner.plan import Plan
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


def build_small_plan(*overrides: str) -> Plan:
    """Returns the plan of a Llama of 7B on 4 stages of H100, 8 samples a step, with these overrides."""
    given = ("model=llama_7b", "plan=true", "world_size=4", "hardware=h100", "global_batch_size=8", *overrides)
    config = to_typed(compose_config("llama_7b_pp4", *given), ("model_name_or_path", "train_file", "output_dir"))
    return plan_config(config)
