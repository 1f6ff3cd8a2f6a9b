"""A parameter too large for one call of bitsandbytes' kernels: every call stays below 2^31 elements, and several calls
give the bits of one."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from support.configs import build_config

from training.optim.optimizer import build_optimizer, declare_state
from training.optim.state_kinds import BLOCK_SIZE, check_state

functional = pytest.importorskip("bitsandbytes.functional")
from bitsandbytes import optim  # noqa: E402

from training.optim import adamw_8bit  # noqa: E402

CONFIG = build_config("optimizer=adamw_8bit")
LIMIT = 1024


def build_group(weights: torch.Tensor) -> list[dict[str, Any]]:
    return [{"params": [weights], "lr": 1e-2, "weight_decay": 0.1}]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each call of the update, which is not run."""
    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(functional, "optimizer_update_8bit_blockwise", lambda *args, **_: recorded.append(args))
    return recorded


def step_on_meta(num_elements: int) -> None:
    weights = torch.nn.Parameter(torch.empty(num_elements, device="meta"))
    weights.grad = torch.empty_like(weights)
    build_optimizer(build_group(weights), CONFIG).step()


@pytest.mark.parametrize("num_elements", [2**31, 4_400_000_100, 8_000_000_000])
def test_every_call_has_a_number_of_elements_that_32_bits_hold(calls: list, num_elements: int) -> None:
    step_on_meta(num_elements)
    sizes = [gradient.numel() for _, gradient, *_ in calls]
    starts = [0, *accumulate(sizes)]
    assert max(sizes) < 2**31 and starts.pop() == num_elements
    for start, size, (_, gradient, weights, state1, state2, *numbers) in zip(starts, sizes, calls, strict=True):
        assert start % BLOCK_SIZE == 0
        for tensor in (gradient, weights, state1, state2):
            assert (tensor.storage_offset(), tensor.numel()) == (start, size)
        for scales in numbers[-3:-1]:
            assert (scales.storage_offset(), scales.numel()) == (start // BLOCK_SIZE, -(-size // BLOCK_SIZE))
        assert numbers[5] == 1  # the step, the same in each call


def test_a_small_limit_makes_several_calls(calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_8bit, "MAX_ELEMENTS", LIMIT)
    step_on_meta(2 * LIMIT + 100)
    step_on_meta(LIMIT)
    assert [gradient.numel() for _, gradient, *_ in calls] == [LIMIT, LIMIT, 100, LIMIT]


def run(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, dict[str, Any]]:
    """Three steps on random gradients; the weights and what is kept for them."""
    (weights,) = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        weights.grad = torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
        optimizer.step()
    assert list(optimizer.state) == [weights]
    return weights.detach(), optimizer.state[weights]


@pytest.mark.parametrize("shape", [(4 * LIMIT,), (3 * LIMIT + 300,), (LIMIT + 1,), (40, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_calls_give_the_bits_of_one(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    group = build_group(torch.nn.Parameter(start.clone()))
    betas, eps = tuple(CONFIG.optimizer.betas), CONFIG.optimizer.eps
    expected, whole = run(optim.AdamW8bit(group, betas=betas, eps=eps, min_8bit_size=0))

    monkeypatch.setattr(adamw_8bit, "MAX_ELEMENTS", LIMIT)
    num_calls, update = [], functional.optimizer_update_8bit_blockwise
    monkeypatch.setattr(
        functional,
        "optimizer_update_8bit_blockwise",
        lambda *args, **named: (num_calls.append(1), update(*args, **named)),
    )
    found, state = run(build_optimizer(build_group(torch.nn.Parameter(start.clone())), CONFIG))
    assert len(num_calls) == 3 * -(-start.numel() // LIMIT)
    assert torch.equal(found, expected) and not torch.equal(found, start)
    check_state(found, state, declare_state(CONFIG))  # what a checkpoint reads
    assert state["step"] == whole["step"] == 3
    for name in ("state1", "state2", "absmax1", "absmax2"):
        assert torch.equal(state[name], whole[name]) and state[name].any(), name
