"""The cost of one layer: parameters, FLOPs per token, and the bytes that a micro-batch keeps for the backward pass.

Everything is counted on the meta device: the layer's real `forward` runs there on tensors without storage, and what
autograd saves is what PyTorch would keep (`torch.autograd.graph.saved_tensors_hooks`). Nothing here names an
architecture.

B micro-batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.adapters.adapter import NF4_BYTES, NF4_SCALE_BYTES, Adapter, list_quantized
from models.adapters.base_inits import count_starts
from models.adapters.freeze import choose_trained
from models.adapters.targets import names_layers
from models.architecture.alike import list_alike
from models.architecture.widths import find_input_width
from models.experts.sizes import active_share, count_experts, list_matrices
from models.layers.context import MicroBatchContext
from models.layers.documents import DocumentBounds
from models.layers.layer import Layer, list_layer_configs
from models.layers.packed_attention import FLASH, VARLEN, find_head_sizes
from models.layers.recurrent import find_mixers
from models.layers.sharding_styles import count_sums
from models.parallel.sequence import ColumnParallelConv1D, ColumnParallelLinear
from models.parallel.shard import WHOLE_LAYERS, ContextParallel, ExpertParallel, LayerRanks, TensorParallel
from models.sharding.expert_parallel import divide_experts, list_expert_specs, list_stacks
from models.sharding.tensor_parallel import list_shard_specs, shard_module
from training.costs.allocation import AllocationPeak
from training.costs.micro_batch import MicroBatchShape
from training.costs.saved_activations import SavedBytes, WithoutData, count_saved_bytes
from training.costs.shared_attention import SharedAttention, count_shared_attention
from training.costs.traffic import NO_TRAFFIC, Traffic, TrafficCounter
from training.pipeline.weight_gradients import DeferredGradients, list_deferred, split_projections

INPUT_BYTES = 8  # of a token on its way into the first layer: input_ids are int64
BOUNDARY_BYTES = (
    8 + 4
)  # of the integers that cross a boundary with hidden_states: position_ids int64, segment_ids int32


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of the pipeline, for one micro-batch shape and dtype; with tensor or expert parallelism, what the first
    rank has of it.

    num_active: of the whole layer, parameters that take part in a token's computation; fewer than num_parameters where
    experts are chosen. num_frozen: those of num_active that are not trained. forward_flops: of a token, two a
    multiply-add; causal attention as it is computed, at its mean number of keys. frozen_flops: those of them with
    matrices that are not trained, whose gradient is not computed. attention_width: of the whole layer, heads x
    (query-key size + value size), so that full attention is 2 T attention_width FLOPs a token; 0 without. saved_bytes:
    kept for the backward pass when nothing is recomputed. output_bytes: hidden_states alone. widest_bytes: of the
    gradients inside the backward pass where they are most: at the widest result of a matrix, or at eager attention's
    scores. kept_bytes, remade_bytes: kept, and made again in the backward pass, under
    `activation_checkpoint_mode=selective`. total_parameters, total_trainable: of the whole layer. forward_sums,
    backward_sums: of hidden states, over the ranks that share the layer (`models/sharding/tensor_parallel.py`).
    regathers: of what went into its blocks, in a backward pass (`models/parallel/sequence.py`). is_estimated: the layer
    does not run on the meta device, and these bytes are an upper estimate. pass_seconds: of a token, forward and
    backward, where the layer was timed (`training/planner/profile_machine.py`). deferred_flops: of a token, those of
    the backward pass that can be put off; deferred_bytes: what is kept of a micro-batch until then
    (`training/pipeline/weight_gradients.py`); both 0 where the schedule puts nothing off. shared_attention: where
    several ranks share each sequence. attention_flops: those of forward_flops that attention takes;
    runs_flash_attention_2: whether a GPU runs it by FlashAttention-2's kernels. forward_traffic, backward_traffic: what
    the passes move besides products. num_blocks: see `Layer`. num_divided: of num_trainable, those of experts that
    ranks divide. sent_rows: of a token, those that are sent to the ranks of their experts, where ranks divide them;
    divided_flops: of forward_flops, those of such experts. num_starts: of the frozen parameters, those that adapters
    have started as, which are saved with them. num_in_4bit: of num_parameters, those of projections that are held in
    nf4; largest_in_4bit: those of the largest such projection, which is dequantized for each of its products.
    """

    name: str
    num_parameters: int
    num_trainable: int
    num_active: int
    largest_trainable: int
    forward_flops: float
    attention_width: int
    saved_bytes: int
    output_bytes: int
    tied_key: str | None = None
    is_estimated: bool = False
    frozen_flops: float = 0
    kept_bytes: int = 0
    widest_bytes: int = 0
    remade_bytes: int = 0
    pass_seconds: tuple[float, float] | None = None
    forward_sums: int = 0
    backward_sums: int = 0
    total_parameters: int = 0
    total_trainable: int = 0
    num_frozen: int = 0
    deferred_flops: float = 0
    deferred_bytes: int = 0
    shared_attention: SharedAttention | None = None
    num_blocks: int = 1
    regathers: int = 0
    attention_flops: float = 0
    runs_flash_attention_2: bool = False
    forward_traffic: Traffic = NO_TRAFFIC
    backward_traffic: Traffic = NO_TRAFFIC
    num_divided: int = 0
    sent_rows: int = 0
    divided_flops: float = 0
    num_starts: int = 0
    num_in_4bit: int = 0
    largest_in_4bit: int = 0

    @property
    def backward_flops(self) -> float:
        """FLOPs per token of the backward pass: a gradient of the input and one of the matrix, for each product."""
        return 2 * self.forward_flops - self.frozen_flops


