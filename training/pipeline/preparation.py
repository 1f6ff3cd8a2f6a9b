"""Prepares the layers of a stage before it runs: loads their weights, shards, quantizes and freezes them, attaches the
adapter and what watches routers, and compiles them.

DeepSpeed's class builds each layer in fp32 with random weights and casts it later. Here a layer is built on the meta
device and takes over the tensors that are read for it, in the training dtype and on this rank's device: nothing is
initialised that will be loaded, and no rank touches a layer that is not its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from console import progress
from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.freeze import choose_trained
from models.adapters.quantized import make_placeholder
from models.experts.gate import replace_forward
from models.experts.router import RouterOptions
from models.layers.decoder import Embedding, PipelineDecoderLayer
from models.layers.frozen import FrozenStack
from models.layers.fused_kernels import fuse_kernels
from models.layers.neftune import EmbeddingNoise
from models.sharding.context_parallel import share_sequence
from models.sharding.expert_parallel import divide_experts, find_own_experts
from models.sharding.tensor_parallel import list_partial_gradients, shard_module
from models.weights.published import read_kept
from models.weights.source import WeightSource
from training.distributed.ranks import raise_together
from training.pipeline.activation_checkpoint import KEEP_ALL, ActivationCheckpointing
from training.pipeline.compilation import compile_layers
from training.pipeline.placement import StageLayer, mark_parameters
from training.pipeline.reading import check_reading
from training.pipeline.routers import StageRouters
from training.pipeline.stage_ranks import StageRanks
from training.pipeline.weight_gradients import DeferredGradients, add_rows, split_projections
from training.pipeline.weight_sharding import WeightSharding, shard_weights, whole_weights


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How layers compute: all that changes, at least by rounding, what the same weights make of the same inputs, except
    the layout. What a model has computed is stored under a name that covers every field (`compute_model_id`).

    dtype: of weights and activations. attention: the implementation that the layers' config names.
    flash_attention_3: in place of torch's own. compiles: the decoder layers, each by itself. fuses: parts of layers
    (`models.layers.fused_kernels`). fp32_routers: have logits in fp32 (`models.experts.gate`).
    """

    dtype: torch.dtype
    attention: str
    flash_attention_3: bool = False
    compiles: bool = False
    fuses: bool = False
    fp32_routers: bool = False


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a stage computes, and which of its parameters are trained.

    adapter: put on the layers; then nothing else is trained. freeze: patterns of Hugging Face names that are not
    trained. routers: None for a dense model. neftune_noise_alpha: see `models.layers.neftune`; 0: no noise.
    weight_sharding: over the replicas, each layer as soon as it is loaded. sums_in_fp32: gradients of weights in bf16
    are summed over the micro-batches in fp32, whole.
    """

    kernels: Kernels
    checkpointing: ActivationCheckpointing = KEEP_ALL
    adapter: Adapter | None = None
    freeze: Sequence[str] = ()
    routers: RouterOptions | None = None
    neftune_noise_alpha: float = 0.0
    weight_sharding: WeightSharding | None = None
    sums_in_fp32: bool = False

    @property
    def shards_weights(self) -> bool:
        return self.weight_sharding is not None

    @property
    def compares_choices(self) -> bool:
        """Whether routers may also choose in the other precision, to count the tokens that would go elsewhere: not in
        compiled code, which would run a second time with them in it."""
        return self.kernels.dtype is not torch.float32 and not self.kernels.compiles

    @property
    def keeps_fp32(self) -> bool:
        """Whether some parameters stay in fp32 (`Layer.list_fp32`) in a stage of 16 bits. ZeRO-3 has one dtype for
        all."""
        return self.kernels.dtype is not torch.float32 and not self.shards_weights


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The objects that a stage runs with besides its layers, and facts about these that are reported.

    routers: None for a dense model. noise: on the embeddings; None without it. deferred: the gradients of weights that
    are put off. fp32: parameters that stay in fp32 in a stage of 16 bits. deferred_share: of all stages' trained
    matrices, those whose gradients can be; None where the schedule puts none off. fused: names of kernels.
    """

    routers: StageRouters | None
    noise: EmbeddingNoise | None
    deferred: DeferredGradients
    fp32: list[nn.Parameter]
    deferred_share: float | None
    fused: set[str]


