"""What can be known of a run before a process group exists: its checks, and the facts that they find on the way."""

from __future__ import annotations

import dataclasses
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from errors import UserError
from models.adapters import Adapter
from models.architecture import build_layers, check_length, choose_attention
from models.layer import Layer
from models.parallel.tensor_parallel import shard_layers
from models.weights.random_weights import RandomWeights
from models.weights.source import WeightSource
from models.weights.sources import open_weights, parse_config
from training.checkpoint.resume import Resumable, find_resume
from training.checkpoint.run_folder import RunFolder
from training.config.incompatible import Run, check_together
from training.config.schema import AdapterName, AttnImplementation, Init, RunConfig, Task, get_task
from training.config.validate import check_config, check_deepspeed_version, check_model_fields
from training.distributed.process import describe_device, has_accelerator
from training.distributed.ranks import Ranks
from training.distributed.topology import Layout, build_layout
from training.inputs.custom import build_collator
from training.objectives.user_loss import build_run_loss
from training.pipeline.partition import compute_bounds
from training.pipeline.trainable import build_adapter, check_freeze, check_same_adapter, read_trained_adapter
from training.planner.prediction import find_fits

_PACKAGES = {
    AttnImplementation.flash_attention_2: "flash_attn",
    AttnImplementation.flash_attention_3: "flash_attn_interface",
}


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """What the checks have found out on the way."""

    source: WeightSource
    layers: list[Layer]
    layout: Layout
    bounds: list[int]
    adapter: Adapter | None
    resume_from: Path | None
    resumable: Resumable | None  # what resume_from is chosen from
    reference: WeightSource | None = None  # of preference optimization: what the run has started from, or will


def check_run(config: RunConfig, ranks: Ranks) -> RunSetup:
    """Everything that can be known to be wrong before a process group exists; the same on all ranks.

    Raises UserError.
    """
    check_deepspeed_version()
    check_config(config, has_accelerator())
    check_attention(config.attn_implementation)
    if config.compile:
        check_compiler(has_accelerator())
    folder = RunFolder(config.output_dir)
    folder.check_usable(config.resume is not None or config.evaluate_only, config.overwrite_output_dir)
    resumable = find_resume(config.resume, folder.checkpoints, config.trust_checkpoint) if config.resume else None
    resume_from = resumable.candidates[0] if resumable else None
    source = open_source(config, resume_from)
    if config.overwrite_output_dir:
        folder.check_keeps(source.path)
    check_model_fields(config.model, source.config, str(source.path))
    source.config._attn_implementation = choose_attention(source.config, config.attn_implementation.value)
    check_length(source.config, config.max_seq_length)
    layers = shard_layers(source.config, build_layers(source.config), config.tensor_parallel_size)
    source.check_complete(layers)
    check_freeze(config, layers)
    adapter = None if config.evaluate_only else build_adapter(config, layers)
    if not config.evaluate_only:
        check_same_adapter(config, adapter, resume_from)
    build_run_loss(config, source.config)
    build_collator(config.data)
    layout = build_layout(config, ranks.world_size, len(layers), has_accelerator())
    check_together(Run(config, has_accelerator(), layout.micro_batch_size))
    fits = (
        None if config.evaluate_only else find_fits(config, source.config, layout, describe_device(), ranks.local_size)
    )
    bounds = compute_bounds(layers, layout.num_stages, config.partition_method, fits, layout.num_chunks)
    reference = open_reference(config, source, layers, resume_from) if get_task(config) is Task.dpo else None
    return RunSetup(source, layers, layout, bounds, adapter, resume_from, resumable, reference)


def open_source(config: RunConfig, resume_from: Path | None) -> WeightSource:
    """Where this run's weights come from. Raises UserError for what is none."""
    if config.init is Init.random and resume_from is None:
        return RandomWeights(parse_config(config.model, Path("conf/model")), config.seed)
    return open_weights(_source_path(config, resume_from), config.trust_remote_code)


def open_reference(
    config: RunConfig, source: WeightSource, layers: list[Layer], resume_from: Path | None
) -> WeightSource:
    """The model at `model_name_or_path`, which a run that goes on from a checkpoint needs beside it. Raises UserError when it is gone."""
    if _source_path(config, resume_from) == weights_path(config):
        return source
    reference = open_weights(weights_path(config), config.trust_remote_code)
    reference.check_complete(layers)
    return reference


def load_resumed(plan: RunSetup, step_dir: Path, config: RunConfig) -> RunSetup:
    """The plan with the weights of the checkpoint `step_dir`: the model's, or the adapter's beside the model it started from."""
    if plan.adapter is not None:
        adapter = dataclasses.replace(plan.adapter, tensors=read_trained_adapter(step_dir, plan.layers))
        return dataclasses.replace(plan, resume_from=step_dir, adapter=adapter)
    return dataclasses.replace(plan, resume_from=step_dir, source=open_weights(str(step_dir), config.trust_remote_code))


def _source_path(config: RunConfig, resume_from: Path | None) -> str:
    """Where this run's weights lie. The checkpoint of a LoRA run holds the adapter alone: training goes on beside the model that it
    started from, an evaluation has it merged in."""
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
            f"compile=true needs a C++ compiler, and {compiler} is not there; install it, name another in CXX, or set compile=false"
        )


def check_attention(implementation: AttnImplementation) -> None:
    """Raises UserError for a kernel whose package is missing."""
    package = _PACKAGES.get(implementation)
    if package is not None and find_spec(package) is None:
        raise UserError(
            f"attn_implementation={implementation.value} needs the package {package}; install it, or use sdpa"
        )