@dataclass(frozen=True)
class Passes:
    """How layers run. splits_backward: the schedule puts off gradients of weights. fuses: what is no product runs in
    fused kernels."""

    splits_backward: bool = False
    fuses: bool = False


PLAIN_PASSES = Passes()


def count_layers(
    layers: Sequence[Layer],
    config: PretrainedConfig,
    batch: MicroBatchShape,
    *,
    adapter: Adapter | None = None,
    freeze: Sequence[str] = (),
    ranks: LayerRanks = WHOLE_LAYERS,
    passes: Passes = PLAIN_PASSES,
) -> list[LayerCost]:
    """Return the cost of each layer. Layers of one kind are counted once and share the result.

    layers: as `shard_layers` makes them for `ranks`. batch: of whole sequences, of which each of the ranks that share
    them has a part. adapter, freeze: as in training. ranks: the first of each group.
    """

    def build(index: int) -> nn.Module:
        return _build_trained(layers[index], index, adapter, freeze, ranks)

    kinds = _list_kinds(layers, config, adapter, freeze, ranks)
    counted = {
        index: _count_layer(
            _BuiltLayer(
                layers[index],
                build(index).to(batch.dtype),  # the adapter too, as the engine does
                config,
                batch.split(ranks.parts.size),
                ranks.parallel,
                ranks.parts,
                ranks.expert_parallel,
                is_first=index == 0,
                width=find_input_width(layers, index, config.hidden_size),
                passes=passes,
            )
        )
        for index in dict.fromkeys(kinds)
    }
    return [counted[kind] for kind in kinds]


