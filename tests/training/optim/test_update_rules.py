"""The updates of the project's own optimizers, in several chunks, against torch's and bitsandbytes'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from training.config.validate import MAX_BF16_BETA
from training.optim import chunks
from training.optim.lion import Lion
from training.optim.rounded_adamw import RoundedAdamW

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def run(build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> tuple[torch.Tensor, dict]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = build([weights])
    for _ in range(5):
        weights.grad = torch.randn(1000, generator=generator)
        optimizer.step()
    return weights.detach(), optimizer.state[weights]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 300)


def round_state(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """After a step of torch's AdamW: its averages as bf16 holds them."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


def test_averages_in_bf16_are_those_of_torch_rounded_after_each_step() -> None:
    def build(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(weights, LR, BETAS, EPS, DECAY, foreach=False)
        optimizer.register_step_post_hook(round_state)
        return optimizer

    found, state = run(lambda weights: RoundedAdamW(weights, LR, BETAS, EPS, DECAY))
    expected, reference = run(build)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].dtype is torch.bfloat16
        assert (
            state[name].float() == reference[name]
        ).float().mean() > 0.99  # the last bit of fp32 may round either way
    exact, _ = run(lambda weights: torch.optim.AdamW(weights, LR, BETAS, EPS, DECAY))
    assert (found - exact).abs().max() > 1e-4  # bf16 does something


def test_lion_is_that_of_bitsandbytes() -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    found, state = run(lambda weights: Lion(weights, LR, BETAS, DECAY))
    expected, reference = run(lambda weights: optim.Lion32bit(weights, LR, BETAS, DECAY))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state["exp_avg"], reference["state1"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("beta", "gets_stuck"), [(MAX_BF16_BETA, False), (0.9985, True)])
def test_up_to_a_beta_no_average_in_bf16_gets_stuck(beta: float, gets_stuck: bool) -> None:
    """With gradients that are 0 from now on, the average of squares decays from each value of bf16's mantissa."""
    weights = torch.nn.Parameter(torch.zeros(128))
    optimizer = RoundedAdamW([weights], LR, BETAS, EPS)
    weights.grad = torch.zeros(128)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (beta, beta)
    before = 1 + torch.arange(128) / 128
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weights][name].copy_(before)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert (optimizer.state[weights][name].float() < before).all() != gets_stuck
