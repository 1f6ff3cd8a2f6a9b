"""The cost of one layer for one micro-batch: parameters, work, and bytes.

The layer runs once, forward and backward, on the meta device (`trace.py`); what it launches and keeps is read from the
record. Nothing here names an architecture.

B micro-batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.adapters.adapter import Adapter
from models.adapters.base_inits import count_starts
from models.adapters.freeze import choose_trained
from models.adapters.quantized import list_quantized
from models.adapters.targets import names_layers
from models.architecture.alike import list_alike
from models.architecture.lookup import has_ring_attention
from models.architecture.widths import find_input_width
from models.experts.gate import replace_forward
from models.experts.sizes import active_share, count_experts, list_matrices
from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer
from models.layers.documents import DocumentBounds
from models.layers.fused_kernels import fuse_kernels
from models.layers.layer import Layer, list_layer_configs
from models.layers.packed_attention import FLASH, VARLEN, find_head_sizes
from models.layers.recurrent import find_mixers
from models.layers.selection_cost import Selecting, SelectionCost
from models.layers.sharding_styles import count_sums
from models.parallel.sequence import ColumnParallelConv1D, ColumnParallelLinear
from models.parallel.shard import WHOLE_LAYERS, LayerRanks
from models.sharding.expert_parallel import divide_experts, list_expert_specs, list_stacks
from models.sharding.tensor_parallel import list_shard_specs, shard_module
from training.costs.trace import Operator, Trace, trace_passes
from training.costs.traffic import NO_TRAFFIC, PRODUCTS, Traffic, count_remade, count_traffic
from training.pipeline.activation_checkpoint import may_draw
from training.pipeline.weight_gradients import list_deferred, list_lent

GROUPED_PRODUCT = "grouped_mm"  # of `models/experts/products.py`
_LONGEST = 2**30  # tokens of a row


@dataclass(frozen=True)
class MicroBatchShape:
    """The micro-batch that costs are counted for: rows of `seq_length` tokens, whose activations have `dtype`.
    is_packed: whether a row has several documents."""

    rows: int
    seq_length: int
    dtype: torch.dtype
    is_packed: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_length


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of a layer's parameters, on the first of the ranks that share the layer unless a field says otherwise."""

    held: int  # on the rank
    trained: int  # those of `held` that are trained
    largest_trained: int = 0  # elements of the largest trained tensor
    largest_made: int = 0  # the same without those whose gradients a GPU adds to sums that are lent (`list_lent`)
    active: int = 0  # of the whole layer, those that take part in a token's computation: of experts, the chosen ones
    frozen: int = 0  # those of `active` that are not trained
    whole: int = 0  # of the whole layer
    whole_trained: int = 0  # of the whole layer, those that are trained
    divided: int = 0  # those of `trained` that belong to experts which ranks divide among them
    starts: int = 0  # frozen ones that an adapter has started as (PiSSA), which are saved with the adapter
    quantized: int = 0  # those of `held` in projections and experts that are held quantized
    quantized_bytes: int = 0  # what those take
    dequantized_bytes: int = 0  # of the largest projection, or chunk of a stack of experts, while it is dequantized


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a layer's passes on one rank. FLOPs are of one token, two a multiply-add."""

    forward_flops: float  # of a forward pass; causal attention at its mean number of keys, as it is computed
    attention_flops: float = 0  # those of `forward_flops` that attention takes
    frozen_flops: float = 0  # those of `forward_flops` in frozen matrices, whose own gradient is not computed
    unrepeated_flops: float = 0  # of products behind the last activation that is kept, which recomputation leaves out
    deferred_flops: float = 0  # of the backward pass, those that the schedule can put off; 0 if it puts none off
    divided_flops: float = 0  # those of `forward_flops` in experts that ranks divide among them
    # Heads x (query-key size + value size), of the whole layer; full attention takes 2 T times it
    attention_width: int = 0
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


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """The bytes that a micro-batch takes in a layer, on one rank."""

    saved: int  # kept for the backward pass if nothing is recomputed
    output: int  # hidden_states that the layer returns
    kept: int = 0  # kept for the backward pass under `activation_checkpoint_mode=selective`
    remade: int = 0  # made again in the backward pass under `selective`
    # Made beyond `saved` when the layer runs again in the backward pass, where both take most: results that autograd
    # does not keep. Below 0 if they are gone before most of `saved` is there
    repeated: int = 0
    widest: int = 0  # gradients within the backward pass, where they take most: a widest result, or eager scores
    deferred: int = 0  # kept between the two halves of a backward pass; 0 if the schedule puts nothing off
    lent: int = 0  # made for the layers after it besides hidden_states, which those that are recomputed take again
    # Whether autograd keeps nothing of the hidden_states that the layer takes, as where a norm keeps a copy in fp32:
    # `recompute` (training/pipeline/recomputation.py) lets go of them once it has run the layer again. torch's own
    # function, for layers that may draw random numbers, does not
    frees_input: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedAttention:
    """The attention of a layer over sequences that several ranks share; heads are those of one rank."""

    is_ring: bool  # whether the run sends blocks around a ring, or exchanges heads
    has_ring: bool  # whether the family could send blocks around a ring
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_sizes: tuple[int, int]  # of queries and keys, and of values
    has_window: bool  # whether its tokens see the nearest alone


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
    selection: SelectionCost | None = None  # None if each query attends to all keys that it sees

    @cached_property
    def _hash(self) -> int:
        parts = self.parameters, self.work, self.bytes, self.shared_attention, self.selection
        return hash((self.name, self.tied_key, *parts))

    def __hash__(self) -> int:
        """Computed once: a search asks for the sums of equal stages thousands of times."""
        return self._hash


