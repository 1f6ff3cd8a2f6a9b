"""From a list of layers to DeepSpeed's pipeline module: split, built without initialisation, loaded layer by layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from console import progress
from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.base_inits import join_starts
from models.adapters.freeze import choose_trained
from models.experts.router import RouterOptions
from models.layers.decoder import Embedding, PipelineDecoderLayer
from models.layers.documents import DocumentBounds
from models.layers.fused_kernels import fuse_kernels
from models.layers.layer import Layer
from models.layers.neftune import EmbeddingNoise
from models.losses.cross_entropy import Loss
from models.parallel.shard import NO_CP, NO_EP, NO_TP, ContextParallel, ExpertParallel, TensorParallel, sum_over_ranks
from models.sharding.context_parallel import share_sequence
from models.sharding.expert_parallel import divide_experts, find_own_experts, list_expert_specs
from models.sharding.shards import LayerShards, read_shards
from models.sharding.tensor_parallel import list_partial_gradients, shard_module
from models.weights.source import WeightSource
from training.distributed.ranks import raise_together
from training.distributed.topology import CONTEXT, PIPE, TENSOR, Topology, join_group
from training.pipeline.activation_checkpoint import KEEP_ALL, ActivationCheckpointing, may_draw
from training.pipeline.compilation import compile_layers
from training.pipeline.placement import Placement
from training.pipeline.routers import StageRouters
from training.pipeline.schedule import Schedule
from training.pipeline.weight_gradients import DeferredGradients, split_projections
from training.pipeline.weight_sharding import WeightSharding, shard_weights, whole_weights


def build_layer_specs(layers: Sequence[Layer]) -> list[LayerSpec]:
    """Return DeepSpeed's description of the layers; those that share weights become `TiedLayerSpec`s."""
    return [
        TiedLayerSpec(layer.tied_key, layer.module_class, *layer.args, forward_fn=layer.forward_fn)
        if layer.tied_key
        else LayerSpec(layer.module_class, *layer.args)
        for layer in layers
    ]


def build_deepspeed_topology(topology: Topology) -> PipeModelDataParallelTopology:
    """Return the same ranks on the three axes that DeepSpeed knows; its `data` axis is all of those along which ranks
    have the same weights.
    """
    assert topology.axes[0].name == PIPE and topology.axes[-1].name == TENSOR, "all else is one axis to DeepSpeed"
    return PipeModelDataParallelTopology(
        num_pp=topology.size(PIPE), num_mp=topology.size(TENSOR), num_dp=topology.size(*topology.weight_replica_axes)
    )


def join_tensor_parallel(topology: Topology, rank: int, splits_sequence: bool = False) -> TensorParallel:
    """Return this rank's place among those that share its layers, with their process group. All ranks call it."""
    size = topology.size(TENSOR)
    if size == 1:
        return NO_TP
    return TensorParallel(topology.index(rank, TENSOR), size, join_group(topology, TENSOR), splits_sequence)


def join_context_parallel(topology: Topology, rank: int, parts: ContextParallel) -> ContextParallel:
    """Return this rank's place among those that share its sequences, with their process group. All ranks call it.
    parts: as `models.sharding.context_parallel.choose_parts` has chosen."""
    if parts.size == 1:
        return NO_CP
    return replace(parts, rank=topology.index(rank, CONTEXT), group=join_group(topology, CONTEXT))


def join_expert_parallel(topology: Topology, rank: int) -> ExpertParallel:
    """Return this rank's place among those that divide experts, with their process group. All ranks call it."""
    size = topology.num_expert_shares
    if size == 1:
        return NO_EP
    group = dist.new_subgroups_by_enumeration(topology.split_replicas(size)[0])[0]
    return ExpertParallel(topology.expert_share(rank), size, group)


@dataclass(frozen=True, kw_only=True)
class StageRanks:
    """A rank's place in the model.

    topology: of all ranks. schedule: says which chunks are this rank's, and whether gradients of weights are put off.
    parallel: the ranks that share its layers. sequence_part: those that share its sequences. expert_parallel: those
    that divide its experts.
    """

    topology: Topology
    schedule: Schedule
    parallel: TensorParallel = NO_TP
    sequence_part: ContextParallel = NO_CP
    expert_parallel: ExpertParallel = NO_EP


