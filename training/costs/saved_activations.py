"""The bytes that autograd keeps of a forward pass, counted on the meta device: the pass runs for real, on tensors
without storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.layers.packed_attention import FLASH
from training.pipeline.activation_checkpoint import is_kept


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of distinct storages, without the module's own parameters. saved: by autograd, when nothing is recomputed.

    kept: results of the operators that `selective` keeps. remade: of what is saved, the rest.
    """

    saved: int
    kept: int
    remade: int

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(self.saved + other.saved, self.kept + other.kept, self.remade + other.remade)


def count_saved_bytes(run: Any, module: nn.Module) -> SavedBytes:
    """Return the bytes that `run()`, a forward pass on the meta device, keeps for its backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # kept, so that no storage is freed and its address taken by another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    results = _KeptResults()
    with WithoutData(), results, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return SavedBytes(
        saved=sum(storage.nbytes() for storage in saved.values()),
        kept=sum(storage.nbytes() for storage in results.storages.values()),
        remade=sum(storage.nbytes() for address, storage in saved.items() if address not in results.storages),
    )


class _KeptResults(TorchDispatchMode):
    """The storages of the results that `selective` keeps, by address; attention keeps its output and one number a
    row."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_kept(function) or _FusedAttention.is_running:
            for tensor in tree_leaves(result):
                self.storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return result


class WithoutData(TorchFunctionMode):
    """Lets forward and backward pass run on the meta device.

    Attention keeps what the fused kernels keep (meta would choose the one that saves T x T probabilities; the package
    of flash attention may be missing on the machine that plans), and a question about values, such as "is no row
    packed?" in the masks of `transformers`, is answered with yes.
    """

    def __enter__(self) -> WithoutData:
        for name in FLASH:
            ALL_ATTENTION_FUNCTIONS[name] = _attend_flash
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in FLASH:
            del ALL_ATTENTION_FUNCTIONS[name]  # the library's own is there again

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3], (kwargs or {}).get("attn_mask"))
        if function is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return function(*args, **(kwargs or {}))


def _attend_flash(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Stands for `transformers`' `flash_attention_forward`, which pads values to the size of the queries."""
    size = value.shape[-1]
    output = _FusedAttention.apply(query, key, F.pad(value, (0, query.shape[-1] - size)), None)
    return output.transpose(1, 2)[..., :size], None


class _FusedAttention(torch.autograd.Function):
    """Saves the tensors that FlashAttention saves (2205.14135, algorithm 2): query, key, value, output, and one fp32
    number per row. A mask is saved by each layer, as the kernels take it: in the dtype of the queries
    (`convert_boolean_attn_mask` of torch's `attention.cpp`)."""

    is_running = False

    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        _FusedAttention.is_running = True
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # the kernels' own memory order
        row_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        _FusedAttention.is_running = False
        masks = [] if mask is None else [mask.to(query.dtype)]
        context.save_for_backward(query, key, value, output, row_sums, *masks)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return *(torch.empty_like(tensor) for tensor in context.saved_tensors[:3]), None
