"""The cost of one layer for one micro-batch: parameters, work, and bytes.

The layer runs once, forward and backward, on the meta device (`trace.py`); what it launches and keeps is read from the
record. Nothing here names an architecture.

B micro-batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from training.costs.micro_batch import MicroBatchShape
from training.costs.shared_attention import SharedAttention, count_shared_attention
from training.costs.trace import Operator, Trace, trace_passes
from training.costs.traffic import NO_TRAFFIC, PRODUCTS, Traffic, count_remade, count_traffic
from training.pipeline.weight_gradients import list_deferred

GROUPED_PRODUCT = "grouped_mm"  # of `models/experts/products.py`
INPUT_BYTES = 8  # of a token on its way into the first layer: input_ids are int64
BOUNDARY_BYTES = (
    8 + 4
)  # of the integers that cross a boundary with hidden_states: position_ids int64, segment_ids int32


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of a layer's parameters, on the first of the ranks that share the layer unless a field says otherwise."""

    held: int  # on the rank
    trained: int  # those of `held` that are trained
    largest_trained: int = 0  # elements of the largest trained tensor
    active: int = 0  # of the whole layer, those that take part in a token's computation: of experts, the chosen ones
    frozen: int = 0  # those of `active` that are not trained
    whole: int = 0  # of the whole layer
    whole_trained: int = 0  # of the whole layer, those that are trained
    divided: int = 0  # those of `trained` that belong to experts which ranks divide among them
    starts: int = 0  # frozen ones that an adapter has started as (PiSSA), which are saved with the adapter
    in_4bit: int = 0  # those of `held` in projections that are held in nf4
    largest_in_4bit: int = 0  # elements of the largest such projection, which is dequantized for each of its products


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a layer's passes on one rank. FLOPs are of one token, two a multiply-add."""

    forward_flops: float  # of a forward pass; causal attention at its mean number of keys, as it is computed
    attention_flops: float = 0  # those of `forward_flops` that attention takes
    frozen_flops: float = 0  # those of `forward_flops` in frozen matrices, whose own gradient is not computed
    unrepeated_flops: float = 0  # of products behind the last activation that is kept, which recomputation leaves out
    deferred_flops: float = 0  # of the backward pass, those that the schedule can put off; 0 if it puts none off
    divided_flops: float = 0  # those of `forward_flops` in experts that ranks divide among them
    attention_width: int = (
        0  # heads x (query-key size + value size), of the whole layer; full attention takes 2 T times it
    )
    runs_flash_attention_2: bool = False  # whether a GPU runs attention by FlashAttention-2's kernels
    forward_traffic: Traffic = NO_TRAFFIC  # what a micro-batch's forward pass moves besides products
    backward_traffic: Traffic = NO_TRAFFIC  # what its backward pass moves
    remade_traffic: Traffic = NO_TRAFFIC  # what `activation_checkpoint_mode=selective` moves again in a backward pass
    forward_sums: int = 0  # sums of hidden states over the ranks that share the layer, in a forward pass
    backward_sums: int = 0  # the same in a backward pass
    regathers: int = 0  # blocks whose input is gathered once more in a backward pass (`models/parallel/sequence.py`)
    sent_rows: int = 0  # hidden states that each token sends to the ranks of its experts
    pass_seconds: tuple[float, float] | None = None  # of a token, forward and backward, if the layer was timed

    @property
    def backward_flops(self) -> float:
        """FLOPs of a backward pass: a gradient of the input and one of the matrix, for each product."""
        return 2 * self.forward_flops - self.frozen_flops

    @property
    def divided_share(self) -> float:
        """The share of `forward_flops` in experts that ranks divide among them."""
        return self.divided_flops / self.forward_flops if self.divided_flops else 0.0


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """The bytes that a micro-batch takes in a layer, on one rank."""

    saved: int  # kept for the backward pass if nothing is recomputed
    output: int  # hidden_states that the layer returns
    kept: int = 0  # kept for the backward pass under `activation_checkpoint_mode=selective`
    remade: int = 0  # made again in the backward pass under `selective`
    widest: int = 0  # gradients within the backward pass, where they take most: a widest result, or eager scores
    deferred: int = 0  # kept between the two halves of a backward pass; 0 if the schedule puts nothing off


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of the pipeline, for one micro-batch shape and dtype. Layers that cost the same are equal."""

    name: str  # of the layer's class
    parameters: Parameters
    work: Work
    bytes: Bytes
    tied_key: str | None = None  # shared by the layers that are one module
    num_blocks: int = 1  # hidden states that travel side by side (`Layer.num_blocks`)
    is_estimated: bool = False  # the layer does not run on the meta device: its bytes are an upper estimate
    shared_attention: SharedAttention | None = None  # None if each rank has whole sequences

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.parameters, self.work, self.bytes, self.tied_key, self.shared_attention))

    def __hash__(self) -> int:
        """Computed once: a search asks for the sums of equal stages thousands of times."""
        return self._hash


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
    def makes_scores(self) -> bool:
        """Whether attention writes the scores of all keys to memory."""
        return self.config._attn_implementation == "eager"

    @property
    def hidden_parts(self) -> int:
        """The number of parts that the rank's sequences are cut into once more between the layer's blocks."""
        return self.parallel.size if self.parallel.splits_sequence else 1


def _count_layer(built: _BuiltLayer) -> LayerCost:
    layer, module = built.layer, built.module
    width = _attention_width(module, built.own_config)
    trace = _trace(built)
    keys = _count_keys(built)
    shared = _count_shared(built, width, keys)
    return LayerCost(
        name=layer.module_class.__name__,
        parameters=_count_parameters(built),
        work=_count_work(built, trace, width, keys),
        bytes=_count_bytes(built, trace, width, shared),
        tied_key=layer.tied_key,
        num_blocks=layer.num_blocks,
        is_estimated=trace is None,
        shared_attention=shared,
    )


def _trace(built: _BuiltLayer) -> Trace | None:
    """Return the record of the layer's passes; None if a choice depends on data, such as routing to experts."""
    try:
        return trace_passes(lambda: _run(built), built.module)
    except (RuntimeError, NotImplementedError):
        return None