def prepare_layers(
    layers: Sequence[StageLayer], source: WeightSource, ranks: StageRanks, options: StageOptions, device: torch.device
) -> Prepared:
    """Prepare the layers of a stage, which are on the meta device. All ranks call it. device: this rank's.

    Raises UserError, together on all ranks, when a tensor is missing or has another shape than config.json makes it,
    and when a host's memory does not suffice to read them.
    """
    mistake = None
    in_fp32: list[nn.Parameter] = []
    for layer in layers:
        shard_module(layer.module, layer.spec.styles, ranks.parallel)
        divide_experts(layer.module, ranks.expert_parallel)
    check_reading(layers, source, ranks, options.adapter, options.kernels.dtype, device)
    try:
        with progress("loading weights", len(layers), "layers", shown=ranks.rank == 0) as bar:
            for layer in bar.follow(layers):
                in_fp32 += _load(layer, source, ranks, options, device)
                if options.weight_sharding is not None:
                    shard_weights(layer.module, options.kernels.dtype, options.weight_sharding)
    except UserError as error:  # in a file that no other rank may have opened
        mistake = error
    raise_together(mistake)
    decoder_layers = [each.module for each in layers if isinstance(each.module, PipelineDecoderLayer)]
    deferred, share = DeferredGradients(), None
    for module in decoder_layers:
        _replace_router(module, options.kernels, deferred)
    routers = None
    if options.routers is not None:
        routers = StageRouters(
            options.routers,
            decoder_layers,
            ranks,
            device=device,
            compares_choices=options.compares_choices,
        )
    noise = _add_noise(layers, ranks, options.neftune_noise_alpha)
    fused: set[str] = set()
    if options.kernels.fuses:
        fused = fused.union(*(fuse_kernels(each.module) for each in layers))
    if ranks.schedule.splits_backward:
        share = _split_projections(layers, deferred, device)
    elif options.sums_in_fp32 and options.adapter is None and not options.kernels.compiles:
        for layer in layers:  # not an adapter's, which are small; not compiled ones, whose code changes no other tensor
            split_projections(layer.module, deferred, defers=False)
    if options.sums_in_fp32:
        for layer in layers:
            add_rows(layer.module, deferred)
    if options.kernels.compiles:
        compile_layers(decoder_layers, ranks.rank)
    return Prepared(routers=routers, noise=noise, deferred=deferred, fp32=in_fp32, deferred_share=share, fused=fused)


def copy_weights(layers: Sequence[StageLayer], source: WeightSource, ranks: StageRanks) -> None:
    """Load the weights of another source of the same model in place; the optimizer's master weights stay. All ranks
    call it.

    Raises UserError when a tensor is missing or has another shape. Not for layers with an adapter.
    """
    mistake = None
    try:
        for layer in layers:
            tensors = _read(layer, source, ranks)
            with whole_weights(layer.module, changes=True):
                for name, held in layer.module.state_dict().items():
                    held.copy_(tensors[name])
    except UserError as error:
        mistake = error
    raise_together(mistake)