def _list_kinds(
    layers: Sequence[Layer],
    config: PretrainedConfig,
    adapter: Adapter | None,
    freeze: Sequence[str],
    ranks: LayerRanks,
) -> list[int]:
    """Return for each layer the index of the first one of its kind: of one class, one set of shapes, one kind of
    attention and one choice of what is trained. Arguments: as of `count_layers`."""
    first: dict[Any, int] = {}
    kinds: list[int] = []
    # what is trained may depend on a layer's number and name
    is_by_layer = bool(freeze) or (adapter is not None and names_layers(adapter.config))
    alike = range(len(layers)) if is_by_layer else list_alike(layers)
    for index, (layer, start) in enumerate(zip(layers, alike, strict=True)):
        if start < index:
            kinds.append(kinds[start])
            continue
        module = _build_trained(layer, index, adapter, freeze, ranks)
        shapes = tuple((p.shape, p.requires_grad) for p in module.parameters())
        kind = (
            layer.module_class,
            layer.tied_key,
            layer.owns_weights,
            layer.is_further,
            _window(module, config),
            shapes,
        )
        kinds.append(first.setdefault(kind, index))
    return kinds


def _build_trained(
    layer: Layer, index: int, adapter: Adapter | None, freeze: Sequence[str], ranks: LayerRanks
) -> nn.Module:
    module = layer.build_on_meta()
    shard_module(module, layer.styles, ranks.parallel)
    divide_experts(module, ranks.expert_parallel)
    choose_trained(module, index, layer, adapter, freeze, ranks.parallel, ranks.expert_parallel)
    return module


@dataclass(frozen=True)
class _BuiltLayer:
    """A layer on the meta device, and what it is counted for: this rank's part of a micro-batch, the group that shares
    the layer, the group that shares its sequences, and the one that divides its experts."""

    layer: Layer
    module: nn.Module
    config: PretrainedConfig
    batch: MicroBatchShape
    parallel: TensorParallel
    parts: ContextParallel
    expert_parallel: ExpertParallel
    is_first: bool
    width: int  # of what it takes
    passes: Passes

    @property
    def own_config(self) -> PretrainedConfig:
        """The layer's, where layers have different heads."""
        configs = list_layer_configs(self.config)
        return configs[getattr(self.module, "layer_idx", 0)] if len(configs) > 1 else configs[0]

    @property
    def hidden_parts(self) -> int:
        """The number of parts that the rank's sequences are cut into once more between the layer's blocks."""
        return self.parallel.size if self.parallel.splits_sequence else 1


