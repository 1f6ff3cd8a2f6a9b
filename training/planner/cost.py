"""What one layer costs: parameters, FLOPs a token, and the bytes that a micro-batch leaves for the backward pass.

Everything is counted on the meta device: the layer's real `forward` runs there on tensors without storage, and what autograd saves
is what PyTorch would keep (`torch.autograd.graph.saved_tensors_hooks`). Nothing here names an architecture.

B micro-batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from models.adapters import Adapter
from models.layer import Layer
from models.parallel.plan import count_sums
from models.parallel.shard import TensorParallel
from models.parallel.tensor_parallel import list_shard_specs, shard_module
from training.pipeline.activation_checkpoint import is_kept
from training.pipeline.trainable import choose_trained

INPUT_BYTES = 8  # of a token on its way into the first layer: input_ids are int64
BOUNDARY_BYTES = (
    8 + 4
)  # of the integers that cross a boundary beside hidden_states: position_ids int64, segment_ids int32


@dataclass(frozen=True)
class LayerCost:
    """One layer of the pipeline, for one micro-batch shape and dtype; with tensor parallelism, what the first rank has of it.

    num_active: of the whole layer, parameters that take part in a token's computation; fewer than num_parameters where experts are chosen.
    forward_flops: of a token, two a multiply-add; causal attention as it is computed, at its mean number of keys.
    frozen_flops: those of them with matrices that are not trained, whose gradient is not computed.
    attention_width: of the whole layer, heads x (query-key size + value size), so that full attention is 2 T attention_width FLOPs a token; 0 without.
    saved_bytes: kept for the backward pass when nothing is recomputed. output_bytes: hidden_states alone.
    kept_bytes, remade_bytes: kept, and made again in the backward pass, under `activation_checkpoint_mode=selective`.
    total_parameters, total_trainable: of the whole layer.
    forward_sums, backward_sums: of hidden states, over the ranks that share the layer (`models/parallel/tensor_parallel.py`).
    is_estimated: the layer does not run on the meta device, and these bytes are an upper estimate.
    pass_seconds: of a token, forward and backward, where the layer was timed (`training/planner/profile_machine.py`).
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
    remade_bytes: int = 0
    pass_seconds: tuple[float, float] | None = None
    forward_sums: int = 0
    backward_sums: int = 0
    total_parameters: int = 0
    total_trainable: int = 0


def count_layers(
    layers: Sequence[Layer],
    config: PretrainedConfig,
    micro_batch_size: int,
    seq_length: int,
    dtype: torch.dtype,
    adapter: Adapter | None = None,
    freeze: Sequence[str] = (),
    tensor_parallel_size: int = 1,
) -> list[LayerCost]:
    """The cost of each layer. Layers of one class, one set of shapes, one kind of attention and one choice of what is trained are counted
    once. layers: as `shard_layers` makes them for `tensor_parallel_size`. adapter, freeze: as in training."""
    known: dict[Any, LayerCost] = {}
    costs = []
    parallel = TensorParallel(size=tensor_parallel_size)
    for index, layer in enumerate(layers):
        module = layer.build_on_meta().to(dtype)
        shard_module(module, layer.styles, parallel)
        choose_trained(module, index, layer, adapter, freeze, parallel)
        kind = (
            layer.module_class, layer.tied_key, layer.owns_weights, _window(module, config),
            tuple((p.shape, p.requires_grad) for p in module.parameters()),
        )  # fmt: skip
        if kind not in known:
            known[kind] = _count_layer(
                layer, module, config, micro_batch_size, seq_length, dtype, parallel.size, is_first=index == 0
            )
        costs.append(known[kind])
    return costs


def _count_layer(
    layer: Layer,
    module: nn.Module,
    config: PretrainedConfig,
    micro_batch_size: int,
    seq_length: int,
    dtype: torch.dtype,
    size: int,
    is_first: bool,
) -> LayerCost:
    """size: of the group that shares it."""
    parameters = dict(module.named_parameters())
    active = {name: parameter.numel() * _active_share(name, config) for name, parameter in parameters.items()}
    multiplied = list(_multiplied(layer, module, config))
    width, shard_specs = _attention_width(module, config), list_shard_specs(module)
    wholes = {
        name: shard_specs[name].length / parameter.shape[shard_specs[name].dim]
        for name, parameter in parameters.items()
        if name in shard_specs
    }
    forward_sums, backward_sums = count_sums(layer)
    keys = mean_keys(seq_length, _window(module, config))
    saved, is_estimated = _count_saved(layer, module, config, micro_batch_size, seq_length, dtype, is_first)
    return LayerCost(
        name=layer.module_class.__name__,
        num_parameters=sum(p.numel() for p in parameters.values()),
        num_trainable=sum(p.numel() for p in parameters.values() if p.requires_grad),
        num_active=round(sum(count * wholes.get(name, 1) for name, count in active.items())),
        largest_trainable=max((p.numel() for p in parameters.values() if p.requires_grad), default=0),
        forward_flops=2 * sum(active[name] for name in multiplied) + 2 * keys * width / size,
        frozen_flops=2 * sum(active[name] for name in multiplied if not parameters[name].requires_grad),
        attention_width=width,
        saved_bytes=saved.saved,
        kept_bytes=saved.kept,
        remade_bytes=saved.remade,
        output_bytes=micro_batch_size * seq_length * config.hidden_size * dtype.itemsize,
        tied_key=layer.tied_key,
        is_estimated=is_estimated,
        total_parameters=round(sum(p.numel() * wholes.get(name, 1) for name, p in parameters.items())),
        total_trainable=round(
            sum(p.numel() * wholes.get(name, 1) for name, p in parameters.items() if p.requires_grad)
        ),
        forward_sums=forward_sums,
        backward_sums=backward_sums,
    )


