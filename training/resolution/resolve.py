"""The one resolution: from a checked config and a model to all that follows from them, before a weight is read.

    resolve_model     what is the same at any number of ranks: architecture, layers, adapter, objective
    resolve_layout    where the layers go: stages, replicas, the split, the times that a schedule is ordered by
    resolve           both

Runs, evaluations, plans, the candidates of a search, benchmarks and tests start here, so a plan refuses what its run
would, in the same words. What depends on files, packages or this machine is `training/setup.py`'s to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.build import build_adapter, check_added_tokens, check_peft_names
from models.adapters.freeze import check_freeze
from models.adapters.targets import is_saved
from models.architecture.lookup import build_layers
from models.experts.router import RouterOptions
from models.further.table import count_tail
from models.heads.table import find_head
from models.layers.fused_kernels import find_obstacle
from models.layers.layer import Layer
from models.layers.wrapped import Wrapper
from models.parallel.shard import ContextParallel
from models.sharding.expert_parallel import check_expert_parallel
from models.sharding.tensor_parallel import shard_layers
from models.weights.source import DescribedModel, get_whole_config
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import AUTO, CheckpointMode, Device, FusedKernels, OptimizerName, RunConfig
from training.config.validate import check_config
from training.cost_terms import table
from training.cost_terms.activations import time_remade
from training.cost_terms.cost_term import PlannedRun, list_stages
from training.cost_terms.split import build_find_stop, set_times, time_layers
from training.costs.cost import LayerCost
from training.costs.hardware import ANY_CPU, Machine, complete_hardware
from training.distributed.topology import Layout, build_layout
from training.inputs.custom import build_callbacks, build_collator
from training.inputs.datasets import build_encoder, has_tokenizer, list_new_tokens
from training.objectives.objective import LastStage, Objective
from training.objectives.registry import check_objective, get_objective
from training.optim.optimizer import check_optimizer
from training.optim.parameter_groups import check_group_keys, check_parameter_groups
from training.pipeline.activation_checkpoint import ActivationCheckpointing, build_activation_checkpointing
from training.pipeline.partition import ALIKE, split_layers, weigh_layers
from training.pipeline.routers import build_router_options
from training.pipeline.schedules import build_schedule, find_schedule, schedule_layout
from training.resolution.architecture import complete_architecture
from training.resolution.counts import LayerCounts
from training.resolution.packages import BITSANDBYTES, has_package
from training.resolution.recomputation import CHOICES, MARGIN, Choice, choose_recomputation
from training.resolution.sequences import check_run_sequences
from training.resolution.target import Target
from training.resolution.user_loss import build_run_loss


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Everything that follows from config and model at any number of ranks.

    architecture: complete; nothing changes it. wrapper: the model around a text model. layers: as tensor parallelism
    shards them. parts: of sequences, of no rank in particular. adapter, routers: None without. callbacks: the user's,
    each with its name. counts: of the layers, shared by all that is derived from this.
    """

    config: RunConfig
    objective: Objective
    architecture: PretrainedConfig
    wrapper: Wrapper | None
    layers: list[Layer]
    parts: ContextParallel
    adapter: Adapter | None
    routers: RouterOptions | None
    callbacks: Sequence[tuple[str, Any]]
    counts: LayerCounts

    def share(self, config: RunConfig) -> ResolvedModel:
        """Return the model of a plan with its layers, sequences and experts over as many ranks as `config` says, all
        other keys alike. Raises UserError where they cannot be shared so."""
        check_together(CheckedConfig(config))
        check_expert_parallel(self.architecture, self.layers, config.expert_parallel_size)
        layers = self.layers
        if config.tensor_parallel_size != self.config.tensor_parallel_size:
            whole = [replace(layer, styles={}) for layer in layers]
            layers = shard_layers(self.architecture, whole, config.tensor_parallel_size)
        parts = check_run_sequences(config, self.architecture, layers)
        counts = LayerCounts(config, self.architecture, self.adapter, parts, lambda: layers, self.counts.fuses)
        return replace(self, config=config, layers=layers, parts=parts, counts=counts)

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        return build_activation_checkpointing(self.config)

    @property
    def num_units(self) -> int:
        """The number of parts that a split can separate: layers, but for those that have to stay with the head, or with
        the layer before them."""
        return len(self.layers) - count_tail(self.layers) + 1 - len(self.joined)

    @property
    def joined(self) -> list[int]:
        """The layers that one chunk has together with the layer before them."""
        return [index for index, layer in enumerate(self.layers) if layer.is_joined]


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(ResolvedModel):
    """A resolved model at a layout. layout: complete. bounds: of its chunks, P x V + 1 indices of layers.
    recomputation: what `activation_checkpoint_interval=auto` has become in `config`, and why; None for a number."""

    layout: Layout
    bounds: list[int]
    recomputation: str | None = None

    @cached_property
    def costs(self) -> Sequence[LayerCost]:
        """The cost of each layer for one micro-batch of full rows, counted when it is first asked for."""
        return self.counts.count_costs(self.layout, self.config.max_seq_length)