def _count_parameters(built: _BuiltLayer) -> Parameters:
    module, parameters = built.module, dict(built.module.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    active, wholes = _list_active(built), _count_shards(module)
    shares = dict.fromkeys(list_expert_specs(module), built.expert_parallel.size)
    in_4bit = [weight.numel() for weight in list_quantized(module)]

    def sum_whole(names: Mapping[str, nn.Parameter]) -> int:
        return round(sum(p.numel() * wholes.get(name, 1) * shares.get(name, 1) for name, p in names.items()))

    return Parameters(
        held=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for p in trained.values()),
        largest_trained=max((p.numel() for p in trained.values()), default=0),
        active=round(sum(count * wholes.get(name, 1) for name, count in active.items())),
        frozen=round(sum(count * wholes.get(name, 1) for name, count in active.items() if name not in trained)),
        whole=sum_whole(parameters),
        whole_trained=sum_whole(trained),
        divided=sum(p.numel() for name, p in trained.items() if name in shares),
        starts=count_starts(module),
        in_4bit=sum(in_4bit),
        largest_in_4bit=max(in_4bit, default=0),
    )


def _count_work(built: _BuiltLayer, trace: Trace | None, width: int, keys: float) -> Work:
    """width: `Work.attention_width`. keys: of a query, on average."""
    layer, module = built.layer, built.module
    active, multiplied = _list_active(built), list(_multiplied(layer, module))
    times = 1 if layer.is_further else layer.num_blocks  # the head has the tokens of all depths
    divided = set(list_expert_specs(module))
    attention_flops = 2 * keys * width / built.parallel.size
    forward_traffic, backward_traffic, remade_traffic = _count_traffic(built, trace)
    forward_sums, backward_sums = count_sums(layer)
    deferred = _list_deferred(built)
    return Work(
        forward_flops=2 * times * sum(active[name] for name in multiplied) + attention_flops,
        attention_flops=attention_flops,
        frozen_flops=2
        * times
        * sum(active[name] for name in multiplied if not module.get_parameter(name).requires_grad),
        unrepeated_flops=_count_unrepeated(trace) / built.batch.tokens,
        deferred_flops=2 * sum(active[name] for name in deferred),
        divided_flops=2 * sum(active[name] for name in multiplied if name in divided),
        attention_width=width,
        runs_flash_attention_2=_runs_flash_attention_2(built),
        forward_traffic=forward_traffic,
        backward_traffic=backward_traffic,
        remade_traffic=remade_traffic,
        forward_sums=forward_sums,
        backward_sums=backward_sums,
        regathers=_count_regathers(built),
        sent_rows=count_experts(built.config)[0] * len(list(list_stacks(module))) if divided else 0,
    )


