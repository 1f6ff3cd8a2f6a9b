"""From a list of layers to DeepSpeed's pipeline module: this rank's stage, and what running it needs.

What is done to its layers before is in `preparation.py`, what its ranks are to each other in `stage_ranks.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from batch import Inputs
from models.layers.decoder import PipelineDecoderLayer
from models.layers.documents import DocumentBounds
from models.layers.layer import Layer
from models.losses.cross_entropy import Loss
from models.weights.source import WeightSource
from training.distributed.topology import PIPE, TENSOR, Topology
from training.pipeline.activation_checkpoint import may_draw
from training.pipeline.placement import Placement, StageLayer, place_parameters
from training.pipeline.preparation import StageOptions, prepare_layers
from training.pipeline.stage_ranks import StageRanks


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


class StageModule(PipelineModule):  # type: ignore[misc]
    """This rank's stage of the model.

    A stage may hold several chunks of layers; `forward` runs the one that `set_active_chunk` has chosen.
    """

    active_chunk: int  # the chunk that `forward` runs
    forward_funcs: list[Any]
    front: Callable[[Inputs], tuple[torch.Tensor, ...]] = attrgetter("activations")  # the first layer's argument
    local_layers: list[StageLayer]  # of this stage; a shared module is in it once, as the layer that owns its weights
    in_fp32: list[torch.nn.Parameter]  # the parameters of this stage that stay in fp32, where others have 16 bits

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
        self._layers, self._source, self.ranks, self.options = list(layers), source, ranks, options
        super().__init__(
            layers=build_layer_specs(layers),
            topology=build_deepspeed_topology(ranks.topology),
            loss_fn=loss,
            partition_method=list(bounds),
            activation_checkpoint_interval=options.checkpointing.group_size,
        )
        draws = may_draw(layer.module for layer in self.local_layers)
        # One object for all layers, or each would have compiled code of its own
        self.activation_checkpoint_func = options.checkpointing.build_function(draws)
        for chunk in self.chunks:
            self._recompute_in_layers([self._functions[index] for index in chunk])

    def _partition_layers(self, method: list[int]) -> None:
        """Use the bounds as they are (DeepSpeed has no manual split, and its own counts parameters by building every
        layer).
        """
        self.parts = method
        self.chunk_numbers = self.ranks.schedule.list_chunks(self.stage_id)
        self.chunks = [range(method[chunk], method[chunk + 1]) for chunk in self.chunk_numbers]

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
        self.local_layers = list(self._find_local_layers())
        prepared = prepare_layers(self.local_layers, self._source, self.ranks, self.options, self._find_device())
        self.routers, self.noise, self.deferred = prepared.routers, prepared.noise, prepared.deferred
        self.deferred_share, self.fused, self.in_fp32 = prepared.deferred_share, prepared.fused, prepared.fp32
        self.placeholders = torch.nn.ParameterList()
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False  # set by DeepSpeed's _build on the meta parameters that are gone now

    def _find_local_layers(self) -> Iterator[StageLayer]:
        seen: set[int] = set()
        for index in self._functions:
            module, owner = self._module_of(index), self._owner_of(index)
            if id(module) not in seen:
                is_own = owner in self._functions
                yield StageLayer(owner, self._layers[owner], module, self._list_stages(owner), is_own)
                seen.add(id(module))

    def _module_of(self, index: int) -> torch.nn.Module:
        layer = self._layers[index]
        return self.tied_modules[layer.tied_key] if layer.tied_key else self._functions[index]

    def _owner_of(self, index: int) -> int:
        """The layer whose file holds the weights that layer `index` uses."""
        key = self._layers[index].tied_key
        if key is None:
            return index
        return next(i for i, layer in enumerate(self._layers) if layer.tied_key == key and layer.owns_weights)

    def _list_stages(self, index: int) -> tuple[int, ...]:
        """The stages that hold the weights of layer `index`, its own first."""
        holders = [self.stage_owner(i) for i in range(len(self._layers)) if self._owner_of(i) == index]
        return tuple(dict.fromkeys([self.stage_owner(index), *holders]))

    def _find_device(self) -> torch.device:
        return torch.device(get_accelerator().device_name(self.local_rank))

    def list_modules(self, chunk: int) -> list[torch.nn.Module]:
        """Return the modules of the layers of a chunk, given by its number in the model."""
        return [self._module_of(index) for index in self.chunks[self.chunk_numbers.index(chunk)]]

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds a layer."""
        return self.ranks.schedule.find_stage(bisect_right(self.parts, layer_idx) - 1)

    def set_active_chunk(self, chunk: int) -> None:
        """Make `forward` run this chunk of the stage, counted from 0; also for the recomputation of its backward
        pass."""
        if chunk == self.active_chunk:
            return
        self.active_chunk = chunk
        self._set_bounds(self.chunks[chunk].start, self.chunks[chunk].stop)
        self.forward_funcs = [self._functions[index] for index in self.chunks[chunk]]
        self._precompute_checkpointable_values()

    def _precompute_checkpointable_values(self) -> None:
        """Set for each group of layers of `forward` whether the engine recomputes it."""
        self.is_checkpointable_results = [
            group.is_recomputed and not self._checkpoints_itself(self.forward_funcs[group.start])
            for group in self.options.checkpointing.list_groups(len(self.forward_funcs))
        ]

    def _recompute_in_layers(self, functions: Sequence[Any]) -> None:
        """Have the layers of a chunk that are recomputed in their compiled code do so."""
        for group in self.options.checkpointing.list_groups(len(functions)):
            if group.is_recomputed and self._checkpoints_itself(functions[group.start]):
                functions[group.start].recompute = self.activation_checkpoint_func

    def _checkpoints_itself(self, layer: Any) -> bool:
        return self.options.checkpointing.in_layers and isinstance(layer, PipelineDecoderLayer)

    def expect_documents(self, bounds: DocumentBounds | None) -> None:
        """Set what is known of the documents of the next micro-batches; None where nothing is."""
        for module in self._functions.values():
            if isinstance(module, PipelineDecoderLayer):
                module.context.bounds = bounds

    def seed_noise(self, seed: int) -> None:
        """Seed the noise on embeddings for the next step; the same on all ranks."""
        if self.noise is not None:
            self.noise.start_step(seed)

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

    def add_placeholder(self) -> torch.nn.Parameter:
        """Return a trained zero in no layer, so in no file, for a parameter group of the optimizer that would be empty
        on this stage.

        DeepSpeed drops an empty group, and ZeRO sums the gradient's norm group by group over the stages, so a stage
        with fewer groups than another leaves that waiting forever (seen with deepspeed 0.19.8: a last stage of the head
        alone, or one where all is frozen).
        """
        zero = torch.zeros((1,), dtype=self.options.kernels.dtype, device=self._find_device())
        placeholder = torch.nn.Parameter(zero)
        placeholder.model_parallel, placeholder.ds_pipe_replicated = True, False  # type: ignore[attr-defined]
        self.placeholders.append(placeholder)
        return placeholder

    def named_hf_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """Yield Hugging Face name, parameter and placement of the parameters of `local_layers`."""
        for layer in self.local_layers:
            for name, parameter, placement in place_parameters(layer, self.ranks):
                yield layer.spec.hf_prefix + name, parameter, placement

    @property
    def trains_fp32(self) -> bool:
        """Whether a stage of 16 bits, this one or another, trains parameters that stay in fp32."""
        keeps = self.options.keeps_fp32 and self.options.adapter is None
        return keeps and any(layer.list_fp32(self.options.kernels.dtype) for layer in self._layers)

    @property
    def num_further(self) -> int:
        """The number of further tokens that the model predicts."""
        return self._layers[-1].num_blocks - 1

    @property
    def has_first_layer(self) -> bool:
        return self.chunks[0].start == 0

    @property
    def has_loss(self) -> bool:
        return self.chunks[-1].stop == len(self._layers)

    @property
    def reports_loss(self) -> bool:
        """The ranks that share the last stage's layers have the same loss; the first of them reports it."""
        return self.has_loss and self.ranks.parallel.rank == 0
