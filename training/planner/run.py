"""`plan=true` and `plan=search`: from a composed config to a printed plan, in one process, without weights or an
engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from console import fit, measure_width
from data.options import LengthPolicy
from data.sources.records import resolve_sources
from data.sources.selection import Selection
from data.storage.disk import RowEstimate, estimate_rows
from errors import UserError
from masking import mask_text
from models.architecture.lookup import warn_of_length
from models.experts.sizes import count_experts
from models.layers.wrapped import Wrapper
from models.weights.config_file import load_config, parse_config
from models.weights.edits import edit_weights
from models.weights.further import choose_further
from models.weights.sources import open_weights
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.timeline import find_last_step
from training.config.incompatible import CheckedConfig
from training.config.schema import AUTO, NOT_GIVEN, RunConfig, to_typed
from training.config.sources import list_evaluations
from training.config.teacher import derive_teacher
from training.costs.hardware import Machine, complete_hardware
from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error
from training.distributed.topology import PIPE, Layout, name_sizes, read_sizes
from training.inputs.datasets import (
    build_encoding,
    build_row_plan,
    build_selection,
    complete_labels,
    count_added_rows,
    has_tokenizer,
    list_entries,
    load_extended,
)
from training.inputs.skipped_data import count_trained
from training.inputs.step_budget import count_total_steps
from training.optim.lr_schedule import warn_of_warmup
from training.planner.disk import measure_passthrough
from training.planner.plan import Plan, plan_resolved
from training.planner.profile_machine import profile_layers
from training.planner.remedies import find_remedies, list_other_updates
from training.planner.report import render_plan
from training.planner.search import search_plans
from training.planner.search_report import render_other_updates, render_search, render_sizes
from training.planner.search_space import Candidate, SharedModels
from training.planner.teacher import plan_teacher, render_online, render_teacher
from training.planner.timeline import predicted_timeline
from training.resolution.architecture import check_teacher_size
from training.resolution.readers import check_read
from training.resolution.resolve import ResolvedModel, ResolvedRun, check_keys, resolve_layout, resolve_model
from training.resolution.target import Target

SHARED_AS = 3  # layouts of a search, whose ways to share are tried with other updates


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
    """Yield the texts of a plan or a search, each as soon as it is known. width: of the tables in characters; None: no
    limit. Raises UserError."""
    if config.plan == "search" and isinstance(config.world_size, list):
        yield from _search_sizes(config, width)
        return
    model = resolve_planned(config)
    machine = complete_hardware(config.hardware, config.precision, check_world_size(config))
    if (wrapper := model.wrapper) is not None:
        yield f"text only: the plan of the '{model.architecture.model_type}' in {wrapper.name}; the rest is on no GPU"
    if warning := warn_of_length(model.architecture, config.max_seq_length):
        yield f"warning: {warning}"
    if config.plan == "search":
        yield from _search(config, model, machine, width)
        return
    if config.activation_checkpoint_interval == AUTO:
        run = resolve_layout(model, config, Target(check_world_size(config), True, machine, is_planned=True))
        config = run.config
        yield str(run.recomputation)
    teacher = resolve_teacher(config, model)
    again = partial(build_plan, model=model, machine=machine, teacher=teacher)
    plan = again(config)
    plan = replace(plan, checkpoint=replace(plan.checkpoint, passthrough=find_passthrough_bytes(config)))
    steps, note = estimate_steps(config, plan.layout.global_batch_size, model.architecture)
    if steps is not None and (text := warn_of_warmup(steps, config)):
        yield f"warning: {text}"
    earlier = {}
    if model.objective.scored and (rows := estimate_scored(config, plan.layout.global_batch_size, model.architecture)):
        earlier["for the reference's scores"] = plan.time_forward(rows)
    if teacher is not None:
        lines, seconds = describe_teacher(config, teacher, plan, machine, model.architecture)
        earlier |= {} if seconds is None else {"for the teacher's pass": seconds}
        yield "\n".join(lines)
    remedies = [] if plan.fits else find_remedies(plan, config, again)
    trained = None if steps is None else count_trained_steps(config, steps)
    yield render_plan(plan, config, machine, trained, note=note, earlier=earlier, width=width, remedies=remedies)
    yield f"picture of the schedule: {save_picture(plan, config)}"


def _search(config: RunConfig, model: ResolvedModel, machine: Machine, width: int | None) -> Iterator[str]:
    """Yield the search over one number of GPUs as text, then what other updates would make of it."""
    models = SharedModels(config, model)
    found = search_plans(config, models, machine)
    nearest = found[0]
    if not nearest.plan.fits:
        again = partial(build_plan, model=models.get(nearest.sharing), machine=machine)
        remedies = find_remedies(nearest.plan, replace(nearest.keys, plan=True), again)
        yield render_search(found, machine, width, remedies=remedies)  # an error
    steps = count_steps(config, nearest.plan.layout.global_batch_size, model.architecture)
    yield render_search(found, machine, width, total_steps=steps)
    others = _try_other_updates(config, models, machine, found)
    if others:
        yield render_other_updates(others, nearest, machine, width, total_steps=steps)


def _try_other_updates(
    config: RunConfig, models: SharedModels, machine: Machine, found: Sequence[Candidate]
) -> dict[str, Candidate]:
    """Return the fastest layout with each change of the update, by its overrides; shared as the best few are."""
    among = list(dict.fromkeys(candidate.sharing for candidate in found[:SHARED_AS] if candidate.plan.fits))
    best = {}
    for overrides, changed in list_other_updates(config):
        with suppress(UserError):
            own = models
            check_keys(replace(changed, plan=True), has_accelerator=True)
            if changed.adapter != config.adapter:
                own = SharedModels(changed, resolve_planned(changed))
            nearest, *_ = search_plans(changed, own, machine, most=1, among=among)
            if nearest.plan.fits:
                best[overrides] = nearest
    return best


def _search_sizes(config: RunConfig, width: int | None) -> Iterator[str]:
    """Yield the search over several numbers of GPUs as text."""
    if config.global_batch_size is None:
        raise UserError(
            f"world_size={config.world_size} compares runs of one global batch, and none is given; "
            "give global_batch_size=N"
        )
    sizes = [replace(config, world_size=size) for size in dict.fromkeys(config.world_size)]
    for each in sizes:
        check_world_size(each)
    machines = [complete_hardware(each.hardware, each.precision, each.world_size) for each in sizes]
    model = resolve_planned(sizes[0])
    shared = SharedModels(sizes[0], model)
    found = {
        each.world_size: search_plans(each, shared, machine) for each, machine in zip(sizes, machines, strict=True)
    }
    steps = count_steps(config, config.global_batch_size, model.architecture)
    yield render_sizes(found, machines[0], width, total_steps=steps)


def resolve_planned(config: RunConfig) -> ResolvedModel:
    """Return the resolved model of a plan. Raises UserError for all that the run would refuse, but for what depends on
    its machine and files."""
    check_keys(config, has_accelerator=True)
    return resolve_model(config, describe_model(config), Target(check_world_size(config), True, is_planned=True))


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
    """Return the number of ranks to plan for. Raises UserError when it is not given, is a list, or is not a multiple of
    the stages."""
    if config.world_size is None:
        raise UserError(f"plan={str(config.plan).lower()} needs world_size=N, the number of GPUs to plan for")
    if isinstance(config.world_size, list):
        raise UserError(f"world_size={config.world_size}: a list is for plan=search; give one number")
    sizes = {axis: size for axis, size in read_sizes(config).items() if axis != PIPE or config.plan is True}
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


def describe_model(config: RunConfig, group: str = "model") -> ModelFolder:
    """Return the model to plan: that of `model_name_or_path` where it exists, else what `conf/model/` states; with a
    row for each token that the run adds, where the tokenizer is there. group: the one that the run has chosen it in.

    Raises UserError when there is neither.
    """
    path, folder = Path(config.model_name_or_path).expanduser(), _find_folder(config)
    if path.exists():
        architecture, wrapper = load_config(folder, config.trust_remote_code)
    elif config.model:
        folder = Path("conf/model")
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
    return ModelFolder(folder, architecture, wrapper)


def _find_folder(config: RunConfig) -> Path:
    """The folder that has the config and the tokenizer of the model, if it is there."""
    path = Path(config.model_name_or_path).expanduser()
    return path.parent if path.name.startswith("global_step") else path


def build_plan(config: RunConfig, model: ResolvedModel, machine: Machine, teacher: ResolvedModel | None = None) -> Plan:
    """Return the plan of exactly this config on complete `machine`.

    config: that of the model, or one that differs as `resolve_layout` allows. teacher: its own; None without one.
    """
    run = resolve_layout(model, config, Target(check_world_size(config), True, machine, is_planned=True))
    in_memory = place_teacher(config, teacher, run.layout) if teacher is not None and config.distill.online else None
    if config.hardware.peak_flops is not None:
        return plan_resolved(run, machine, teacher=in_memory)
    costs, measured = profile_layers(run, machine)  # this machine
    return plan_resolved(run, measured, costs, in_memory)


def resolve_teacher(config: RunConfig, model: ResolvedModel) -> ResolvedModel | None:
    """Return the resolved model of `distill.teacher`; None without one. model: the student's. Raises UserError."""
    if config.distill.teacher is None:
        return None
    target = Target(check_world_size(config), True, is_planned=True)
    config_of_pass = derive_teacher(config, 1, 1)
    with naming_teacher(config):
        teacher = resolve_model(config_of_pass, describe_model(config_of_pass, "distill.model"), target)
    check_teacher_size(config.distill, model.architecture.vocab_size, teacher.architecture.vocab_size)
    return teacher