def _count_bytes(built: _BuiltLayer, trace: Trace | None, width: int, shared: SharedAttention | None) -> Bytes:
    batch = built.batch
    if trace is None:
        saved = kept = remade = _estimate_saved(built)
    else:
        held = {operand.storage for operator in trace.forward if operator.is_kept for operand in operator.made}
        saved, kept, remade = map(trace.sum_sizes, (trace.saved, held, trace.saved - held))
    if shared is not None:
        saved, kept, remade = saved + shared.saved_extra, kept + shared.kept_extra, remade + shared.remade_extra
    return Bytes(
        saved=saved,
        kept=kept,
        remade=remade,
        output=batch.tokens // built.hidden_parts * built.config.hidden_size * batch.dtype.itemsize,
        widest=max(
            batch.tokens * batch.dtype.itemsize * _count_widest(built),
            _count_gradients_inside(trace) if built.makes_scores and width else 0,
        ),
        deferred=_count_deferred(built, trace),
    )


def _count_unrepeated(trace: Trace | None) -> float:
    """Return the FLOPs of a micro-batch's products behind the last activation that is kept."""
    if trace is None:
        return 0
    (left_out,) = count_traffic([trace.forward[trace.num_repeated :]], fuses=False)
    return sum(2.0 * rows * depth * columns for rows, depth, columns in left_out.products)


def _list_active(built: _BuiltLayer) -> dict[str, float]:
    """Return by name how many elements of a parameter a token takes part in. The rows of all ranks that divide experts
    go through this rank's experts."""
    shares = dict.fromkeys(list_expert_specs(built.module), built.expert_parallel.size)
    return {
        name: parameter.numel() * shares.get(name, 1) * active_share(name, built.config)
        for name, parameter in built.module.named_parameters()
    }


def _count_keys(built: _BuiltLayer) -> float:
    """Return the keys that a query attends to, on average; eager attention makes scores of those that the mask hides,
    too."""
    length = built.batch.seq_length * built.parts.size
    return length if built.makes_scores else mean_keys(length, _window(built.module, built.config))


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


def _list_deferred(built: _BuiltLayer) -> list[str]:
    """Return the names of the matrices whose gradients the schedule puts off."""
    if not built.passes.splits_backward:
        return []
    return [name for name, parameter in list_deferred(built.module) if parameter.ndim > 1]


def _count_deferred(built: _BuiltLayer, trace: Trace | None) -> int:
    """Return the bytes of inputs and output gradients of projections and experts, those that several of them share
    once."""
    names = _list_deferred(built)
    if trace is None or trace.backward is None:
        widths = (sum(built.module.get_parameter(name).shape[-2:]) * _count_rows(built, name) for name in names)
        return round(built.batch.tokens * built.batch.dtype.itemsize * sum(widths))
    made: dict[int, int] = {}  # by a storage, the position of the operator of the backward pass that has made it
    for position, operator in enumerate(trace.backward):
        taken = {operand.storage for operand in operator.taken}  # which a view, or what writes in place, makes again
        made.update(
            {operand.storage: position for operand in operator.made if operand.storage not in taken | made.keys()}
        )
    kept: set[int] = set()
    for name in names:
        product = _find_product(trace.backward, trace.gradients.get(name), made)
        kept.update(_list_kept(trace.backward, product, made) if product else ())
    return trace.sum_sizes(kept)