def _count_layer(built: _BuiltLayer) -> LayerCost:
    layer, module, config = built.layer, built.module, built.config
    parameters = dict(module.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    shares = dict.fromkeys(list_expert_specs(module), built.expert_parallel.size)
    # The rows of so many ranks go through this rank's experts.
    active = {name: p.numel() * shares.get(name, 1) * active_share(name, config) for name, p in parameters.items()}
    multiplied = list(_multiplied(layer, module))
    times = 1 if layer.is_further else layer.num_blocks  # the head has the tokens of all depths
    in_4bit = [weight.numel() for weight in list_quantized(module)]
    width, wholes = _attention_width(module, built.own_config), _count_shards(module)
    forward_sums, backward_sums = count_sums(layer)
    length = built.batch.seq_length * built.parts.size
    makes_scores = config._attn_implementation == "eager"  # of all keys, those that the mask hides too
    keys = length if makes_scores else mean_keys(length, _window(module, config))
    attention_flops = 2 * keys * width / built.parallel.size
    saved, is_estimated = _count_saved(built)
    forward_traffic, backward_traffic = _count_traffic(built)
    if (shared := _count_shared(built, width, keys)) is not None:
        saved += shared.saved_extra
    return LayerCost(
        name=layer.module_class.__name__,
        num_parameters=sum(p.numel() for p in parameters.values()),
        num_trainable=sum(p.numel() for p in trained.values()),
        num_active=round(sum(count * wholes.get(name, 1) for name, count in active.items())),
        num_frozen=round(sum(count * wholes.get(name, 1) for name, count in active.items() if name not in trained)),
        largest_trainable=max((p.numel() for p in trained.values()), default=0),
        forward_flops=2 * times * sum(active[name] for name in multiplied) + attention_flops,
        attention_flops=attention_flops,
        runs_flash_attention_2=_runs_flash_attention_2(built),
        forward_traffic=forward_traffic,
        backward_traffic=backward_traffic,
        frozen_flops=2 * times * sum(active[name] for name in multiplied if name not in trained),
        attention_width=width,
        saved_bytes=saved.saved,
        kept_bytes=saved.kept,
        widest_bytes=max(
            built.batch.tokens * built.batch.dtype.itemsize * _count_widest(built),
            _count_gradients_inside(built) if makes_scores and width else 0,
        ),
        shared_attention=shared,
        num_blocks=layer.num_blocks,
        remade_bytes=saved.remade,
        output_bytes=built.batch.tokens // built.hidden_parts * config.hidden_size * built.batch.dtype.itemsize,
        tied_key=layer.tied_key,
        is_estimated=is_estimated,
        total_parameters=round(
            sum(p.numel() * wholes.get(name, 1) * shares.get(name, 1) for name, p in parameters.items())
        ),
        total_trainable=round(
            sum(p.numel() * wholes.get(name, 1) * shares.get(name, 1) for name, p in trained.items())
        ),
        num_divided=sum(p.numel() for name, p in trained.items() if name in shares),
        sent_rows=count_experts(config)[0] * len(list(list_stacks(module))) if shares else 0,
        divided_flops=2 * sum(active[name] for name in multiplied if name in shares),
        num_starts=count_starts(module),
        num_in_4bit=sum(in_4bit),
        largest_in_4bit=max(in_4bit, default=0),
        forward_sums=forward_sums,
        backward_sums=backward_sums,
        regathers=_count_regathers(built),
        deferred_flops=2 * sum(active[name] for name, parameter in list_deferred(module) if parameter.ndim > 1)
        if built.passes.splits_backward
        else 0,
        deferred_bytes=_count_deferred(built) if built.passes.splits_backward else 0,
    )


def _count_shards(module: nn.Module) -> dict[str, float]:
    """How many times larger than the first rank's shard a sharded parameter is, by name."""
    specs, parameters = list_shard_specs(module), dict(module.named_parameters())
    return {name: spec.length / parameters[name].shape[spec.dim] for name, spec in specs.items() if name in parameters}


def mean_keys(seq_length: int, window: int | None) -> float:
    """Return the keys that a query attends to under a causal mask, on average over the sequence: (T + 1) / 2, less with
    a sliding window."""
    window = min(window or seq_length, seq_length)
    return (window * (window + 1) / 2 + (seq_length - window) * window) / seq_length


def _multiplied(layer: Layer, module: nn.Module) -> Iterator[str]:
    """Names of the matrices that a token is multiplied with: all but a looked-up embedding. A tied head uses its token
    embedding."""
    for part, name, _ in list_matrices(module):
        looked_up = isinstance(part, nn.Embedding) and not layer.is_tied_head
        if not looked_up:
            yield name


def _runs_flash_attention_2(built: _BuiltLayer) -> bool:
    """Whether torch has no other kernels on a GPU, as for packed rows, or the run asks for that package. Under `sdpa`
    torch chooses what is fastest; around a ring: `training/cost_terms/context_parallel.py`."""
    kernel = built.config._attn_implementation
    return kernel == FLASH[0] or (kernel == VARLEN and built.batch.is_packed)


def _attention_width(module: nn.Module, config: PretrainedConfig) -> int:
    """Heads x (query-key size + value size); 0 for a layer without attention. `transformers` names the class so in
    every model; one that carries a state does not look back at keys."""
    linear = {
        id(part) for mixer in find_mixers(module, getattr(module, "attention_type", "")) for part in mixer.modules()
    }
    if not any("Attention" in type(child).__name__ for child in module.modules() if id(child) not in linear):
        return 0
    return config.num_attention_heads * sum(find_head_sizes(config))


def _count_shared(built: _BuiltLayer, width: int, keys: float) -> SharedAttention | None:
    """None without attention, and where a rank has whole sequences. keys: of a query, on average."""
    if built.parts.size == 1 or not width:
        return None
    return count_shared_attention(
        built.own_config,
        built.parts,
        built.batch,
        tensor_parallel_size=built.parallel.size,
        head_sizes=find_head_sizes(built.own_config),
        flops=2 * keys * width / built.parallel.size,
        window=_window(built.module, built.config),
    )


def _count_regathers(built: _BuiltLayer) -> int:
    """Blocks whose first projections are trained, and keep a part of the sequence."""
    if built.hidden_parts == 1 or built.passes.splits_backward:
        return 0
    parts = (part for part in built.module.modules() if isinstance(part, (ColumnParallelLinear, ColumnParallelConv1D)))
    return len({id(part.entry) for part in parts if part.entry is not None and part.weight.requires_grad})


def _window(module: nn.Module, config: PretrainedConfig) -> int | None:
    """The sliding window of this layer's attention in tokens, or None."""
    for child in module.modules():
        if "Attention" in type(child).__name__ and hasattr(child, "sliding_window"):
            # of every attribute nn.Module says that it is a tensor or a module
            return child.sliding_window  # type: ignore[return-value]
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)


