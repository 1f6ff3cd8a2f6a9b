"""`plan=true` and `plan=search`: from a composed config to a printed plan, in one process, without weights or
DeepSpeed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from console import fit, measure_width
from errors import UserError
from models.adapters.freeze import check_freeze
from models.architecture.lookup import apply_rope_overrides, build_layers, check_length, choose_attention
from models.layers.layer import Layer
from models.layers.score_head import describe_reward_model, is_reward_model
from models.layers.wrapped import Wrapper
from models.sharding.tensor_parallel import shard_layers
from models.weights.config_file import load_config, parse_config
from training.checkpoint.run_folder import RunFolder
from training.config.schema import NOT_GIVEN, RunConfig, to_typed
from training.config.validate import check_config, check_model_fields
from training.cost_terms.cost_term import PlannedRun
from training.costs.hardware import Machine, complete_hardware
from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error
from training.distributed.topology import PIPE, build_layout, name_sizes, read_sizes
from training.objectives.registry import check_objective, get_objective
from training.pipeline.packing import check_run_packing
from training.pipeline.partition import compute_bounds
from training.pipeline.pass_times import time_passes
from training.pipeline.routers import build_router_options
from training.pipeline.schedules import build_schedule, find_schedule, schedule_layout
from training.pipeline.sequence_parts import check_run_sequences
from training.planner.plan import Plan, build_fits, compute_plan, count_costs
from training.planner.profile_machine import profile_layers
from training.planner.remedies import find_remedies
from training.planner.report import render_plan
from training.planner.search import render_search, search_plans
from training.planner.timeline import predicted_timeline


def run_plan(composed: Any) -> None:
    """Prints the plan of a composed config. A UserError ends the process with one line."""
    width = measure_width(sys.stdout)
    with exit_on_user_error(SINGLE_PROCESS):
        for text in plan_run(to_typed(composed, unread=("model_name_or_path", "train_file", "output_dir")), width):
            print(fit(text, width), flush=True)


def plan_run(config: RunConfig, width: int | None = None) -> Iterator[str]:
    """What is printed, each text as soon as it is known. width: of tables, None for as wide as they are. Raises
    UserError."""
    check_config(config, has_accelerator=True)
    find_schedule(config.schedule)
    check_objective(config)
    world_size = check_world_size(config)
    architecture, wrapper = read_architecture(config)
    layers = shard_layers(architecture, build_layers(architecture), config.tensor_parallel_size)
    check_run_sequences(config, architecture, layers)
    build_router_options(config, architecture, layers)
    hardware = complete_hardware(config.hardware, config.precision, world_size)
    if wrapper is not None:
        yield f"text only: the plan of the '{architecture.model_type}' in {wrapper.name}; the rest is on no card"
    again = partial(build_plan, architecture=architecture, layers=layers, hardware=hardware)
    if config.plan == "search":
        found = search_plans(config, architecture, layers, hardware)
        remedies = [] if found[0].plan.fits else find_remedies(found[0].plan, replace(found[0].keys, plan=True), again)
        yield render_search(found, config, hardware, width, remedies)
        return
    plan = build_plan(config, architecture, layers, hardware)
    steps = count_steps(config, plan.layout.global_batch_size)
    remedies = [] if plan.fits else find_remedies(plan, config, again)
    yield render_plan(plan, config, hardware, steps, width=width, remedies=remedies)
    yield f"picture of the schedule: {save_picture(plan, config)}"


def save_picture(plan: Plan, config: RunConfig) -> Path:
    """Draws the schedule into output_dir. Raises UserError where that cannot be written."""
    from training.planner.timeline_plot import draw_timelines  # matplotlib takes as long to import as all else here

    folder = RunFolder(config.output_dir if config.output_dir != NOT_GIVEN else "outputs/plan")
    folder.check_writable()
    folder.path.mkdir(parents=True, exist_ok=True)
    file = folder.path / "schedule.png"
    draw_timelines([predicted_timeline(plan)], f"{Path(config.output_dir).name}, {plan.layout.describe()}", file)
    return file


def check_world_size(config: RunConfig) -> int:
    """The number of ranks to plan for. Raises UserError when it is not given, or is not a multiple of the stages."""
    if config.world_size is None:
        raise UserError(f"plan={str(config.plan).lower()} needs world_size=N, the number of cards to plan for")
    if config.world_size < 1:
        raise UserError(f"world_size={config.world_size}: at least 1")
    sizes = {axis: size for axis, size in read_sizes(config).items() if axis != PIPE or config.plan is True}
    replica = math.prod(sizes.values())
    if min(sizes.values()) >= 1 and config.world_size % replica:
        above = -(-config.world_size // replica) * replica
        nearest = f"{above - replica} or {above}" if above > replica else f"{above}"
        raise UserError(
            f"world_size={config.world_size} is not a multiple of {name_sizes(sizes)}; the nearest is {nearest}"
        )
    return config.world_size


def load_architecture(config: RunConfig) -> PretrainedConfig:
    """The text model to plan: `read_architecture` without what is around it."""
    return read_architecture(config)[0]


def read_architecture(config: RunConfig) -> tuple[PretrainedConfig, Wrapper | None]:
    """The weights' own config.json where `model_name_or_path` exists, else what `conf/model/` states; and the model
    around it, if there is one.

    Raises UserError when there is neither, or when they differ.
    """
    wrapper = None
    path = Path(config.model_name_or_path).expanduser()
    if path.exists():
        folder = path.parent if path.name.startswith("global_step") else path
        architecture, wrapper = load_config(folder, config.trust_remote_code)
        check_model_fields(config.model, architecture, str(folder))
    elif config.model:
        architecture = parse_config(config.model, Path("conf/model"))
    else:
        where = "" if config.model_name_or_path == NOT_GIVEN else f"model_name_or_path={path} is not there, and "
        raise UserError(
            f"{where}model=from_checkpoint states no architecture to plan; "
            "choose one of conf/model, such as model=llama_7b"
        )
    apply_rope_overrides(architecture, config.rope_parameters.list_given())
    if get_objective(config).scores_rows and not is_reward_model(architecture):
        architecture = describe_reward_model(architecture)
    architecture._attn_implementation = choose_attention(architecture, config.attn_implementation.value)
    check_length(architecture, config.max_seq_length)
    check_run_packing(config, architecture)
    return architecture, wrapper


def build_plan(config: RunConfig, architecture: PretrainedConfig, layers: list[Layer], hardware: Machine) -> Plan:
    """The plan of exactly this config on complete `hardware`."""
    layout = build_layout(config, check_world_size(config), len(layers), has_accelerator=True)
    layout = schedule_layout(layout, config, len(layers))
    check_freeze(config.freeze, layers)
    costs = count_costs(config, architecture, layers, layout)
    run = PlannedRun(config, layout, architecture.vocab_size, hardware)
    fits = build_fits(costs, run)
    bounds = compute_bounds(
        layers, layout.num_stages, config.partition_method, fits=fits, schedule=build_schedule(layout)
    )
    layout = time_passes(layout, config, layers, bounds, get_objective(config).remakes_logits)
    run = replace(run, layout=layout)
    if config.hardware.peak_flops is None:  # this machine
        costs, hardware = profile_layers(run, architecture, costs)
    return compute_plan(costs, bounds, replace(run, hardware=hardware))


def count_steps(config: RunConfig, global_batch_size: int) -> int | None:
    """Optimizer steps of the whole run: max_steps, or from the lines of a JSONL train_file; None when neither is
    there."""
    if config.max_steps is not None:
        return config.max_steps
    file = Path(str(config.train_file))
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with open(file, "rb") as lines:
        num_samples = sum(1 for line in lines if line.strip())
    return max(1, round(config.num_train_epochs * (num_samples // global_batch_size)))