def place_teacher(config: RunConfig, teacher: ResolvedModel, layout: Layout) -> ResolvedRun:
    """Return the teacher at its layout. layout: the student's. Raises UserError."""
    config_of_pass = derive_teacher(config, layout.micro_batch_size, layout.gradient_accumulation_steps)
    with naming_teacher(config):
        return resolve_layout(teacher, config_of_pass, Target(check_world_size(config), True, is_planned=True))


@contextmanager
def naming_teacher(config: RunConfig) -> Iterator[None]:
    """Begin a UserError with the teacher's key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"distill.teacher={config.distill.teacher}: {error}") from None


def describe_teacher(
    config: RunConfig, teacher: ResolvedModel, plan: Plan, machine: Machine, architecture: PretrainedConfig
) -> tuple[list[str], float | None]:
    """Return the lines of the report on the teacher's passes, and the seconds of the one before training; None without
    one, and where the data are not known. plan, architecture: the student's. Raises UserError."""
    placed = place_teacher(config, teacher, plan.layout)
    if config.distill.online:
        return [render_online(placed, machine)], None
    assert config.distill.top_k is not None
    rows = estimate_scored(config, plan.layout.global_batch_size, architecture)
    taught = plan_teacher(placed, config.distill.top_k, machine, rows)
    return render_teacher(taught), taught.seconds


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