def _run(built: _BuiltLayer) -> Any:
    """The layer's outputs for a micro-batch, on the meta device."""
    layer, module = built.layer, built.module
    _announce_documents(built)
    shape = (built.batch.rows, built.batch.seq_length)
    position_ids = torch.zeros(*shape, dtype=torch.long, device="meta")
    length = built.batch.seq_length // built.hidden_parts
    hidden_states = torch.empty(
        shape[0] * layer.num_blocks,
        length,
        built.width,
        dtype=built.batch.dtype,
        device="meta",
        requires_grad=True,
    )  # [B, T, D], as often as blocks go in
    inputs: tuple[torch.Tensor, ...] = (
        position_ids if built.is_first else hidden_states,
        position_ids,
        position_ids.to(torch.int32),
    )
    if layer.is_further and not layer.owns_weights:
        inputs = (*inputs, position_ids)  # in place of tokens
    return layer.forward_fn(module, inputs) if layer.forward_fn else module(inputs)


def _announce_documents(built: _BuiltLayer) -> None:
    """Where attention keeps the documents of a row apart by a mask, let the layer make it: other kernels take their
    offsets, which are next to nothing."""
    makes_mask = built.batch.is_packed and built.config._attn_implementation == "sdpa" and built.parts.size == 1
    context = getattr(built.module, "context", None)
    if isinstance(context, MicroBatchContext):
        length = built.batch.seq_length
        context.bounds = DocumentBounds(2 * built.batch.rows, length) if makes_mask else None


def _count_deferred(built: _BuiltLayer) -> int:
    """Inputs and output gradients of projections and experts, those that several of them share once. Changes the
    module, so it comes last."""
    matrices = {name: parameter for name, parameter in list_deferred(built.module) if parameter.ndim > 1}
    if not matrices:
        return 0
    deferred = DeferredGradients()
    split_projections(built.module, deferred)
    try:
        with WithoutData():
            hidden_states = _run(built)[0]
        with deferred.defer() as products:
            hidden_states.backward(torch.empty_like(hidden_states))
    except (RuntimeError, NotImplementedError):
        widths = (sum(each.shape[-2:]) * _count_rows(built, name) for name, each in matrices.items())
        return round(built.batch.tokens * built.batch.dtype.itemsize * sum(widths))
    kept = {tensor.untyped_storage()._cdata: tensor for product in products for tensor in product.kept}
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _count_traffic(built: _BuiltLayer) -> tuple[Traffic, Traffic]:
    """Returns what the forward and the backward pass move; each dequantizes the projections in 4 bits. A layer that
    does not run on the meta device moves what it is estimated to keep, once forward and twice back."""
    dequantizing = _count_dequantizing(built)
    forward, backward = _count_passes(built)
    return forward + dequantizing, backward + dequantizing