@dataclass(frozen=True)
class LayerWriter:
    """The rank that writes a layer's file: the replica with this index, and its index among the ranks that share the
    layer."""

    replica: int
    tensor_rank: int


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How layers compute: all that changes, at least by rounding, what the same weights make of the same inputs, except
    the layout. What a model has computed is stored under a name that covers every field (`compute_model_id`).

    dtype: of weights and activations. attention: the implementation that the layers' config names.
    flash_attention_3: in place of torch's own. compiles: the decoder layers, each by itself. fuses: parts of layers
    (`models.layers.fused_kernels`).
    """

    dtype: torch.dtype
    attention: str
    flash_attention_3: bool = False
    compiles: bool = False
    fuses: bool = False


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a stage computes, and which of its parameters are trained.

    adapter: put on the layers; then nothing else is trained. freeze: patterns of Hugging Face names that are not
    trained. routers: None for a dense model. neftune_noise_alpha: see `models.layers.neftune`; 0: no noise.
    weight_sharding: over the replicas, each layer as soon as it is loaded.
    """

    kernels: Kernels
    checkpointing: ActivationCheckpointing = KEEP_ALL
    adapter: Adapter | None = None
    freeze: Sequence[str] = ()
    routers: RouterOptions | None = None
    neftune_noise_alpha: float = 0.0
    weight_sharding: WeightSharding | None = None


