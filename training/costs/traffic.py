"""The cost of a layer's passes besides the FLOPs of products: bytes moved through the GPU's memory, and kernels.

A product is bound by its FLOPs; all else (norms, rotary positions, activation functions, residuals, the scores of eager
attention) reads its arguments from memory and writes its results there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from training.costs.trace import Operand, Operator

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

    fuses: neighbours that are not products count as one kernel, as a compiler or a library of fused kernels makes them:
    what only they make and take stays in registers. If a later pass takes it, it is made again from what the earlier
    pass made it of, in 16 bits.
    """
    counter = _FusedCounter() if fuses else _Counter()
    return [counter.count(operators) for operators in passes]


def count_remade(forward: Sequence[Operator], fuses: bool) -> Traffic:
    """Return the traffic of the operators of a forward pass that `activation_checkpoint_mode=selective` runs again in
    the backward pass: all whose results it does not keep. fuses: as of `count_traffic`; one that is kept stands between
    its neighbours like a product."""
    runs = (list(run) for is_kept, run in groupby(forward, lambda operator: operator.is_kept) if not is_kept)
    return sum(count_traffic(runs, fuses), start=NO_TRAFFIC)


class _Counter:
    """Counts each operator as a kernel that reads its arguments and writes its results."""

    def __init__(self) -> None:
        self.moved = self.kernels = 0

    def count(self, operators: Sequence[Operator]) -> Traffic:
        self.moved = self.kernels = 0
        launched = [operator for operator in operators if operator.launches]
        for operator in launched:
            if operator.name in PRODUCTS or operator.name == SENDING:
                self.count_product(operator)
            else:
                self.count_other(operator)
        self.finish()
        products = (operator.taken[-2:] for operator in launched if operator.name in ("mm", "addmm"))
        shapes = tuple((*left.shape, right.shape[1]) for left, right in products)
        return Traffic(self.moved, self.kernels, shapes)  # type: ignore[arg-type]  # of two matrices

    def count_product(self, operator: Operator) -> None:
        """Count a product. Scores are as large as the product is deep, so that memory bounds them, too."""
        self.kernels += 1
        if "bmm" in operator.name:
            self.moved += _sum_bytes(operator)

    def count_other(self, operator: Operator) -> None:
        self.kernels += 1
        self.moved += _sum_bytes(operator)

    def finish(self) -> None:
        """Count what is left at the end of a pass."""


class _FusedCounter(_Counter):
    """Counts neighbours that are not products as one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._follows_product = True
        self._loaded: set[int] = set()  # storages that the running kernel has read
        self._unwritten: dict[int, int] = {}  # bytes of results that are in registers, by storage
        self._remade: set[int] = set()  # those of earlier passes

    def count_product(self, operator: Operator) -> None:
        """Count a product, for which arguments that were in registers are written."""
        super().count_product(operator)
        self._follows_product = True
        self._loaded.clear()  # the next kernel reads again
        self.moved += sum(self._unwritten.pop(operand.storage, 0) for operand in operator.taken)

    def count_other(self, operator: Operator) -> None:
        self.kernels += self._follows_product
        self._follows_product = False
        for operand in operator.taken:
            if operand.storage not in self._unwritten and operand.storage not in self._loaded:
                self.moved += self._count_read(operand)
                self._loaded.add(operand.storage)
        self._unwritten.update({operand.storage: operand.nbytes for operand in operator.made})

    def finish(self) -> None:
        """Count the pass's result, which is written unless a product made it."""
        if not self._follows_product:
            self.moved += sum(list(self._unwritten.values())[-1:])
        self._follows_product = True
        self._remade |= self._unwritten.keys()
        self._unwritten.clear()
        self._loaded.clear()

    def _count_read(self, operand: Operand) -> int:
        return min(operand.nbytes, 2 * operand.numel) if operand.storage in self._remade else operand.nbytes


def _sum_bytes(operator: Operator) -> int:
    return sum(operand.nbytes for operand in (*operator.taken, *operator.made))
