"""Counts the operators that run, in either pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperators(TorchDispatchMode):
    """calls: how often each operator of torch has run within the context, by its name, such as "addmm"."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