class StageModule(PipelineModule):
    """This rank's stage of the model.

    DeepSpeed's class builds each layer in fp32 with random weights and casts it later. Here a layer is built on the
    meta device and takes over the tensors that are read for it, in the training dtype and on this rank's device:
    nothing is initialised that will be loaded, and no rank touches a layer that is not its own.

    A stage may hold several chunks of layers; `forward` runs the one that `set_active_chunk` has chosen.
    """

    active_chunk: int  # the chunk that `forward` runs
    forward_funcs: list[Any]

    def __init__(
        self,
        layers: Sequence[Layer],
        bounds: Sequence[int],
        source: WeightSource,
        loss: Loss,
        ranks: StageRanks,
        options: StageOptions,
    ) -> None:
        """Build this rank's layers and load their weights. Needs an initialised process group.

        layers: of the whole model, as `models.sharding.tensor_parallel.shard_layers` describes them. bounds: of its
        chunks (`training.pipeline.partition`). loss: of the last stage. Raises UserError when a tensor is missing or
        has another shape than config.json makes it.
        """
        self._layers, self._source, self._ranks, self._options = list(layers), source, ranks, options
        self.rank_topology, self.parallel, self.sequence_part = ranks.topology, ranks.parallel, ranks.sequence_part
        self.expert_parallel = ranks.expert_parallel
        self.adapter, self._schedule = options.adapter, ranks.schedule
        self.deferred = DeferredGradients()
        alpha = options.neftune_noise_alpha
        self._noise = EmbeddingNoise(alpha, ranks.sequence_part) if alpha else None
        self._by_group = KEEP_ALL if options.checkpointing.in_layers else options.checkpointing
        super().__init__(
            layers=build_layer_specs(layers),
            topology=build_deepspeed_topology(ranks.topology),
            loss_fn=loss,
            partition_method=list(bounds),
            activation_checkpoint_interval=self._by_group.group_size,
        )
        self.activation_checkpoint_func = self._by_group.build_function(self._may_draw())

    def _precompute_checkpointable_values(self) -> None:
        """Set for each group of layers of `forward` whether it is recomputed."""
        self.is_checkpointable_results = [
            group.is_recomputed for group in self._by_group.list_groups(len(self.forward_funcs))
        ]

    def _partition_layers(self, method: list[int]) -> None:
        """Use the bounds as they are (DeepSpeed has no manual split, and its own counts parameters by building every
        layer).
        """
        self.parts = method
        self.chunk_numbers = self._schedule.list_chunks(self.stage_id)
        self.chunks = [range(method[chunk], method[chunk + 1]) for chunk in self.chunk_numbers]

    def list_modules(self, chunk: int) -> list[torch.nn.Module]:
        """Return the modules of the layers of a chunk, given by its number in the model."""
        return [self._module_of(index) for index in self.chunks[self.chunk_numbers.index(chunk)]]

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds a layer."""
        return self._schedule.find_stage(bisect_right(self.parts, layer_idx) - 1)

    def set_active_chunk(self, chunk: int) -> None:
        """Make `forward` run this chunk of the stage, counted from 0; also for the recomputation of its backward
        pass."""
        if chunk == self.active_chunk:
            return
        self.active_chunk = chunk
        self._set_bounds(self.chunks[chunk].start, self.chunks[chunk].stop)
        self.forward_funcs = [self._functions[index] for index in self.chunks[chunk]]
        self._precompute_checkpointable_values()

    def _build(self) -> None:
        self._functions: dict[int, Any] = {}
        self.active_chunk = -1
        for chunk in self.chunks:
            self._set_bounds(chunk.start, chunk.stop)
            self.forward_funcs = []
            with torch.device("meta"):
                super()._build()
            self._functions |= zip(chunk, self.forward_funcs, strict=True)
        self.set_active_chunk(0)
        mistake = None
        try:
            self._load_layers()
        except UserError as error:  # in a file that no other rank may have opened
            mistake = error
        raise_together(mistake)
        self.routers = self._watch_routers()
        if self._noise is not None and 0 in self._functions:
            embedding = self._module_of(0)
            assert isinstance(embedding, Embedding), type(embedding)
            self._noise.attach(embedding)
        self.fused: set[str] = set()  # names of kernels
        if self._options.kernels.fuses:
            self.fused = set().union(*(fuse_kernels(module) for _, _, module in self.local_layers()))
        self.deferred_share = self._split_projections() if self._schedule.splits_backward else None
        if self._options.kernels.compiles:
            self._compile_layers()
        self.placeholders = torch.nn.ParameterList()
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False  # set by DeepSpeed's _build on the meta parameters that are gone now

    def _watch_routers(self) -> StageRouters | None:
        """None for a dense model."""
        if self._options.routers is None:
            return None
        return StageRouters(
            self._options.routers,
            [module for _, _, module in self.local_layers() if isinstance(module, PipelineDecoderLayer)],
            topology=self.rank_topology,
            parallel=self.parallel,
            device=torch.device(get_accelerator().device_name(self.local_rank)),
        )

    def _load_layers(self) -> None:
        with progress("loading weights", len(self._functions), "layers", shown=self.global_rank == 0) as bar:
            for index, _, module in bar.follow(self.local_layers()):
                self._load(module, index)
                if self._options.weight_sharding is not None:
                    shard_weights(module, self._options.kernels.dtype, self._options.weight_sharding)

    def _compile_layers(self) -> None:
        """Compile each decoder layer. One piece of code serves all layers of a kind, and lengths that change from step
        to step make it general once.
        """
        layers = [module for _, _, module in self.local_layers() if isinstance(module, PipelineDecoderLayer)]
        checkpointing = self._options.checkpointing
        recompute = (
            checkpointing.build_function(self._may_draw()) if checkpointing.in_layers else None
        )  # one object, or each has its own code
        for layer in layers:
            layer.recompute = recompute
        compile_layers(layers, self.global_rank)

    def _may_draw(self) -> bool:
        return may_draw(module for _, _, module in self.local_layers())

    def seed_noise(self, seed: int) -> None:
        """Seed the noise on embeddings for the next step; the same on all ranks."""
        if self._noise is not None:
            self._noise.start_step(seed)

    def _split_projections(self) -> float:
        """Return the share of all stages' trained matrices whose gradients can be deferred: with adapters there is
        little to gain. All ranks call it."""
        counts = [split_projections(module, self.deferred) for _, _, module in self.local_layers()]
        device = get_accelerator().device_name(self.local_rank)
        totals = torch.tensor(counts, dtype=torch.float64, device=device).sum(dim=0)
        dist.all_reduce(totals)
        can, matrices = totals.tolist()
        return can / max(1, matrices)

    def expect_documents(self, bounds: DocumentBounds | None) -> None:
        """Set what is known of the documents of the next micro-batches; None where nothing is."""
        for module in self._functions.values():
            if isinstance(module, PipelineDecoderLayer):
                module.context.bounds = bounds

    def add_placeholder(self) -> torch.nn.Parameter:
        """Return a trained zero in no layer, so in no file, for a parameter group of the optimizer that would be empty
        on this stage.

        DeepSpeed drops an empty group, and ZeRO sums the gradient's norm group by group over the stages, so a stage
        with fewer groups than another leaves that waiting forever (seen with deepspeed 0.19.8: a last stage of the head
        alone, or one where all is frozen).
        """
        device = get_accelerator().device_name(self.local_rank)
        placeholder = torch.nn.Parameter(torch.zeros((1,), dtype=self._options.kernels.dtype, device=device))
        placeholder.model_parallel, placeholder.ds_pipe_replicated = True, False  # type: ignore[attr-defined]
        self.placeholders.append(placeholder)
        return placeholder

    def _module_of(self, index: int) -> torch.nn.Module:
        layer = self._layers[index]
        return self.tied_modules[layer.tied_key] if layer.tied_key else self._functions[index]

    def _owner_of(self, index: int) -> int:
        """The layer whose file holds the weights that layer `index` uses."""
        key = self._layers[index].tied_key
        if key is None:
            return index
        return next(i for i, layer in enumerate(self._layers) if layer.tied_key == key and layer.owns_weights)

    def _load(self, module: torch.nn.Module, index: int) -> None:
        device = get_accelerator().device_name(self.local_rank)
        shard_module(module, self._layers[index].styles, self.parallel)
        divide_experts(module, self.expert_parallel)
        tensors = self._read(self._source, index, module)
        kept = self._layers[index].buffer_names()
        copies = {
            name: tensor.to(
                device=device, dtype=tensor.dtype if name in kept else self._options.kernels.dtype, copy=True
            )
            for name, tensor in tensors.items()
        }
        module.load_state_dict(copies, strict=True, assign=True)
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(device))  # what follows from the config is in no file
        if stray := [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]:
            raise UserError(f"layer {index} ({type(module).__name__}): '{stray[0]}' is in no file and cannot be loaded")
        if self.sequence_part.size > 1:
            share_sequence(module, self.sequence_part)
        places = self.parallel, self.expert_parallel
        choose_trained(module, index, self._layers[index], self.adapter, self._options.freeze, *places)
        self._mark_parameters(index, module)

    def _mark_parameters(self, index: int, module: torch.nn.Module) -> None:
        """Mark for DeepSpeed's norm which ranks count for a parameter, and sum gradients of which each rank has a
        share. Called once the weights are loaded.
        """
        for _, parameter, placement in self._place_parameters(index, module):
            # For `is_model_parallel_parameter` of deepspeed/runtime/utils.py
            parameter.model_parallel = TENSOR in placement.norm_axes  # type: ignore[attr-defined]
            # For `is_moe_param` of deepspeed/moe/utils.py
            parameter.allreduce = not placement.divided  # type: ignore[attr-defined]
            if TENSOR in placement.gradient_axes and parameter.requires_grad:
                parameter.register_hook(lambda gradient: sum_over_ranks(gradient, self.parallel))

    def _place_parameters(
        self, index: int, module: torch.nn.Module
    ) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """Yield name, parameter and placement of layer `index`, which owns its weights."""
        shards, partial = self._read_shards(module), list_partial_gradients(module)
        stages = self._list_stages(index)
        for name, parameter in module.named_parameters():
            placement = Placement(
                self.rank_topology,
                stages,
                sharded=(TENSOR,) if name in shards.tensor_specs else (),
                shard=shards.locate(name, parameter.shape),
                partial=(TENSOR,) if name in partial else (),
                divided=name in shards.expert_specs,
            )
            yield name, parameter, placement

    def _list_stages(self, index: int) -> tuple[int, ...]:
        """The stages that hold the weights of layer `index`, its own first."""
        holders = [self.stage_owner(i) for i in range(len(self._layers)) if self._owner_of(i) == index]
        return tuple(dict.fromkeys([self.stage_owner(index), *holders]))

    def _read(self, source: WeightSource, index: int, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the layer's tensors: views of mapped files, so only what is copied is read."""
        shards, layer = self._read_shards(module), self._layers[index]
        layer = replace(layer, experts=find_own_experts(module, self.expert_parallel))
        return {name: shards.take(name, tensor) for name, tensor in source.read_layer(index, layer).items()}

    def _read_shards(self, module: torch.nn.Module) -> LayerShards:
        return read_shards(module, self.parallel, self.expert_parallel)

    def copy_weights(self, source: WeightSource) -> None:
        """Load the weights of another source of the same model in place; the optimizer's master weights stay. All ranks
        call it.

        Raises UserError when a tensor is missing or has another shape. Not for a module with an adapter.
        """
        mistake = None
        try:
            for index, _, module in self.local_layers():
                tensors = self._read(source, index, module)
                with whole_weights(module, changes=True):
                    for name, held in module.state_dict().items():
                        held.copy_(tensors[name])
        except UserError as error:
            mistake = error
        raise_together(mistake)

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of the active chunk. Where all of the first stage is frozen nothing asks for gradients, but
        the engine runs its backward pass.
        """
        outputs = super().forward(forward_input)
        if self.training and torch.is_grad_enabled() and not outputs[0].requires_grad:
            return (outputs[0].requires_grad_(), *outputs[1:])
        return outputs

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """Runs outside of autograd: the broadcast of a trained weight would be recorded, and the first backward pass
        would warn of it (0.19.8).
        """
        super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, Any]]:
        """Return the tied weights whose gradients the stages must sum: frozen ones have none."""
        return [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]

    def saved_tensors(self, layer_module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer that a checkpoint keeps: all of them, or the adapter's alone."""
        state = layer_module.state_dict()
        trained = [name for name, parameter in layer_module.named_parameters() if parameter.requires_grad]
        names = state.keys() if self.adapter is None else trained
        tensors = {name: state[name].detach() for name in names}
        return tensors if self.adapter is None else join_starts(layer_module, tensors)

    def takes_part(self, layer_module: torch.nn.Module, writer: LayerWriter) -> bool:
        """Return whether this rank has a share of a layer that another rank writes: of its weights, or its experts."""
        replica = self._find_replica()
        size = self.expert_parallel.size if list_expert_specs(layer_module) else 1
        return self.shards_weights or replica // size == writer.replica // size

    def holds_whole(self, layer_module: torch.nn.Module) -> bool:
        """Return whether this rank has all of a layer's weights, on its device."""
        is_shared = self.parallel.size > 1 or bool(list_expert_specs(layer_module))
        return not (is_shared or self.shards_weights)

    def gather_tensors(self, layer_module: torch.nn.Module, writer: LayerWriter) -> dict[str, torch.Tensor] | None:
        """Return `saved_tensors`, whole and in the host's memory, on the rank that writes them; None on the others that
        take part, which call it too: those that share the layer, its weights or its experts.
        """
        shards, gathered = self._read_shards(layer_module), {}
        keeps = self._find_replica() == writer.replica and self.parallel.rank == writer.tensor_rank
        with whole_weights(layer_module):
            for name, tensor in self.saved_tensors(layer_module).items():
                found: torch.Tensor | None = shards.gather(name, tensor)
                if found is not None and name in shards.expert_specs:
                    owner = writer.replica % self.expert_parallel.size
                    found = (
                        shards.gather_experts(name, found, owner) if self.parallel.rank == writer.tensor_rank else None
                    )
                if keeps:
                    assert found is not None
                    gathered[name] = found.to("cpu", copy=True)
        return gathered if keeps else None

    def _find_replica(self) -> int:
        return self.rank_topology.index(self.global_rank, *self.rank_topology.weight_replica_axes)

    def local_layers(self) -> Iterator[tuple[int, Layer, torch.nn.Module]]:
        """Yield the layers of this stage: number, description, module. A shared module comes once, as the layer that
        owns its weights.
        """
        seen: set[int] = set()
        for index in self._functions:
            module, owner = self._module_of(index), self._owner_of(index)
            if id(module) not in seen:
                yield owner, self._layers[owner], module
                seen.add(id(module))

    def owns(self, index: int) -> bool:
        """Returns whether the layer is on this stage; False for one of another stage whose weights this stage
        shares."""
        return index in self._functions

    def named_hf_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """Yield Hugging Face name, parameter and placement of the parameters of `local_layers`."""
        for index, layer, module in self.local_layers():
            for name, parameter, placement in self._place_parameters(index, module):
                yield layer.hf_prefix + name, parameter, placement

    @property
    def num_further(self) -> int:
        """The number of further tokens that the model predicts."""
        return self._layers[-1].num_blocks - 1

    @property
    def shards_weights(self) -> bool:
        return self._options.weight_sharding is not None

    @property
    def has_first_layer(self) -> bool:
        return self.chunks[0].start == 0

    @property
    def has_loss(self) -> bool:
        return self.chunks[-1].stop == len(self._layers)

    @property
    def reports_loss(self) -> bool:
        """The ranks that share the last stage's layers have the same loss; the first of them reports it."""
        return self.has_loss and self.parallel.rank == 0
