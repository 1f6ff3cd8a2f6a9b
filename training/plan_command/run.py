"""`plan=...`: from a composed config to a printed plan, in one process, without weights or an engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from console import fit, measure_width
from data.encoders.kinds import find_kind
from errors import UserError
from extension import find_plan, load_part
from formatting import render_bytes
from masking import mask_text
from models.architecture.lookup import warn_of_length
from models.experts.sizes import count_experts
from models.layers.wrapped import Wrapper
from models.storage.tensor_files import load_json
from models.weights.config_file import load_config, parse_config
from models.weights.edits import edit_weights
from models.weights.further import choose_further
from models.weights.quantized import parse_quantization
from models.weights.sources import open_weights
from training.checkpoint.run_folder import RunFolder
from training.config.incompatible import CheckedConfig
from training.config.precision import DTYPES
from training.config.schema import NOT_GIVEN, RunConfig, to_typed
from training.costs.hardware import Machine, complete_hardware
from training.disk_space import measure_passthrough
from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error
from training.distributed.topology import PIPE, Layout, name_sizes, read_sizes
from training.inputs.datasets import count_added_rows, has_tokenizer
from training.inputs.estimates import count_steps, estimate_scored, estimate_steps, find_model_folder
from training.layer_times import profile_layers
from training.objectives.auxiliary import AuxiliaryModel
from training.objectives.registry import find_auxiliary
from training.optim.lr_schedule import warn_of_warmup
from training.plan_command.report import render_plan
from training.plan_command.timeline import predicted_timeline
from training.planner.advice import advise
from training.planner.longest import find_longest
from training.planner.plan import Plan, plan_resolved
from training.resolution.readers import check_read
from training.resolution.resolve import ResolvedModel, ResolvedRun, check_keys, resolve_layout, resolve_model
from training.resolution.target import Target


def run_plan(composed: Any, given: Collection[str] = ()) -> None:
    """Print the plan of a composed config. A UserError ends the process with one line. given: see `check_read`."""
    width = measure_width(sys.stdout)
    with exit_on_user_error(SINGLE_PROCESS):
        config = to_typed(composed, unread=("model_name_or_path", "train_file", "output_dir"))
        check_keys(config, has_accelerator=True)
        run = CheckedConfig(config, has_experts=has_experts(config))
        for text in check_read(run, given, continues=config.resume is not None):
            SINGLE_PROCESS.say(text)
        for text in plan_run(config, width):
            print(fit(mask_text(text), width), flush=True)


def has_experts(config: RunConfig) -> bool:
    """Return whether the model to plan is a mixture of experts. Raises UserError where there is none."""
    return count_experts(describe_model(config).config) != (1, 1)


def plan_run(config: RunConfig, width: int | None = None) -> Iterator[str]:
    """Yield the texts of a plan, each as soon as it is known; where an extension has another way to plan, its texts.
    width: of the tables in characters; None: no limit. Raises UserError."""
    check_keys(config, has_accelerator=True)
    if isinstance(config.plan, str):
        yield from load_part(find_plan(config.plan))(config, width)
        return
    described = describe_model(config)
    model = resolve_planned(config, described)
    machine = complete_hardware(config.hardware, config.precision, check_world_size(config))
    yield from list_notes(config, model)
    run, other = resolve_layout(model, config, _build_target(config, machine)), resolve_auxiliary(config, model)
    if run.recomputation is not None:
        yield run.recomputation
    plan = _plan_placed(run, machine, other)
    steps, note = estimate_steps(config, plan.layout.global_batch_size, model.architecture)
    if steps is not None and (text := warn_of_warmup(steps, config)):
        yield f"warning: {text}"
    is_scored, rows = model.objective.scored, None
    if is_scored or (other is not None and not other.model.is_resident(config)):
        rows = estimate_scored(config, plan.layout.global_batch_size, model.architecture)
    earlier = {"for the reference's scores": plan.time_forward(rows)} if is_scored and rows else {}
    if other is not None:
        placed = place_auxiliary(config, other, plan.layout)
        text, seconds = load_part(other.model.plan)(placed, machine, config, rows)
        earlier |= {} if seconds is None else {f"for the {other.model.name}'s pass": seconds}
        yield text
    build = partial(plan_config, machine=machine, described=described)
    fits = partial(fits_at, plan, model, machine, other)
    most = getattr(model.architecture, "max_position_embeddings", None)
    is_indexed = getattr(model.architecture, "index_topk", None) is not None  # whose cost depends most on the length
    yield render_plan(
        plan,
        count_steps(config, steps),
        note=note,
        earlier=earlier,
        passthrough=find_passthrough_bytes(config),
        width=width,
        advice=advise(config, plan, model.layers, build),
        longest=find_longest(plan, fits, most) if is_indexed and most else None,
    )
    yield f"picture of the schedule: {save_picture(plan, config)}"


def fits_at(
    plan: Plan, model: ResolvedModel, machine: Machine, auxiliary: PlannedAuxiliary | None, length: int
) -> bool:
    """Return whether the run of a plan fits with rows of `length` tokens. model: of the plan, whose layers are those of
    any length up to the positions that it has."""
    with suppress(UserError):
        return build_plan(replace(plan.run.config, max_seq_length=length), model, machine, auxiliary).fits
    return False


def list_notes(config: RunConfig, model: ResolvedModel) -> Iterator[str]:
    """Yield what there is to say of the model to plan."""
    if (wrapper := model.wrapper) is not None:
        rest = "the rest is on no GPU"
        if find_kind(config.data.name).front:
            size = render_bytes(wrapper.count_outside() * DTYPES[config.precision].itemsize)
            rest = f"the rest, {size} and its activations, is on the first stage too, and not counted"
        yield f"text only: the plan of the '{model.architecture.model_type}' in {wrapper.name}; {rest}"
    if warning := warn_of_length(model.architecture, config.max_seq_length):
        yield f"warning: {warning}"


def plan_config(config: RunConfig, machine: Machine, described: ModelFolder | None = None) -> Plan:
    """Return the plan of a config on complete `machine`, from the beginning. described: as in `resolve_planned`. Raises
    UserError for all that the run would refuse, but for what depends on its machine and files."""
    model = resolve_planned(config, described)
    return build_plan(config, model, machine, resolve_auxiliary(config, model))


def resolve_planned(config: RunConfig, described: ModelFolder | None = None) -> ResolvedModel:
    """Return the resolved model of a plan. described: by `describe_model`, which reads files; None to read them. Raises
    UserError as `plan_config`."""
    check_keys(config, has_accelerator=True)
    return resolve_model(config, described or describe_model(config), _build_target(config))


def _build_target(config: RunConfig, machine: Machine | None = None) -> Target:
    return Target(check_world_size(config), True, machine, is_planned=True)


def save_picture(plan: Plan, config: RunConfig) -> Path:
    """Draws the schedule into output_dir. Raises UserError where that cannot be written."""
    from training.plan_command.timeline_plot import (
        draw_timelines,  # matplotlib takes as long to import as all else here
    )

    folder = RunFolder(config.output_dir if config.output_dir != NOT_GIVEN else "outputs/plan")
    folder.check_writable()
    folder.path.mkdir(parents=True, exist_ok=True)
    file = folder.path / "schedule.png"
    draw_timelines([predicted_timeline(plan)], f"{Path(config.output_dir).name}, {plan.layout.describe()}", file)
    return file


def check_world_size(config: RunConfig) -> int:
    """Return the number of ranks to plan for. Raises UserError when it is not given, is a list, or is not a multiple of
    the stages."""
    if config.world_size is None:
        raise UserError(f"plan={str(config.plan).lower()} needs world_size=N, the number of GPUs to plan for")
    if isinstance(config.world_size, list):
        raise UserError(f"world_size={config.world_size}: this plan is for one number of GPUs; give one")
    sizes = {axis: size for axis, size in read_sizes(config).items() if axis != PIPE or not config.varies_layout}
    replica = math.prod(sizes.values())
    if min(sizes.values()) >= 1 and config.world_size % replica:
        above = -(-config.world_size // replica) * replica
        nearest = f"{above - replica} or {above}" if above > replica else f"{above}"
        raise UserError(
            f"world_size={config.world_size} is not a multiple of {name_sizes(sizes)}; the nearest is {nearest}"
        )
    return int(config.world_size)


@dataclass
class ModelFolder:
    """A `DescribedModel` without weights."""

    path: Path
    config: PretrainedConfig
    wrapper: Wrapper | None = None
    form: str = ""
    unconverted: tuple[str, ...] = ()


def describe_model(config: RunConfig, group: str = "model") -> ModelFolder:
    """Return the model to plan: that of `model_name_or_path` where it exists, else what `conf/model/` states; with a
    row for each token that the run adds, where the tokenizer is there. group: the one that the run has chosen it in.

    Raises UserError when there is neither.
    """
    path, folder = Path(config.model_name_or_path).expanduser(), find_model_folder(config)
    if path.exists():
        architecture, wrapper = load_config(folder, config.trust_remote_code)
        fields = load_json(folder / "config.json")
    elif config.model:
        folder, fields = Path("conf/model"), config.model
        architecture, wrapper = parse_config(config.model, folder), None
    else:
        if group != "model":
            raise UserError(
                f"it is not there, and {group} states no architecture to plan; choose one of conf/model, such as "
                f"+model@{group}=llama_70b"
            )
        where = "" if config.model_name_or_path == NOT_GIVEN else f"model_name_or_path={path} is not there, and "
        raise UserError(
            f"{where}model=from_checkpoint states no architecture to plan; "
            "choose one of conf/model, such as model=llama_7b"
        )
    if has_tokenizer(config, str(folder)):
        architecture.vocab_size = count_added_rows(config, architecture, str(folder)) or architecture.vocab_size
    stored = parse_quantization(fields, folder)
    return ModelFolder(folder, architecture, wrapper, stored.form, stored.unconverted)


@dataclass(frozen=True)
class PlannedAuxiliary:
    """A frozen model that the run of a plan reads besides its own. resolved: at no layout yet."""

    model: AuxiliaryModel
    resolved: ResolvedModel


def build_plan(
    config: RunConfig, model: ResolvedModel, machine: Machine, auxiliary: PlannedAuxiliary | None = None
) -> Plan:
    """Return the plan of exactly this config on complete `machine`.

    config: that of the model, or one that differs as `resolve_layout` allows. auxiliary: by `resolve_auxiliary`.
    """
    return _plan_placed(resolve_layout(model, config, _build_target(config, machine)), machine, auxiliary)


def _plan_placed(run: ResolvedRun, machine: Machine, auxiliary: PlannedAuxiliary | None) -> Plan:
    in_memory = None
    if auxiliary is not None and auxiliary.model.is_resident(run.config):
        in_memory = place_auxiliary(run.config, auxiliary, run.layout)
    if run.config.hardware.peak_flops is not None:
        return plan_resolved(run, machine, auxiliary=in_memory)
    costs, measured = profile_layers(run, machine)  # this machine
    return plan_resolved(run, measured, costs, in_memory)


def resolve_auxiliary(config: RunConfig, model: ResolvedModel) -> PlannedAuxiliary | None:
    """Return the frozen model that a run reads besides its own; None without one. model: its own. Raises UserError."""
    if (auxiliary := find_auxiliary(config)) is None:
        return None
    config_of_pass = auxiliary.derive(config, 1, 1)
    with auxiliary.naming(config):
        described = describe_model(config_of_pass, auxiliary.architecture_key)
        resolved = resolve_model(config_of_pass, described, _build_target(config))
    auxiliary.check_sizes(config, model.architecture.vocab_size, resolved.architecture.vocab_size)
    return PlannedAuxiliary(auxiliary, resolved)


def place_auxiliary(config: RunConfig, auxiliary: PlannedAuxiliary, layout: Layout) -> ResolvedRun:
    """Return the frozen model at its layout. config, layout: the run's. Raises UserError."""
    config_of_pass = auxiliary.model.derive(config, layout.micro_batch_size, layout.gradient_accumulation_steps)
    with auxiliary.model.naming(config):
        return resolve_layout(auxiliary.resolved, config_of_pass, _build_target(config))


def find_passthrough_bytes(config: RunConfig) -> int:
    """Return the bytes that the run copies unchanged, where the weights are there: a plan needs none."""
    if not Path(config.model_name_or_path).expanduser().exists():
        return 0
    try:
        source = open_weights(config.model_name_or_path, config.trust_remote_code, config.trust_checkpoint)
        source = edit_weights(source, choose_further(source, config.mtp.loss_coef > 0))
        return measure_passthrough(source, config)
    except UserError:
        return 0
