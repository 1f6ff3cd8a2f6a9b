"""What can be known of a run before a process group exists: its checks, and the facts that they find on the way.

`check_run` is for a run; `build_setup` for who has a source of weights already, such as a benchmark.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.loading.row_lengths import measure_rows
from data.order import GlobalOrder
from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.build import build_adapter, check_added_tokens, check_peft_names
from models.adapters.freeze import check_freeze
from models.adapters.options import AdapterName
from models.architecture.lookup import apply_rope_overrides, build_layers, check_length, choose_experts
from models.experts.router import RouterOptions
from models.layers.layer import Layer
from models.layers.score_head import is_reward_model
from models.parallel.shard import NO_CP, ContextParallel
from models.sharding.tensor_parallel import shard_layers
from models.weights.config_file import parse_config
from models.weights.random_weights import RandomWeights
from models.weights.resized_vocab import ResizedVocabWeights
from models.weights.reward import as_reward_model
from models.weights.source import WeightSource, get_whole_config
from models.weights.sources import open_weights
from models.weights.trained_adapter import check_same_adapter, read_trained_adapter
from models.weights.vocabulary import resize_config
from training.checkpoint.resume import Resumable, choose_resume, choose_whole, find_resume
from training.checkpoint.run_folder import RunFolder
from training.config.incompatible import Run, check_together
from training.config.precision import DTYPES
from training.config.schema import AttnImplementation, Device, Init, RunConfig
from training.config.validate import check_config, check_deepspeed_version, check_model_fields
from training.costs.cost import LayerCost
from training.costs.hardware import Machine
from training.distributed.process import broadcast_from_main, describe_device, has_accelerator
from training.distributed.ranks import Ranks
from training.distributed.topology import Layout, build_layout
from training.engine.deepspeed_internals import check_internals
from training.inputs.custom import build_callbacks, build_collator
from training.inputs.datasets import build_chat_template, build_row_plan, count_added_rows, list_new_tokens
from training.objectives.registry import check_objective, get_objective
from training.objectives.user_loss import build_run_loss
from training.optim.optimizer import check_optimizer
from training.optim.parameter_groups import check_parameter_groups
from training.pipeline.attention import choose_run_attention
from training.pipeline.packing import check_run_packing
from training.pipeline.partition import compute_bounds
from training.pipeline.pass_times import time_passes
from training.pipeline.routers import build_router_options
from training.pipeline.schedules import build_schedule, find_schedule, schedule_layout
from training.pipeline.sequence_parts import check_run_sequences, find_length_multiple
from training.planner.layer_times import LayerTimes
from training.planner.prediction import (
    Prediction,
    count_run_costs,
    find_fits,
    find_machine,
    predict,
    time_layers,
)

_PACKAGES = {
    AttnImplementation.flash_attention_2: "flash_attn",
    AttnImplementation.flash_attention_3: "flash_attn_interface",
}


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """What the checks have found out on the way.

    costs: of the layers, for the plan; None on a rank that makes none. resumable: what `resume_from` is chosen from.
    reference: of an objective that needs one: what the run has started from, or will. parts: of sequences, of no rank
    in particular. routers: None for a dense model. callbacks: the user's, each with its name.
    """

    source: WeightSource
    layers: list[Layer]
    layout: Layout
    bounds: list[int]
    adapter: Adapter | None
    costs: Sequence[LayerCost] | None = None
    resume_from: Path | None = None
    resumable: Resumable | None = None
    reference: WeightSource | None = None
    parts: ContextParallel = NO_CP
    routers: RouterOptions | None = None
    callbacks: Sequence[tuple[str, Any]] = ()


def check_run(config: RunConfig, ranks: Ranks) -> RunSetup:
    """Everything that can be known to be wrong before a process group exists; the same on all ranks.

    Raises UserError.
    """
    check_deepspeed_version()
    check_internals(with_adapter=config.adapter.name is AdapterName.lora)
    check_config(config, has_accelerator())
    find_schedule(config.schedule)
    check_objective(config)
    check_attention(config.attn_implementation)
    if config.compile:
        check_compiler(has_accelerator())
    folder = RunFolder(config.output_dir)
    resume = choose_resume(config.resume, folder.checkpoints)
    folder.check_usable(resume is not None or config.evaluate_only, config.overwrite_output_dir)
    resumable = find_resume(resume, folder.checkpoints, config.trust_checkpoint) if resume else None
    resume_from = resumable.candidates[0] if resumable else None
    source = open_source(config, resume_from)
    if config.overwrite_output_dir:
        folder.check_keeps(source.path)
    check_stated_fields(config, source)
    setup = build_setup(config, source, ranks, plans=not config.evaluate_only)
    if not config.evaluate_only:
        check_same_adapter(setup.adapter, resume_from)
    build_collator(config.data)
    if not config.evaluate_only:
        check_optimizer(config)
    reference = open_reference(config, source, setup.layers, resume_from)
    callbacks = build_callbacks(config)
    return dataclasses.replace(
        setup, resume_from=resume_from, resumable=resumable, reference=reference, callbacks=callbacks
    )


def check_stated_fields(config: RunConfig, source: WeightSource) -> None:
    """Raises UserError where `conf/model` says something else than the weights; they may have rows more, for tokens
    that the run adds, and other positions where it gives them."""
    adds = (
        bool(build_chat_template(config.data)) and config.model.get("vocab_size", math.inf) < source.config.vocab_size
    )
    replaced = {"vocab_size"} if adds else set()
    replaced |= {"rope_parameters", "max_position_embeddings"} if config.rope_parameters.list_given() else set()
    stated = {key: value for key, value in config.model.items() if key not in replaced}
    check_model_fields(stated, source.config, str(source.path))


def build_setup(config: RunConfig, source: WeightSource, ranks: Ranks, plans: bool = False) -> RunSetup:
    """The setup of a run that starts from `source`. Chooses the attention kernel in the source's config.

    plans: the costs of the layers are wanted. Raises UserError.
    """
    source = fit_head(config, source)
    source.config._attn_implementation = choose_run_attention(config, source.config)
    check_length(source.config, config.max_seq_length)
    layers = build_layers(source.config, source.wrapper)
    layers = shard_layers(source.config, layers, config.tensor_parallel_size)
    parts = check_run_sequences(config, source.config, layers)
    check_run_packing(config, source.config)
    source.config._experts_implementation = choose_experts(
        source.config, config.tensor_parallel_size, DTYPES[config.precision]
    )
    source.check_complete(layers)
    check_freeze(config.freeze, layers)
    adapter = None
    if not config.evaluate_only:
        seed, base_name, is_part = config.seed, config.model_name_or_path, source.wrapper is not None
        adapter = build_adapter(config.adapter, layers, seed=seed, base_name=base_name, is_part=is_part)
    if adapter is not None:
        check_added_tokens(config.adapter, list_new_tokens(config, str(source.path)), layers)
        if adapter.config.modules_to_save and get_objective(config).needs_reference:
            raise UserError(
                f"adapter.modules_to_save does not go together with data={config.data.name}: the reference is the model"
                " without the adapter, and what is saved as it is cannot be taken off; omit it, or use adapter=none"
            )
    if not config.evaluate_only:
        check_parameter_groups(config, layers, adapter)
    routers = build_router_options(config, source.config, layers)
    check_peft_names(adapter, get_whole_config(source))
    build_run_loss(config, source.config)
    layout = build_layout(config, ranks.world_size, len(layers), has_accelerator())
    check_together(Run(config, has_accelerator()))
    layout = schedule_layout(layout, config, len(layers))
    costs = fits = None
    if plans and (ranks.is_main or has_accelerator()):  # on a CPU only the main rank has a use for them
        costs = count_run_costs(config, source.config, layout)
        fits = find_fits(
            config,
            costs,
            vocab_size=source.config.vocab_size,
            layout=layout,
            device_name=describe_device(),
            local_size=ranks.local_size,
        )
    bounds = compute_bounds(
        layers, layout.num_stages, config.partition_method, fits=fits, schedule=build_schedule(layout)
    )
    layout = time_passes(layout, config, layers, bounds, get_objective(config).remakes_logits)
    reference = source if get_objective(config).needs_reference else None
    return RunSetup(source, layers, layout, bounds, adapter, costs, reference=reference, parts=parts, routers=routers)


def open_source(config: RunConfig, resume_from: Path | None) -> WeightSource:
    """Where this run's weights come from, with a row for each token that it adds. Raises UserError for what is none."""
    if config.init is Init.random and resume_from is None:
        rows = count_added_rows(config, parse_config(config.model, Path("conf/model")), "")
        fields = config.model | ({"vocab_size": rows} if rows else {})
        drawn = parse_config(fields, Path("conf/model"))
        apply_rope_overrides(drawn, config.rope_parameters.list_given())
        return RandomWeights(drawn, config.seed)
    return _open_grown(config, _source_path(config, resume_from))