def mean_keys(seq_length: int, window: int | None) -> float:
    """Keys that a query attends to under a causal mask, on average over the sequence: (T + 1) / 2, less with a sliding window."""
    window = min(window or seq_length, seq_length)
    return (window * (window + 1) / 2 + (seq_length - window) * window) / seq_length


def _multiplied(layer: Layer, module: nn.Module, config: PretrainedConfig) -> Iterator[str]:
    """Names of the matrices that a token is multiplied with: all but a looked-up embedding. A tied head uses its token embedding."""
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(prefix, recurse=False):
            if parameter.ndim < 2:
                continue
            looked_up = isinstance(child, nn.Embedding) and layer.owns_weights
            if not looked_up:
                yield name


def _active_share(name: str, config: PretrainedConfig) -> float:
    """The share of a parameter that a token uses: routed experts are chosen, k of n; all else is used whole."""
    if "experts." not in name or "shared_expert" in name:
        return 1.0
    counts = (getattr(config, key, None) for key in ("n_routed_experts", "num_experts", "num_local_experts"))
    num_experts = next((count for count in counts if count), None)
    return config.num_experts_per_tok / num_experts if num_experts else 1.0


def _attention_width(module: nn.Module, config: PretrainedConfig) -> int:
    """Heads x (query-key size + value size); 0 for a layer without attention. `transformers` names the class so in every model."""
    if not any("Attention" in type(child).__name__ for child in module.modules()):
        return 0
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    query_size = getattr(config, "qk_head_dim", None) or head_size  # multi-head latent attention has sizes of its own
    value_size = getattr(config, "v_head_dim", None) or head_size
    return heads * (query_size + value_size)


def _window(module: nn.Module, config: PretrainedConfig) -> int | None:
    """The sliding window of this layer's attention in tokens, or None."""
    for child in module.modules():
        if "Attention" in type(child).__name__ and hasattr(child, "sliding_window"):
            return child.sliding_window  # type: ignore[return-value]  # of every attribute nn.Module says that it is a tensor or a module
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)


def _count_saved(
    layer: Layer,
    module: nn.Module,
    config: PretrainedConfig,
    micro_batch_size: int,
    seq_length: int,
    dtype: torch.dtype,
    is_first: bool,
) -> tuple[SavedBytes, bool]:
    """(what autograd keeps, whether it is only estimated)."""
    position_ids = torch.zeros(micro_batch_size, seq_length, dtype=torch.long, device="meta")
    hidden_states = torch.empty(
        micro_batch_size, seq_length, config.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    inputs = (position_ids if is_first else hidden_states, position_ids, position_ids.to(torch.int32))
    try:
        return count_saved_bytes(
            lambda: layer.forward_fn(module, inputs) if layer.forward_fn else module(inputs), module
        ), False
    except (RuntimeError, NotImplementedError):  # a choice that depends on data, such as routing to experts
        return _estimate_saved(layer, module, config, dtype.itemsize, micro_batch_size * seq_length), True


def _estimate_saved(
    layer: Layer, module: nn.Module, config: PretrainedConfig, itemsize: int, tokens: int
) -> SavedBytes:
    """Input and output of each matrix, and two copies of hidden_states in fp32 around each norm; all outputs can be kept."""
    names = list(_multiplied(layer, module, config))
    shapes = {name: parameter.shape[-2:] for name, parameter in module.named_parameters() if name in names}
    chosen = {name: config.num_experts_per_tok if _active_share(name, config) < 1 else 1 for name in shapes}
    both = tokens * round(
        sum(sum(shape) * itemsize * chosen[name] for name, shape in shapes.items()) + 4 * 4 * config.hidden_size
    )
    return SavedBytes(both, kept=both, remade=both)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of distinct storages, without the module's own parameters. saved: by autograd, when nothing is recomputed.

    kept: results of the operators that `selective` keeps. remade: of what is saved, the rest.
    """

    saved: int
    kept: int
    remade: int


def count_saved_bytes(run: Any, module: nn.Module) -> SavedBytes:
    """What the backward pass of `run()`, a forward pass on the meta device, will need."""
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # kept, so that no storage is freed and its address taken by another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    results = _KeptResults()
    with _WithoutData(), results, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return SavedBytes(
        saved=sum(storage.nbytes() for storage in saved.values()),
        kept=sum(storage.nbytes() for storage in results.storages.values()),
        remade=sum(storage.nbytes() for address, storage in saved.items() if address not in results.storages),
    )


class _KeptResults(TorchDispatchMode):
    """The storages of the results that `selective` keeps, by address; attention keeps its output and one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_kept(function) or _FusedAttention.is_running:
            for tensor in tree_leaves(result):
                self.storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return result


class _WithoutData(TorchFunctionMode):
    """Lets a forward pass run on the meta device.

    Attention keeps what the fused kernels keep (meta would choose the one that saves T x T probabilities), and a question about
    values, such as "is no row packed?" in the masks of `transformers`, is answered with yes.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])
        if function is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return function(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    """What FlashAttention saves (2205.14135, algorithm 2): query, key, value, output, and one fp32 number a row."""

    is_running = False

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        _FusedAttention.is_running = True
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # the kernels' own memory order
        row_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        _FusedAttention.is_running = False
        context.save_for_backward(query, key, value, output, row_sums)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("only the forward pass is counted")
