"""The cost of a layer's passes besides the FLOPs of products: bytes moved through the GPU's memory, and kernels.

A product is bound by its FLOPs; all else (norms, rotary positions, activation functions, residuals, the scores of eager
attention) reads its arguments from memory and writes its results there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from training.costs.trace import Operator

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
SENDING = "exchange_rows"  # `models.experts.exchange`; timed by what it sends


@dataclass(frozen=True)
class Traffic:
    """One pass of a layer over a micro-batch."""

    moved: int = 0  # bytes read and written by operators that are not products
    kernels: int = 0  # launched, products included
    products: tuple[tuple[int, int, int], ...] = ()  # (rows, depth, columns) of each product of two matrices

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.kernels + other.kernels, self.products + other.products)


NO_TRAFFIC = Traffic()


def count_traffic(passes: Iterable[Sequence[Operator]], fuses: bool) -> list[Traffic]:
    """Return the traffic of passes that follow each other, such as forward and backward.

    fuses: neighbours that are not products count as one kernel, as a compiler makes them: what only they make and take
    stays in registers. If a later pass takes it, it is made again from what the earlier pass made it of, in 16 bits.
    """
    remade: set[int] = set()  # storages that were in registers at the end of an earlier pass
    found = []
    for operators in passes:
        launched = [operator for operator in operators if operator.launches]
        moved, kernels = _fuse(launched, remade) if fuses else (sum(map(_sum_bytes, launched)), len(launched))
        products = (operator.taken[-2:] for operator in launched if operator.name in ("mm", "addmm"))
        shapes = tuple((*left.shape, right.shape[1]) for left, right in products)
        found.append(Traffic(moved, kernels, shapes))  # type: ignore[arg-type]  # of two matrices
    return found


def count_remade(forward: Sequence[Operator], fuses: bool) -> Traffic:
    """Return the traffic of the operators of a forward pass that `activation_checkpoint_mode=selective` runs again in
    the backward pass: all whose results it does not keep. fuses: as of `count_traffic`; one that is kept stands between
    its neighbours like a product."""
    runs = (list(run) for is_kept, run in groupby(forward, lambda operator: operator.is_kept) if not is_kept)
    return sum(count_traffic(runs, fuses), start=NO_TRAFFIC)


def _fuse(launched: Sequence[Operator], remade: set[int]) -> tuple[int, int]:
    """Return the bytes that a pass moves, and its kernels, where neighbours that are not products are one kernel.
    remade: gets the storages of what is in registers at the end."""
    moved = kernels = 0
    follows_product = True
    loaded: set[int] = set()  # storages that the running kernel has read
    unwritten: dict[int, int] = {}  # bytes of results that are in registers, by storage
    for operator in launched:
        if _is_product(operator):  # for which arguments that were in registers are written
            kernels, follows_product = kernels + 1, True
            moved += _sum_bytes(operator) + sum(unwritten.pop(operand.storage, 0) for operand in operator.taken)
            loaded.clear()  # the next kernel reads again
            continue
        kernels, follows_product = kernels + follows_product, False
        for operand in operator.taken:
            if operand.storage not in unwritten and operand.storage not in loaded:
                is_remade = operand.storage in remade
                moved += min(operand.nbytes, 2 * prod(operand.shape)) if is_remade else operand.nbytes
                loaded.add(operand.storage)
        unwritten.update({operand.storage: operand.nbytes for operand in operator.made})
    if not follows_product:  # the pass's result is written
        moved += sum(list(unwritten.values())[-1:])
    remade.update(unwritten)
    return moved, kernels


def _is_product(operator: Operator) -> bool:
    return operator.name in (*PRODUCTS, SENDING)


def _sum_bytes(operator: Operator) -> int:
    """Bytes that an operator reads and writes as a kernel of its own. Those of a product do not count, but where scores
    are made or taken, which are as large as the product is deep, so that memory bounds it too."""
    if _is_product(operator) and "bmm" not in operator.name:
        return 0
    return sum(operand.nbytes for operand in (*operator.taken, *operator.made))