def _open_grown(config: RunConfig, path: str) -> WeightSource:
    source = open_weights(path, config.trust_remote_code)
    rows = count_added_rows(config, source.config, str(source.path))
    if config.rope_parameters.list_given() and source.wrapper is not None:
        raise UserError(
            f"rope_parameters: {source.path} has its text model in '{source.wrapper.name}', where positions of images "
            "count too; omit it"
        )
    apply_rope_overrides(source.config, config.rope_parameters.list_given())
    return ResizedVocabWeights(source, resize_config(source, rows)) if rows else source


def fit_head(config: RunConfig, source: WeightSource) -> WeightSource:
    """`source` with the head that the task trains. Raises UserError for a reward model that is to do something else,
    and for an evaluation of rewards without one."""
    task = get_objective(config).name
    if not get_objective(config).scores_rows:
        if is_reward_model(source.config):
            raise UserError(
                f"{source.path} is a reward model ({source.config.architectures[0]}), which has no LM head; "
                f"give task=reward, or another model for task={task}"
            )
        return source
    if config.evaluate_only and not is_reward_model(source.config):
        raise UserError(
            f"evaluate_only=true with task={task}: {source.path} is not a reward model, its head would be a new one; "
            "give a reward model in model_name_or_path, or resume"
        )
    return as_reward_model(source, config.seed)