def count_layers(
    layers: Sequence[Layer],
    config: PretrainedConfig,
    batch: MicroBatchShape,
    *,
    adapter: Adapter | None = None,
    freeze: Sequence[str] = (),
    ranks: LayerRanks = WHOLE_LAYERS,
    splits_backward: bool = False,
    compiles: bool = False,
    fuses: bool = False,
    fp32_routers: bool = False,
    alike: list[int] | None = None,
) -> list[LayerCost]:
    """Return the cost of each layer. Layers of one kind are counted once and share the result: those of one class, one
    set of shapes, one kind of attention and one choice of what is trained.

    layers: as `shard_layers` makes them for `ranks`. batch: of whole sequences, of which each of the ranks that share
    them has a part. adapter, freeze: as in training. ranks: the first of each group. splits_backward: whether the
    schedule puts off gradients of weights. compiles: whether neighbours that are no products become one kernel. fuses:
    whether parts of layers are fused kernels (`models/layers/fused_kernels.py`). fp32_routers: whether routers have
    logits in fp32 (`models/experts/gate.py`). alike: by layer the first one of its kind, as an earlier count that
    differs in `batch` alone has found them; an empty list gets them from this count. To find them each layer is built.
    """
    # what is trained may depend on a layer's number and name
    is_by_layer = bool(freeze) or (adapter is not None and (bool(adapter.unkept) or names_layers(adapter.config)))
    part = replace(batch, seq_length=batch.seq_length // ranks.parts.size)
    counted: dict[Any, tuple[LayerCost, torch.dtype, int]] = {}  # and the first layer of a kind
    known: dict[tuple[int, torch.dtype], tuple[LayerCost, torch.dtype, int]] = {}
    costs: list[LayerCost] = []
    found: list[int] = []
    dtype = batch.dtype  # of the hidden states that a layer takes: those of mamba pass them on in fp32
    for index, first in enumerate(alike or (range(len(layers)) if is_by_layer else list_alike(layers))):
        taken = first, dtype
        if taken in known:
            cost, dtype, same = known[taken]
            costs.append(cost)
            found.append(same)
            continue
        layer = layers[index]
        module = layer.build_on_meta()
        shard_module(module, layer.styles, ranks.parallel)
        divide_experts(module, ranks.expert_parallel)
        choose_trained(module, index, layer, adapter, freeze, ranks.parallel, ranks.expert_parallel)
        if fp32_routers and batch.dtype is not torch.float32:
            replace_forward(module, batch.dtype, in_fp32=True, lender=None, summed=set())
        if fuses:
            fuse_kernels(module)
        shapes = tuple((p.shape, p.requires_grad) for p in module.parameters())
        forms = tuple(getattr(part, "frozen_form", None) for part in module.modules())
        recipe = (layer.module_class, layer.tied_key, layer.owns_weights, layer.is_further, forms)
        lent = _count_lent(module, replace(part, seq_length=_LONGEST))  # so that kinds are those of any length
        kind = (*recipe, lent, _find_window(module, config), _find_chunk(module, config), shapes, dtype)
        if kind not in counted:
            width = find_input_width(layers, index, config.hidden_size)
            module.to(batch.dtype)  # the adapter too, as the engine does
            built = _BuiltLayer(layer, module, config, part, ranks, index == 0, width, dtype, splits_backward, compiles)
            counted[kind] = built.count(), built.output_dtype, index
        cost, dtype, same = known[taken] = counted[kind]
        costs.append(cost)
        found.append(same)
    if alike is not None:
        alike[:] = found
    return costs


@dataclass(frozen=True)
class _BuiltLayer:
    """A layer on the meta device, and what it is counted for."""

    layer: Layer
    module: nn.Module
    config: PretrainedConfig
    batch: MicroBatchShape  # this rank's part
    ranks: LayerRanks
    is_first: bool
    width: int  # of what it takes
    dtype: torch.dtype  # of what it takes
    splits_backward: bool
    compiles: bool

    def count(self) -> LayerCost:
        """Return the cost of the layer."""
        return LayerCost(
            name=self.layer.module_class.__name__,
            parameters=self._count_parameters(),
            work=self._count_work(),
            bytes=self._count_bytes(),
            tied_key=self.layer.tied_key,
            num_blocks=self.layer.num_blocks,
            is_estimated=self._trace is None,
            shared_attention=self._shared,
            selection=self._selection,
        )

    def _count_parameters(self) -> Parameters:
        parameters = dict(self.module.named_parameters())
        trained = {name: parameter.numel() for name, parameter in parameters.items() if parameter.requires_grad}
        quantized, itemsize = list_quantized(self.module), self.batch.dtype.itemsize
        splits = self.splits_backward or not self.compiles
        lent = () if self.layer.is_tied_head else set(list_lent(self.module, splits, self.splits_backward))
        # How many times larger than the first rank's shard a sharded parameter is, over all ranks with experts too
        whole = {
            name: spec.length / parameters[name].shape[spec.dim]
            for name, spec in list_shard_specs(self.module).items()
            if name in parameters
        }

        def sum_whole(names: Iterable[str], counts: Mapping[str, float]) -> int:
            return round(sum(counts[name] * whole.get(name, 1) for name in names))

        elements = {name: p.numel() * self._expert_shares.get(name, 1) for name, p in parameters.items()}
        return Parameters(
            held=sum(p.numel() for p in parameters.values()),
            trained=sum(trained.values()),
            largest_trained=max(trained.values(), default=0),
            largest_made=max((count for name, count in trained.items() if name not in lent), default=0),
            active=sum_whole(parameters, self._active),
            frozen=sum_whole([name for name in parameters if name not in trained], self._active),
            whole=sum_whole(parameters, elements),
            whole_trained=sum_whole(trained, elements),
            divided=sum(count for name, count in trained.items() if name in self._expert_shares),
            starts=count_starts(self.module),
            quantized=sum(weight.numel for weight in quantized),
            quantized_bytes=sum(weight.nbytes for weight in quantized),
            dequantized_bytes=max(
                (round((itemsize + weight.work_bytes) * weight.chunk_numel) for weight in quantized), default=0
            ),
        )

    def _count_work(self) -> Work:
        times = 1 if self.layer.is_further else self.layer.num_blocks  # the head has the tokens of all depths
        kernel = self.config._attn_implementation
        active, multiplied, divided = self._active, self._multiplied, self._expert_shares
        frozen = [name for name in multiplied if not self.module.get_parameter(name).requires_grad]
        unrepeated = 0.0
        if self._trace is not None:
            (left_out,) = count_traffic([self._trace.forward[self._trace.num_repeated :]], fuses=False)
            unrepeated = sum(2.0 * rows * depth * columns for rows, depth, columns in left_out.products)
        forward_traffic, backward_traffic, remade_traffic = self._count_traffic()
        forward_sums, backward_sums = count_sums(self.layer)
        return Work(
            forward_flops=2 * times * sum(active[name] for name in multiplied) + self._attention_flops,
            attention_flops=self._attention_flops,
            frozen_flops=2 * times * sum(active[name] for name in frozen),
            unrepeated_flops=unrepeated / self.batch.tokens,
            deferred_flops=2 * sum(active[name] for name in self._deferred),
            divided_flops=2 * sum(active[name] for name in multiplied if name in divided),
            attention_width=self._attention_width,
            # Torch has no other kernels on a GPU for packed rows. Under `sdpa` it chooses what is fastest; under the
            # masks of a selection that is taken to be as slow; around a ring:
            # `training/cost_terms/context_parallel.py`
            runs_flash_attention_2=kernel == FLASH[0]
            or (kernel == VARLEN and self.batch.is_packed)
            or self._selection is not None,
            forward_traffic=forward_traffic,
            backward_traffic=backward_traffic,
            remade_traffic=remade_traffic,
            forward_sums=forward_sums,
            backward_sums=backward_sums,
            regathers=self._count_regathers(),
            sent_rows=count_experts(self.config)[0] * len(list(list_stacks(self.module))) if divided else 0,
        )

    def _count_bytes(self) -> Bytes:
        batch, trace, shared = self.batch, self._trace, self._shared
        itemsize = batch.dtype.itemsize
        if trace is None:
            saved = kept = remade = self._estimate_saved()
        else:
            held = {operand.storage for operator in trace.forward if operator.is_kept for operand in operator.made}
            saved, kept, remade = map(trace.sum_sizes, (trace.saved, held, trace.saved - held))
        if shared is not None:
            outputs, sums = (batch.tokens * shared.heads * size for size in (shared.head_sizes[1] * itemsize, 4))
            if shared.is_ring:  # `selective` keeps nothing of its kernels
                kept, remade = kept - (outputs + sums), remade + outputs + sums
            else:  # outputs are kept once more, as the exchange of heads has put them together
                saved, kept = saved + outputs, kept + outputs
        keeps_input = trace is not None and self._keeps_input(trace)
        repeated = 0
        if trace is not None:
            repeated = trace.repeated_peak - trace.sum_sizes(trace.saved) - (0 if keeps_input else self._input_bytes)
        widest = batch.tokens * itemsize * self._count_widest()
        # Attention to selected keys runs for a chunk of queries at a time: each adds gradients of all keys and values
        if trace is not None and (self._selection is not None or (self._makes_scores and self._attention_width)):
            # Of T x T scores several are there at once, in fp32. On the meta device, as on a CPU, their softmax and its
            # cast are two operators; on a GPU they are one, which takes 2 bytes of a score less
            widest = max(widest, trace.backward_peak)
        return Bytes(
            saved=saved,
            kept=kept,
            remade=remade,
            repeated=repeated,
            output=batch.tokens // self._hidden_parts * self.config.hidden_size * self.output_dtype.itemsize,
            widest=widest,
            deferred=self._count_deferred(),
            lent=_count_lent(self.module, batch),
            frees_input=trace is not None and not keeps_input and not may_draw([self.module]),
        )

    @property
    def _input_bytes(self) -> int:
        """Bytes of the hidden_states that the layer takes."""
        return self.batch.tokens // self._hidden_parts * self.config.hidden_size * self.batch.dtype.itemsize

    def _keeps_input(self, trace: Trace) -> bool:
        """Return whether autograd keeps the layer's own hidden_states."""
        made = {operand.storage for operator in trace.forward for operand in operator.made}
        return any(trace.sizes[storage] == self._input_bytes for storage in trace.saved - made)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the hidden states that the layer returns; that of what it takes where it cannot be run."""
        return self.dtype if self._trace is None else self._trace.result_dtype

    @cached_property
    def _own_config(self) -> PretrainedConfig:
        """The layer's, where layers have different heads."""
        configs = list_layer_configs(self.config)
        return configs[getattr(self.module, "layer_idx", 0)] if len(configs) > 1 else configs[0]

    @cached_property
    def _selecting(self) -> Selecting | None:
        """The attention whose keys an indexer selects; None for any other."""
        return next((part for part in self.module.modules() if isinstance(part, Selecting)), None)

    @cached_property
    def _selection(self) -> SelectionCost | None:
        batch, part = self.batch, self._selecting
        return None if part is None else part.count_selection(batch.rows, batch.seq_length, batch.dtype.itemsize)

    @property
    def _makes_scores(self) -> bool:
        """Whether attention writes the scores of all keys to memory."""
        return self.config._attn_implementation == "eager"

    @property
    def _hidden_parts(self) -> int:
        """The number of parts that the rank's sequences are cut into once more between the layer's blocks."""
        return self.ranks.parallel.size if self.ranks.parallel.splits_sequence else 1

    @cached_property
    def _expert_shares(self) -> dict[str, int]:
        """The number of ranks that divide a parameter of experts, by its name."""
        return dict.fromkeys(list_expert_specs(self.module), self.ranks.expert_parallel.size)

    @cached_property
    def _active(self) -> dict[str, float]:
        """The number of elements of a parameter that a token takes part in, by name. The rows of all ranks that divide
        experts go through this rank's experts."""
        return {
            name: parameter.numel() * self._expert_shares.get(name, 1) * active_share(name, self.config)
            for name, parameter in self.module.named_parameters()
        }

    @cached_property
    def _multiplied(self) -> list[str]:
        """Names of the matrices that a token is multiplied with: all but a looked-up embedding, and those of an
        indexer, which are in the selection's cost. A tied head uses its token embedding."""
        is_tied, selecting = self.layer.is_tied_head, self._selecting
        indexer = set() if selecting is None or selecting.indexer is None else set(selecting.indexer.modules())
        return [
            name
            for part, name, _ in list_matrices(self.module)
            if part not in indexer and (is_tied or not isinstance(part, nn.Embedding))
        ]

    @cached_property
    def _deferred(self) -> list[str]:
        """Names of the matrices whose gradients the schedule puts off."""
        if not self.splits_backward:
            return []
        return [name for name, parameter in list_deferred(self.module) if parameter.ndim > 1]

    @cached_property
    def _attention_width(self) -> int:
        """Heads x (query-key size + value size); 0 for a layer without attention. `transformers` names the class so in
        every model; one that carries a state does not look back at keys."""
        mixers = find_mixers(self.module, getattr(self.module, "attention_type", ""))
        linear = {part for mixer in mixers for part in mixer.modules()}
        if not any("Attention" in type(child).__name__ for child in self.module.modules() if child not in linear):
            return 0
        return self._own_config.num_attention_heads * sum(find_head_sizes(self._own_config))

    @cached_property
    def _attention_flops(self) -> float:
        """FLOPs of a token's attention; eager attention makes scores of the keys that the mask hides, too."""
        length = self.batch.seq_length * self.ranks.parts.size
        keys = length if self._makes_scores else mean_keys(length, _find_window(self.module, self.config))
        if not self._makes_scores and (chunk := _find_chunk(self.module, self.config)) and chunk < length:
            rest = length % chunk
            keys = (length // chunk * chunk * mean_keys(chunk, None) + rest * (rest + 1) / 2) / length
        return 2 * keys * self._attention_width / self.ranks.parallel.size

    @cached_property
    def _shared(self) -> SharedAttention | None:
        """None without attention, and where a rank has whole sequences."""
        parts, config, tensor = self.ranks.parts, self._own_config, self.ranks.parallel.size
        if parts.size == 1 or not self._attention_width:
            return None
        heads, window = config.num_attention_heads // tensor, _find_window(self.module, self.config)
        return SharedAttention(
            is_ring=parts.is_ring,
            has_ring=has_ring_attention(config),
            heads=heads,
            kv_heads=max(1, (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tensor),
            head_sizes=find_head_sizes(config),
            has_window=window is not None and window < self.batch.seq_length * parts.size,
        )

    def _count_regathers(self) -> int:
        """Blocks whose first projections are trained, and keep a part of the sequence."""
        if self._hidden_parts == 1 or self.splits_backward:
            return 0
        kinds = ColumnParallelLinear, ColumnParallelConv1D
        parts = (part for part in self.module.modules() if isinstance(part, kinds))
        return len({part.entry for part in parts if part.entry is not None and part.weight.requires_grad})

    @cached_property
    def _trace(self) -> Trace | None:
        """The record of the layer's passes; None if a choice depends on data, such as routing to experts."""
        try:
            return trace_passes(self._run, self.module)
        except (RuntimeError, NotImplementedError):
            return None

    def _run(self) -> Any:
        """The layer's outputs for a micro-batch, on the meta device."""
        layer, module, batch = self.layer, self.module, self.batch
        context = getattr(module, "context", None)
        if isinstance(context, MicroBatchContext):
            # Where attention keeps the documents of a row apart by a mask, let the layer make it: other kernels take
            # their offsets, which are next to nothing
            kernel = self.config._attn_implementation
            makes_mask = batch.is_packed and kernel == "sdpa" and self.ranks.parts.size == 1
            context.bounds = DocumentBounds(2 * batch.rows, batch.seq_length) if makes_mask else None
        position_ids = torch.zeros(batch.rows, batch.seq_length, dtype=torch.long, device="meta")
        shape = batch.rows * layer.num_blocks, batch.seq_length // self._hidden_parts, self.width
        hidden_states = torch.empty(*shape, dtype=self.dtype, device="meta", requires_grad=True)  # [B, T, D] per block
        inputs: Any = (position_ids if self.is_first else hidden_states, position_ids, position_ids.to(torch.int32))
        if layer.is_further and not layer.owns_weights:
            inputs = (*inputs, position_ids)  # in place of tokens
        if isinstance(module, PipelineDecoderLayer):
            inputs = module.complete_inputs(inputs)
        return layer.forward_fn(module, inputs) if layer.forward_fn else module(inputs)

    def _count_deferred(self) -> int:
        """Return the bytes of inputs and output gradients of projections and experts, those that several of them share
        once."""
        trace, names = self._trace, self._deferred
        if trace is None or trace.backward is None:
            widths = (sum(self.module.get_parameter(name).shape[-2:]) * self._count_rows(name) for name in names)
            return round(self.batch.tokens * self.batch.dtype.itemsize * sum(widths))
        made: dict[int, int] = {}  # by a storage, the position of the operator of the backward pass that has made it
        for position, operator in enumerate(trace.backward):
            taken = {
                operand.storage for operand in operator.taken
            }  # which a view, or what writes in place, makes again
            for storage in {operand.storage for operand in operator.made} - taken:
                made.setdefault(storage, position)
        products = (_find_product(trace.backward, trace.gradients.get(name), made) for name in names)
        kept = [_list_kept(trace.backward, product, made) for product in products if product]
        return trace.sum_sizes(storage for each in kept for storage in each)

    def _count_traffic(self) -> tuple[Traffic, Traffic, Traffic]:
        """Return what the forward and the backward pass move, and what `selective` moves again. Both passes dequantize
        the quantized weights, by a kernel for the scales, and one for the weight, or for each chunk of experts. A layer
        that does not run on the meta device moves what it is estimated to keep, once forward and twice back."""
        weights, itemsize = list_quantized(self.module), self.batch.dtype.itemsize
        moved = sum(weight.nbytes + round((2 * weight.work_bytes + itemsize) * weight.numel) for weight in weights)
        dequantizing = Traffic(moved, 2 * sum(weight.num_chunks for weight in weights))
        trace = self._trace
        if trace is None or trace.backward is None:
            moved = self._estimate_saved()
            forward, backward, remade = Traffic(moved), Traffic(2 * moved), Traffic(moved)
        else:
            forward, backward = count_traffic((trace.forward, trace.backward), self.compiles)
            remade = count_remade(trace.forward, self.compiles)
        return forward + dequantizing, backward + dequantizing, remade

    def _count_widest(self) -> int:
        """Elements of a token in the widest result of a matrix; with experts, of those that it chooses."""
        rows = {name: self.module.get_parameter(name).shape[-2] for name in self._multiplied}
        return max((round(width * self._count_rows(name)) for name, width in rows.items()), default=0)

    def _count_rows(self, name: str) -> float:
        """The rows of a token that a matrix of the layer multiplies; of experts on the most loaded rank."""
        if active_share(name, self.config) == 1:
            return 1
        return count_experts(self.config)[0] * self.ranks.expert_parallel.imbalance

    def _estimate_saved(self) -> int:
        """Return the bytes of input and output of each matrix, and of two copies of hidden_states in fp32 around each
        norm. All outputs can be kept."""
        config, itemsize = self.config, self.batch.dtype.itemsize
        shapes = {name: self.module.get_parameter(name).shape[-2:] for name in self._multiplied}
        chosen = {name: count_experts(config)[0] if active_share(name, config) < 1 else 1 for name in shapes}
        matrix_bytes = sum(sum(shape) * itemsize * chosen[name] for name, shape in shapes.items())
        return self.batch.tokens * round(matrix_bytes + 4 * 4 * config.hidden_size)


def _count_lent(module: nn.Module, batch: MicroBatchShape) -> int:
    """Return the bytes that a layer makes for later ones, besides hidden states."""
    return module.count_lent(batch.rows, batch.seq_length) if isinstance(module, PipelineDecoderLayer) else 0


def mean_keys(seq_length: int, window: int | None) -> float:
    """Return the keys that a query attends to under a causal mask, on average over the sequence: (T + 1) / 2, less with
    a sliding window."""
    window = min(window or seq_length, seq_length)
    return (window * (window + 1) / 2 + (seq_length - window) * window) / seq_length


def _find_window(module: nn.Module, config: PretrainedConfig) -> int | None:
    """The sliding window of this layer's attention in tokens, or None."""
    for child in module.modules():
        if "Attention" in type(child).__name__ and hasattr(child, "sliding_window"):
            # of every attribute nn.Module says that it is a tensor or a module
            return child.sliding_window  # type: ignore[return-value]
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)


def _find_chunk(module: nn.Module, config: PretrainedConfig) -> int | None:
    """The tokens of a chunk of this layer's attention, whose queries see no earlier one, or None."""
    is_chunked = getattr(module, "attention_type", "") == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) if is_chunked else None


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