def count_steps(config: RunConfig, global_batch_size: int, architecture: PretrainedConfig) -> int | None:
    """Return the optimizer steps that the whole run trains; None where they are not known."""
    steps, _ = estimate_steps(config, global_batch_size, architecture)
    return None if steps is None else count_trained_steps(config, steps)


def count_trained_steps(config: RunConfig, total_steps: int) -> int:
    """Return the steps that a run from its beginning trains. total_steps: of its learning rate schedule."""
    last_step = find_last_step(RunFolder(config.output_dir), config, 0, total_steps)
    return count_trained(0, last_step, config.skip_data_intervals)


def estimate_steps(config: RunConfig, global_batch_size: int, architecture: PretrainedConfig) -> tuple[int | None, str]:
    """Return the steps of the learning rate schedule: max_steps, or those of as many epochs of its rows; None where
    neither is known. With it a note where it is an estimate, or where the rows are too few; else an empty one."""
    if config.max_steps is not None:
        return config.max_steps, ""
    rows = estimate_num_rows(config, architecture)
    if rows is None:
        return None, ""
    try:
        steps = count_total_steps(config, rows.num_rows, global_batch_size)
    except UserError as error:
        return None, str(error)
    return steps, "" if rows.is_exact else "steps: estimated from records of train_file"


def estimate_scored(config: RunConfig, global_batch_size: int, architecture: PretrainedConfig) -> int | None:
    """Return the rows that a model scores once before training: those of `train_file`, as many as `max_steps` takes
    where they are not known, and those of evaluation files that are known; None where none are."""
    counted = (
        estimate_num_rows(config, architecture, key) for key in ("train_file", *list_evaluations(config).values())
    )
    trained, *evaluated = (None if rows is None else rows.num_rows for rows in counted)
    if trained is None and config.max_steps is not None:
        trained = config.max_steps * global_batch_size
    return None if trained is None else trained + sum(filter(None, evaluated))


def estimate_num_rows(config: RunConfig, architecture: PretrainedConfig, key: str = "train_file") -> RowEstimate | None:
    """Return the rows of the files of a key in the unit of `micro_batch_size`: their records where each is one, else as
    the first ones are tokenized and packed. None where they depend on tokens and there is no tokenizer."""
    selection, plan, folder = build_selection(config.data, key), build_row_plan(config, key), str(_find_folder(config))
    rows = None
    with suppress(UserError):  # of the data: the run reports it
        sources = [resolve_sources(entry, key) for entry in list_entries(config, key)]
        if plan.is_trivial and config.data.length_policy is LengthPolicy.truncate and selection.filter is None:
            rows = _estimate_records(sources, selection)
            if selection.hold_out is None and (rows is not None or selection.max_records is None):
                return rows
        if has_tokenizer(config, folder):
            labelled = complete_labels(config, architecture)
            encoding = build_encoding(labelled, key, load_extended(labelled, folder))
            return estimate_rows(sources, encoding, plan, config.data.cache_dir)
    return rows


def _estimate_records(sources: Sequence[Sequence[str]], selection: Selection) -> RowEstimate | None:
    """Return the records that are taken of files of JSON lines; None for any other files. sources: the files of each
    entry."""
    if any(Path(source).suffix != ".jsonl" for entry in sources for source in entry):
        return None
    counts = (sum(map(_count_lines, entry)) for entry in sources)
    taken = sum(min(count, selection.max_records or count) for count in counts)
    return RowEstimate(round(selection.estimate_taken(taken)), selection.hold_out is None)


def _count_lines(source: str) -> int:
    with open(source, "rb") as lines:
        return sum(1 for line in lines if line.strip())