def open_reference(
    config: RunConfig, source: WeightSource, layers: list[Layer], resume_from: Path | None
) -> WeightSource | None:
    """The model at `model_name_or_path`, for an objective that needs it beside what a run trains; None for another.

    Raises UserError when it is gone.
    """
    if not get_objective(config).needs_reference:
        return None
    if _source_path(config, resume_from) == weights_path(config):
        return source
    reference = _open_grown(config, weights_path(config))
    reference.check_complete(layers)
    return reference


def load_resumed(setup: RunSetup, config: RunConfig, say: Callable[[str], None]) -> RunSetup:
    """The setup with the weights of the checkpoint that the run resumes from, the best whole one: the model's, or the
    adapter's beside the model it started from; as it is for a run that starts anew. All ranks call it, in a process
    group.

    say: reports what is wrong with better checkpoints. Raises UserError when none is whole.
    """
    if setup.resumable is None:
        return setup
    step_dir = choose_whole(setup.resumable, say)
    if setup.adapter is not None:
        adapter = dataclasses.replace(setup.adapter, tensors=read_trained_adapter(step_dir, setup.layers))
        return dataclasses.replace(setup, resume_from=step_dir, adapter=adapter)
    source = _open_grown(config, str(step_dir))
    source.config._attn_implementation = setup.source.config._attn_implementation
    return dataclasses.replace(setup, resume_from=step_dir, source=source)


def find_run_machine(config: RunConfig, ranks: Ranks) -> Machine | None:
    """What is known of this machine, measured where that has to be; None when no file describes it."""
    return find_machine(config.hardware, describe_device(), config, ranks.local_size)


def predict_run(
    config: RunConfig,
    setup: RunSetup,
    machine: Machine | None,
    *,
    train_path: Path,
    num_samples: int,
    steps: range,
    ranks: Ranks,
) -> Prediction | None:
    """What to expect of the run, on the main rank. All ranks call it, since a CPU's layers are timed.

    machine: on the main rank; None when it is unknown, which is reported. train_path: the tokenized folder of
    `train_file`. steps: those of the run.
    """
    layout, architecture = setup.layout, setup.source.config
    order, plan = GlobalOrder(num_samples, layout.global_batch_size, config.seed), build_row_plan(config, "train_file")
    multiple = find_length_multiple(config, setup.parts)
    lengths = broadcast_from_main(
        lambda: measure_rows(train_path, plan, order, steps, config.data.pad_to, multiple), ranks
    )
    times: list[LayerTimes] = []
    if (
        not has_accelerator() and layout.tensor_parallel_size == layout.context_parallel_size == 1
    ):  # shards are not built by themselves
        times = time_layers(config, architecture, setup.costs, layout, lengths, ranks)
    if not ranks.is_main:
        return None
    if machine is None:
        ranks.say(f"no file of conf/hardware describes {describe_device()!r}; MFU is left out")
    assert setup.costs is not None
    device = Device.cuda if has_accelerator() else Device.cpu
    return predict(
        config, architecture, setup.costs, bounds=setup.bounds, layout=layout, machine=machine, device=device,
        lengths=lengths, times=times,
    )  # fmt: skip


def _source_path(config: RunConfig, resume_from: Path | None) -> str:
    """Where this run's weights lie. The checkpoint of a LoRA run holds the adapter alone: training continues beside
    the model that it started from, an evaluation has it merged in."""
    adds_adapter = config.adapter.name is AdapterName.lora and not config.evaluate_only
    return weights_path(config) if resume_from is None or adds_adapter else str(resume_from)


def weights_path(config: RunConfig) -> str:
    path = config.model_name_or_path
    if path.startswith("outputs/demo/") and not Path(path).exists():
        raise UserError(
            f"model_name_or_path={path} is not there yet: run `make demo` once, it makes the demo's model and data"
        )
    return path


def check_compiler(has_accelerator: bool) -> None:
    """Raises UserError where `torch.compile` cannot make code."""
    compiler = os.environ.get("CXX", "g++")  # as torch._inductor looks for it
    if has_accelerator and find_spec("triton") is None:
        raise UserError("compile=true needs the package triton on a GPU; install it, or set compile=false")
    if not has_accelerator and shutil.which(compiler) is None:
        raise UserError(
            f"compile=true needs a C++ compiler, and {compiler} is not there; install it, name another in CXX, or set "
            "compile=false"
        )


def check_attention(implementation: AttnImplementation) -> None:
    """Raises UserError for a kernel whose package is missing."""
    package = _PACKAGES.get(implementation)
    if package is not None and find_spec(package) is None:
        raise UserError(
            f"attn_implementation={implementation.value} needs the package {package}; install it, or use sdpa"
        )