def check_keys(config: RunConfig, has_accelerator: bool) -> None:
    """Raises UserError for keys that are wrong whatever the model is. Cheap: no file of weights is touched."""
    check_config(config, has_accelerator)
    find_schedule(config.schedule)
    check_objective(config)
    build_collator(config.data, config.num_workers)
    build_encoder(config.data)
    check_group_keys(config)
    needs_bitsandbytes = config.optimizer.name is OptimizerName.adamw_8bit
    if not config.evaluate_only and (has_package(BITSANDBYTES) or not needs_bitsandbytes):
        check_optimizer(config)


def resolve(config: RunConfig, model: DescribedModel, target: Target) -> ResolvedRun:
    """Return all that follows from `config`, which `check_keys` has passed. Raises UserError."""
    return resolve_layout(resolve_model(config, model, target), config, target)


def resolve_model(config: RunConfig, model: DescribedModel, target: Target) -> ResolvedModel:
    """Return what is the same at any number of ranks. Raises UserError for what config and model cannot do together."""
    check_together(CheckedConfig(config, target.has_accelerator))
    objective, architecture = get_objective(config), complete_architecture(config, model, target)
    layers = _build_sharded(config, architecture, model)
    parts = check_run_sequences(config, architecture, layers)
    check_expert_parallel(architecture, layers, config.expert_parallel_size)
    check_freeze(config.freeze, layers)
    adapter = _resolve_adapter(config, model, layers, target)
    if not config.evaluate_only:
        check_parameter_groups(config, layers, adapter)
    routers = build_router_options(config.moe, architecture, layers)

    def rebuild() -> list[Layer]:  # the layers of a plan are never loaded
        return layers if target.is_planned else _build_sharded(config, architecture, model)

    build_run_loss(config, LastStage(architecture))
    return ResolvedModel(
        config=config,
        objective=objective,
        architecture=architecture,
        wrapper=model.wrapper,
        layers=layers,
        parts=parts,
        adapter=adapter,
        routers=routers,
        callbacks=build_callbacks(config.callbacks),
        counts=LayerCounts(config, architecture, adapter, parts, rebuild, _fuses(config, target)),
    )


def resolve_layout(model: ResolvedModel, config: RunConfig, target: Target) -> ResolvedRun:
    """Return `model` at the layout that the keys ask for.

    config: that of the model, or one that differs in keys of the layout, of recomputation or of where state is kept; in
    a plan in `max_seq_length` too.
    Raises UserError for keys that contradict each other, the ranks, or the model's layers.
    """
    num_layers = model.num_units
    layout = build_layout(config, target.world_size, num_layers, target.has_accelerator)
    layout = schedule_layout(layout, config, num_layers)
    if config.activation_checkpoint_interval != AUTO:
        return place_layers(model, config, layout, target)

    def apply(choice: Choice) -> RunConfig:
        mode, interval = choice
        return replace(config, activation_checkpoint_mode=mode, activation_checkpoint_interval=interval)

    def describe(chosen: RunConfig) -> PlannedRun:
        assert target.machine is not None
        return PlannedRun(chosen, layout, model.architecture.vocab_size, target.machine)

    def place(choice: Choice) -> ResolvedRun:
        """Return the run, on stages that leave `MARGIN` free; where that would make them wait for each other, and for
        the last choice, as they are fastest."""
        smaller = target.machine and replace(target.machine, usable_memory=(1 - MARGIN) * target.machine.usable_memory)
        within = place_layers(model, apply(choice), layout, replace(target, machine=smaller))
        free = place_layers(model, apply(choice), layout, replace(target, fills=target.fills and choice == CHOICES[-1]))
        slowest, least = (max(map(sum, each.layout.pass_times)) for each in (within, free))
        return within if slowest <= ALIKE * least else free

    def measure(choice: Choice) -> float:
        """Return the bytes of the fullest GPU, by the plan."""
        check_together(CheckedConfig(apply(choice), target.has_accelerator))
        run = place(choice)
        ordered = replace(describe(run.config), layout=run.layout)  # by the times of its own split
        return max(table.sum_memory(stage).peak for stage in list_stages(ordered, run.costs, run.bounds))

    def is_host_bound(choice: Choice) -> bool:
        """Return whether launching the operators that `selective` runs again one by one takes longer than launching
        them compiled."""
        chosen, costs = apply(choice), model.counts.count_costs(layout, config.max_seq_length)
        eager, compiled = (
            sum(time_remade(layer, run) for layer in costs)
            for run in (describe(chosen), describe(replace(chosen, compile=True)))
        )
        return chosen.activation_checkpoint_mode is CheckpointMode.selective and eager > compiled

    choice, line = choose_recomputation(target.machine, measure, is_host_bound)
    return replace(place(choice), recomputation=line)


