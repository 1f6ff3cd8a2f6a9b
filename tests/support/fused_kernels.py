"""liger-kernel's kernels, played in plain torch: what `models.layers.liger` computes, without triton."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import Case, train_case
from torch.nn import functional as F


def normalize(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden_states.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden_states.dtype)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turn(tensor: torch.Tensor) -> torch.Tensor:
        first, second = tensor.chunk(2, dim=-1)
        return tensor * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    return turn(query), turn(key)


class Played:
    """A replacement for `models.layers.liger`: the same functions in plain torch, with calls counted per kernel."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.normalize = self._count("RMSNorm", normalize)
        self.multiply_gated = self._count("SwiGLU", lambda gate, up: F.silu(gate) * up)
        self.rotate = self._count("rotary", rotate)

    def _count(self, name: str, function: Callable) -> Callable:
        def run(*args: torch.Tensor) -> object:
            self.calls[name] += 1
            return function(*args)

        return run


def train_fused(case: Case) -> tuple[dict[str, Any], dict[str, int]]:
    """`train_case`, as on a GPU with liger-kernel, and how often each kernel ran."""
    from models.layers import fused_kernels
    from training import build

    kernels = Played()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fused_kernels, "_kernels", lambda on_meta: kernels)
        monkeypatch.setattr(build, "find_obstacle", lambda device: None)
        return train_case(case), dict(kernels.calls)