def _find_product(operators: Sequence[Operator], gradient: int | None, made: Mapping[int, int]) -> Operator | None:
    """Return the product that a weight's gradient comes from, which may have been scaled or cast since."""
    position = made.get(gradient) if gradient is not None else None
    while position is not None and operators[position].name not in (*PRODUCTS, GROUPED_PRODUCT):
        earlier = (made.get(operand.storage, position) for operand in operators[position].taken)
        position = next((each for each in earlier if each < position), None)  # type: ignore[operator]
    return None if position is None else operators[position]


def _list_kept(operators: Sequence[Operator], product: Operator, made: Mapping[int, int]) -> Iterator[int]:
    """Yield the storages that wait for a product; rows that the backward pass gathers again are kept as what they are
    gathered from."""
    for operand in product.taken:
        gathering = operators[made[operand.storage]] if operand.storage in made else None
        sources = [each.storage for each in gathering.taken] if gathering else []
        if gathering and gathering.name == "index_select" and not any(source in made for source in sources):
            yield from sources
        else:
            yield operand.storage


def _count_traffic(built: _BuiltLayer, trace: Trace | None) -> tuple[Traffic, Traffic, Traffic]:
    """Return what the forward and the backward pass move, and what `selective` moves again; each dequantizes the
    projections in 4 bits. A layer that does not run on the meta device moves what it is estimated to keep, once forward
    and twice back."""
    dequantizing = _count_dequantizing(built)
    if trace is None or trace.backward is None:
        moved = _estimate_saved(built)
        forward = remade = Traffic(moved)
        backward = Traffic(2 * moved)
    else:
        forward, backward = count_traffic((trace.forward, trace.backward), built.passes.fuses)
        remade = count_remade(trace.forward, built.passes.fuses)
    return forward + dequantizing, backward + dequantizing, remade + dequantizing


def _count_dequantizing(built: _BuiltLayer) -> Traffic:
    """Returns what a pass moves to dequantize its projections: a kernel for the scales, and one for the weight."""
    weights = list_quantized(built.module)
    moved = NF4_BYTES + 2 * NF4_SCALE_BYTES + built.batch.dtype.itemsize
    return Traffic(round(moved * sum(weight.numel() for weight in weights)), 2 * len(weights))


def _count_widest(built: _BuiltLayer) -> int:
    """Elements of a token in the widest result of a matrix; with experts, of those that it chooses."""
    multiplied = ((name, built.module.get_parameter(name)) for name in _multiplied(built.layer, built.module))
    return max((round(matrix.shape[-2] * _count_rows(built, name)) for name, matrix in multiplied), default=0)


def _count_rows(built: _BuiltLayer, name: str) -> float:
    """The rows of a token that a matrix of the layer multiplies; of experts on the most loaded rank."""
    if active_share(name, built.config) == 1:
        return 1
    return count_experts(built.config)[0] * built.expert_parallel.imbalance


def _count_gradients_inside(trace: Trace | None) -> int:
    """Return by how much a backward pass exceeds what is kept for it, without the gradients that go in and out: of
    T x T scores several are there at once, in fp32. On the meta device, as on a CPU, their softmax and its cast are two
    operators; on a GPU they are one, which takes 2 bytes of a score less. 0 if the layer does not run there."""
    return 0 if trace is None else max(0, trace.backward_peak - 2 * trace.result_bytes)


def _estimate_saved(built: _BuiltLayer) -> int:
    """Return the bytes of input and output of each matrix, and of two copies of hidden_states in fp32 around each norm.
    All outputs can be kept."""
    config = built.config
    names = set(_multiplied(built.layer, built.module))
    shapes = {name: parameter.shape[-2:] for name, parameter in built.module.named_parameters() if name in names}
    chosen = {name: count_experts(config)[0] if active_share(name, config) < 1 else 1 for name in shapes}
    matrix_bytes = sum(sum(shape) * built.batch.dtype.itemsize * chosen[name] for name, shape in shapes.items())
    return built.batch.tokens * round(matrix_bytes + 4 * 4 * config.hidden_size)
