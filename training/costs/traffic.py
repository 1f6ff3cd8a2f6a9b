"""The cost of a layer's passes besides matrix products: bytes moved through the GPU's memory, and kernels launched.

Counted on the meta device, operator by operator, as the real passes run. A product is bound by its FLOPs; all else
(norms, rotary positions, activation functions, residuals, the scores of eager attention) reads its arguments from
memory and writes its results there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
SENDING = "exchange_rows"  # `models.experts.exchange`; timed by what it sends
# Allocations, and names of tensors that exist
WITHOUT_KERNEL = ("empty", "detach", "alias", "lift_fresh", "_unsafe_view")


@dataclass(frozen=True)
class Traffic:
    """One pass of a layer over a micro-batch. moved: bytes read and written by operators that are not products.
    kernels: launched. products: (rows, depth, columns) of each product of two matrices."""

    moved: int = 0
    kernels: int = 0
    products: tuple[tuple[int, int, int], ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.kernels + other.kernels, self.products + other.products)


NO_TRAFFIC = Traffic()


class TrafficCounter(TorchDispatchMode):
    """Counts the operators that run under it.

    fuses: neighbours that are not products count as one kernel, as a compiler or a library of fused kernels makes
    them: what only they make and take stays in registers. Where a backward pass takes it, it is made again from what
    the forward pass made it of, in 16 bits.
    """

    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self._fuses, self._moved, self._kernels = fuses, 0, 0
        self._products: list[tuple[int, int, int]] = []
        self._follows_product = True
        self._kept: list[torch.UntypedStorage] = []  # so that no address is taken by another
        self._loaded: set[int] = set()
        self._unwritten: dict[int, int] = {}  # results that are in registers -> bytes
        self._remade: set[int] = set()  # those of earlier passes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or any(word in name for word in WITHOUT_KERNEL):
            return result
        taken, made = list(_list_tensors((args, kwargs))), list(_list_tensors(result))
        self._kept += [tensor.untyped_storage() for tensor in (*taken, *made)]
        if name in PRODUCTS or name == SENDING:
            self._count_product(taken, made, is_attention="bmm" in name)
            if name in ("mm", "addmm"):
                left, right = args[-2:]
                self._products.append((*left.shape, right.shape[1]))
        elif self._fuses:
            self._count_fused(taken, made)
        else:
            self._kernels += 1
            self._moved += sum(map(_count_bytes, (*taken, *made)))
        return result

    def finish(self) -> Traffic:
        """Return what was counted since the last call. The pass's result is written, if no product made it."""
        result = [] if self._follows_product else list(self._unwritten.values())[-1:]
        found = Traffic(self._moved + sum(result), self._kernels, tuple(self._products))
        self._moved = self._kernels = 0
        self._products.clear()
        self._follows_product = True
        self._remade |= self._unwritten.keys()
        self._unwritten.clear()
        self._loaded.clear()
        return found

    def _count_product(self, taken: list[torch.Tensor], made: list[torch.Tensor], *, is_attention: bool) -> None:
        """Arguments that were in registers are written for it. Scores are as large as the product is deep, so that
        memory bounds them, too."""
        self._kernels += 1
        self._follows_product = True
        self._loaded.clear()  # the next kernel reads again
        self._moved += sum(self._unwritten.pop(tensor.untyped_storage()._cdata, 0) for tensor in taken)
        if is_attention:
            self._moved += sum(map(_count_bytes, (*taken, *made)))

    def _count_fused(self, taken: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        self._kernels += self._follows_product
        self._follows_product = False
        for tensor in taken:
            address = tensor.untyped_storage()._cdata
            if address not in self._unwritten and address not in self._loaded:
                nbytes = _count_bytes(tensor)
                self._moved += min(nbytes, 2 * tensor.numel()) if address in self._remade else nbytes
                self._loaded.add(address)
        self._unwritten.update({tensor.untyped_storage()._cdata: _count_bytes(tensor) for tensor in made})


def _list_tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _count_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor takes in memory; what is expanded is there once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