def _load(
    layer: StageLayer, source: WeightSource, ranks: StageRanks, options: StageOptions, device: torch.device
) -> list[nn.Parameter]:
    """Load a layer, and return its parameters that stay in fp32 in a stage of 16 bits."""
    module = layer.module
    quantized = _read_kept(layer, source, ranks, options, device)
    tensors = _read(layer, source, ranks, quantized)
    dtypes = {name: tensors[name].dtype for name in layer.spec.buffer_names()}
    kept = layer.spec.list_fp32(options.kernels.dtype) if options.keeps_fp32 else frozenset()
    dtypes |= dict.fromkeys(kept, torch.float32)
    # What the adapter quantizes, one matrix after the other, is never whole on the device
    adapter = options.adapter
    on_host = adapter.list_frozen(module, layer.spec) if adapter is not None and adapter.in_4bit else ()
    copies = {
        name: tensor.to(
            device=None if name in on_host else device,
            dtype=dtypes.get(name, options.kernels.dtype),
            copy=name not in on_host,
        )
        for name, tensor in tensors.items()
    }
    for name, stack in quantized.items():
        shape = stack.shape[-module.get_parameter(name).ndim :]
        copies[name] = make_placeholder(shape, stack.dtype, device)
    module.load_state_dict(copies, strict=True, assign=True)
    in_fp32 = [each for name, each in module.named_parameters() if name in kept]
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))  # what follows from the config is in no file
    if stray := [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]:
        raise UserError(
            f"layer {layer.index} ({type(module).__name__}): '{stray[0]}' is in no file and cannot be loaded"
        )
    if ranks.sequence_part.size > 1:
        share_sequence(module, ranks.sequence_part)
    places = ranks.parallel, ranks.expert_parallel
    choose_trained(module, layer.index, layer.spec, options.adapter, options.freeze, *places, quantized)
    mark_parameters(layer, ranks)
    return in_fp32


def _read_kept(
    layer: StageLayer, source: WeightSource, ranks: StageRanks, options: StageOptions, device: torch.device
) -> dict[str, FrozenStack]:
    """Return the weights that stay in the form of the files, with this rank's experts, on its device."""
    if options.adapter is None or options.adapter.kept is None:
        return {}
    names = options.adapter.list_frozen(layer.module, layer.spec)
    described = replace(layer.spec, experts=find_own_experts(layer.module, ranks.expert_parallel))
    kept = read_kept(source, described, names, options.kernels.dtype)
    return {name: stack.to(device) for name, stack in kept.items()}


def _read(
    layer: StageLayer, source: WeightSource, ranks: StageRanks, kept: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the layer's tensors: views of mapped files, so only what is copied is read. kept:
    the names of tensors that are not read."""
    shards = ranks.read_shards(layer.module)
    own = find_own_experts(layer.module, ranks.expert_parallel)
    described = replace(layer.spec, experts=own, kept=frozenset(kept))
    return {name: shards.take(name, tensor) for name, tensor in source.read_layer(layer.index, described).items()}


def _replace_router(layer: PipelineDecoderLayer, kernels: Kernels, deferred: DeferredGradients) -> None:
    """Have the layer's router, if it has one, compute its logits as the run asks for, and count other choices."""
    if kernels.dtype is torch.float32 or (kernels.compiles and not kernels.fp32_routers):
        return
    lender = None if kernels.compiles else deferred  # compiled code changes no other tensor
    replace_forward(layer, kernels.dtype, kernels.fp32_routers, lender, list_partial_gradients(layer))


def _add_noise(layers: Sequence[StageLayer], ranks: StageRanks, alpha: float) -> EmbeddingNoise | None:
    """Return the noise, put on the embedding where this stage has it; every stage counts its steps."""
    if not alpha:
        return None
    noise = EmbeddingNoise(alpha, ranks.sequence_part)
    for layer in layers:
        if layer.index == 0 and layer.is_own:
            assert isinstance(layer.module, Embedding), type(layer.module)
            noise.attach(layer.module)
    return noise


def _split_projections(layers: Sequence[StageLayer], deferred: DeferredGradients, device: torch.device) -> float:
    """Return the share of all stages' trained matrices whose gradients can be deferred: with adapters there is little
    to gain. All ranks call it."""
    counts = [split_projections(layer.module, deferred) for layer in layers]
    totals = torch.tensor(counts, dtype=torch.float64, device=device).sum(dim=0)
    dist.all_reduce(totals)
    can, matrices = totals.tolist()
    return can / max(1, matrices)