def place_layers(model: ResolvedModel, config: RunConfig, layout: Layout, target: Target) -> ResolvedRun:
    """Return `model` at `layout`, whose schedule is set: its split, and the times of its passes."""
    costs, method = model.counts.count_costs(layout, config.max_seq_length), config.partition_method
    run = PlannedRun(config, layout, model.architecture.vocab_size, _choose_pace(target, config))
    bounds = split_layers(
        time_layers(costs, run) if method == "balanced" else weigh_layers(model.layers, method),
        layout.num_stages,
        method,
        find_stop=build_find_stop(costs, replace(run, hardware=target.machine))
        if target.machine and target.fills
        else None,
        schedule=None if config.evaluate_only and layout.num_chunks == 1 else build_schedule(layout),
        tail=count_tail(model.layers),
        joined=model.joined,
    )
    return ResolvedRun(
        config=config,
        objective=model.objective,
        architecture=model.architecture,
        wrapper=model.wrapper,
        layers=model.layers,
        parts=model.parts,
        adapter=model.adapter,
        routers=model.routers,
        callbacks=model.callbacks,
        counts=model.counts,
        layout=set_times(layout, costs, bounds, run),
        bounds=bounds,
    )


def _choose_pace(target: Target, config: RunConfig) -> Machine:
    """Return the machine whose times split and order a run: any CPU for a CPU, whose rates are measured and differ from
    start to start; `hardware` for a GPU that no file of conf/hardware describes."""
    described = target.machine or (config.hardware if target.has_accelerator else ANY_CPU)
    if described.device is not Device.cuda:
        return ANY_CPU
    return target.machine or complete_hardware(config.hardware, config.precision, target.world_size)


def _fuses(config: RunConfig, target: Target) -> bool:
    """Return whether parts of layers are fused kernels; a plan takes it for granted that a GPU has the package."""
    if config.fused_kernels is FusedKernels.none:
        return False
    if target.is_planned:
        return config.hardware.device is Device.cuda
    return find_obstacle(torch.device("cuda" if target.has_accelerator else "cpu")) is None


def _build_sharded(config: RunConfig, architecture: PretrainedConfig, model: DescribedModel) -> list[Layer]:
    return shard_layers(architecture, build_layers(architecture, model.wrapper), config.tensor_parallel_size)


def _resolve_adapter(config: RunConfig, model: DescribedModel, layers: list[Layer], target: Target) -> Adapter | None:
    head = get_objective(config).head
    adapter = build_adapter(
        config.adapter,
        layers,
        seed=config.seed,
        base_name=config.model_name_or_path,
        is_part=model.wrapper is not None,
        head=head,
        form=model.form,
        unconverted=model.unconverted,
    )
    if adapter is None:
        return None
    is_new = head is not None and head.has_weights and find_head(model.config) is None
    if head is not None and is_new and not is_saved(layers[-1], adapter.config):
        raise UserError(
            f"adapter.name_or_path={config.adapter.name_or_path}: the adapter has no head, and that of a new "
            f"{head.words} is saved with its adapter; omit it, or start from an adapter of such a model"
        )
    path = str(model.path)
    if not target.is_planned or has_tokenizer(config, path):
        check_added_tokens(config.adapter, list_new_tokens(config, path), layers)
    if adapter.config.modules_to_save and get_objective(config).scored:
        raise UserError(
            f"adapter.modules_to_save does not go together with data={config.data.name}: the reference is the model"
            " without the adapter, and modules_to_save cannot be disabled; omit it, or use adapter=none"
        )
    check_peft_names(adapter, get_whole_config(model))
    return adapter