def _count_dequantizing(built: _BuiltLayer) -> Traffic:
    """Returns what a pass moves to dequantize its projections: a kernel for the scales, and one for the weight."""
    weights = list_quantized(built.module)
    moved = NF4_BYTES + 2 * NF4_SCALE_BYTES + built.batch.dtype.itemsize
    return Traffic(round(moved * sum(weight.numel() for weight in weights)), 2 * len(weights))


def _count_passes(built: _BuiltLayer) -> tuple[Traffic, Traffic]:
    """Returns what the forward and the backward pass of a layer move with its weights in full precision."""
    counter = TrafficCounter(built.passes.fuses)
    try:
        with WithoutData(), counter:
            hidden_states = _run(built)[0]
            forward = counter.finish()
            if hidden_states.requires_grad:
                hidden_states.backward(torch.empty_like(hidden_states))
        return forward, counter.finish()
    except Exception:  # the layers of any family of transformers, whose backward pass has not been tried on this device
        moved = _estimate_saved(built).saved
        return Traffic(moved), Traffic(2 * moved)
    finally:
        built.module.zero_grad(set_to_none=True)


def _count_saved(built: _BuiltLayer) -> tuple[SavedBytes, bool]:
    """Returns the bytes that autograd keeps, and whether they are only estimated."""
    try:
        return count_saved_bytes(lambda: _run(built), built.module), False
    except (RuntimeError, NotImplementedError):  # a choice that depends on data, such as routing to experts
        return _estimate_saved(built), True


def _count_widest(built: _BuiltLayer) -> int:
    """Elements of a token in the widest result of a matrix; with experts, of those that it chooses."""
    multiplied = ((name, built.module.get_parameter(name)) for name in _multiplied(built.layer, built.module))
    return max((round(matrix.shape[-2] * _count_rows(built, name)) for name, matrix in multiplied), default=0)


def _count_rows(built: _BuiltLayer, name: str) -> float:
    """The rows of a token that a matrix of the layer multiplies; of experts on the most loaded rank."""
    if active_share(name, built.config) == 1:
        return 1
    return count_experts(built.config)[0] * built.expert_parallel.imbalance


def _count_gradients_inside(built: _BuiltLayer) -> int:
    """By how much a backward pass exceeds what is kept for it, without the gradients that go in and out: of T x T
    scores several are there at once, in fp32. On the meta device, as on a CPU, their softmax and its cast are two
    operators; on a GPU they are one, which takes 2 bytes of a score less. 0 where the layer does not run there."""
    freed = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for parameter in built.module.parameters()
        if parameter.requires_grad
    ]
    counter = AllocationPeak(on_meta=True)
    try:
        with WithoutData(), counter:
            hidden_states = _run(built)[0]
            kept = counter.peak = counter.alive
            hidden_states.backward(torch.empty_like(hidden_states))
    except Exception:  # as in `_count_traffic`
        return 0
    finally:
        for hook in freed:
            hook.remove()
        built.module.zero_grad(set_to_none=True)
    return max(0, counter.peak - kept - 2 * hidden_states.untyped_storage().nbytes())


def _estimate_saved(built: _BuiltLayer) -> SavedBytes:
    """Input and output of each matrix, and two copies of hidden_states in fp32 around each norm; all outputs can be
    kept."""
    config = built.config
    names = set(_multiplied(built.layer, built.module))
    shapes = {name: parameter.shape[-2:] for name, parameter in built.module.named_parameters() if name in names}
    chosen = {name: count_experts(config)[0] if active_share(name, config) < 1 else 1 for name in shapes}
    matrix_bytes = sum(sum(shape) * built.batch.dtype.itemsize * chosen[name] for name, shape in shapes.items())
    both = built.batch.tokens * round(matrix_bytes + 4 * 4 * config.hidden_size)
    return SavedBytes(both, kept=both, remade=both)
