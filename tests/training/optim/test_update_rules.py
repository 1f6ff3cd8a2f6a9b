"""The updates of the project's own optimizers, in several chunks, against torch's and bitsandbytes'."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.config.validate import MAX_BF16_BETA
from training.optim import chunks
from training.optim.adamw import AdamW
from training.optim.lion import Lion

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def run(build: Build) -> tuple[torch.Tensor, dict]:
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

    found, state = run(lambda weights: AdamW(weights, LR, BETAS, EPS, DECAY, torch.bfloat16))
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
    optimizer = AdamW([weights], LR, BETAS, EPS, averages=torch.bfloat16)
    weights.grad = torch.zeros(128)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (beta, beta)
    before = 1 + torch.arange(128) / 128
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weights][name].copy_(before)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert (optimizer.state[weights][name].float() < before).all() != gets_stuck


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, each argument and each result once."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket.__name__ not in ("empty_like", "detach"):
            leaves = tree_leaves((args, kwargs, result))
            self.nbytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
        return result


def step(build: Build, steps: int = 3, elements: int = 3000) -> tuple[torch.Tensor, dict]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(elements, generator=generator))
    optimizer = build([weights])
    for number in range(steps):
        weights.grad = torch.randn(elements, generator=generator)
        optimizer.param_groups[0]["lr"] = LR / (number + 1)  # a compiled update is not made again
        optimizer.step()
    return weights.detach(), optimizer.state[weights]


OWN = {
    "adamw": lambda compiles: lambda weights: AdamW(weights, LR, BETAS, EPS, DECAY, compiles=compiles),
    "lion": lambda compiles: lambda weights: Lion(weights, LR, BETAS, DECAY, compiles=compiles),
    "bf16-adamw": lambda compiles: lambda weights: AdamW(weights, LR, BETAS, EPS, DECAY, torch.bfloat16, compiles),
}


@pytest.mark.parametrize(("name", "moved"), [("lion", 52), ("bf16-adamw", 112)])
def test_operators_move_each_tensor_many_times(name: str, moved: int) -> None:
    """docs/performance.md has these bytes of a parameter, for an update that is not compiled."""
    weights = torch.nn.Parameter(torch.ones(3000))
    optimizer = OWN[name](False)([weights])
    for _ in range(2):  # the first step makes the state
        weights.grad = torch.ones(3000)
        with Moved() as found:
            optimizer.step()
    assert found.nbytes / weights.numel() == moved


@pytest.mark.full
@pytest.mark.parametrize("name", list(OWN))
def test_a_compiled_update_is_one_kernel_and_the_same_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of a pointwise formula reads its inputs once and writes its results once. Chunks of two sizes, and a
    learning rate that changes, share it."""
    from torch._inductor import metrics  # takes seconds

    monkeypatch.setattr(chunks, "CHUNK_SIZE", 2048)
    torch._dynamo.reset()
    metrics.reset()
    found, state = step(OWN[name](True))
    assert metrics.generated_kernel_count == 1
    by_torch = {"adamw": lambda weights: torch.optim.AdamW(weights, LR, BETAS, EPS, DECAY, fused=True)}
    expected, reference = step(by_torch.get(name, OWN[name](False)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert state.keys() == reference.keys()
    for each, tensor in reference.items():
        if isinstance(tensor, torch.Tensor):
            # The last bit of fp32 may round either way, and with it that of bf16
            close = {"rtol": 2**-7, "atol": 0} if tensor.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(state[each], tensor, **close)


def test_tiny_tensors_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """So checking an optimizer before a run, and planning one, compiles nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    step(OWN["lion"](True), elements=8)
    with pytest.raises(AssertionError):
        step(OWN["lion"](True))


@pytest.mark.full
@pytest.mark.parametrize(("name", "moved"), [("adamw", 30), ("lion", 22), ("bf16-adamw", 22)])
@pytest.mark.parametrize("is_half", [False, True])
def test_a_pass_that_clips_and_rounds_moves_each_tensor_once(name: str, moved: int, is_half: bool) -> None:
    """The bytes of a parameter, as `count_bytes_at_once` plans them: the generated code loads each tensor once, and
    stores each once. The weights and the state are those of a gradient that was multiplied before."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    start, dtype = torch.randn(4096, generator=generator), torch.float16 if is_half else torch.float32
    gradients = [torch.randn(4096, generator=generator).to(dtype) for _ in range(2)]
    copies = [torch.empty(4096, dtype=torch.bfloat16) for _ in range(2)]
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [OWN[name](compiles)([each]) for compiles, each in zip((True, False), weights)]

    def update(number: int) -> None:
        for gradient in gradients:
            group = optimizers[number].param_groups[0]
            optimizers[number].update(group, weights[number], gradient, 0.3, copies[number])

    _, codes = run_and_get_code(update, 0)
    update(1)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)
    assert torch.equal(copies[0], weights[0].detach().bfloat16())
    (code,) = codes
    body = code.partition("C10_LIKELY")[2].partition("C10_UNLIKELY")[0]
    nbytes = {pointer: 4 if kind == "float" else 2 for kind, pointer in re.findall(r"([\w:]+)\*\s+(\w+_ptr\d+)", code)}
    moves = [set(re.findall(rf"{move}\((\w+_ptr\d+) \+", body)) for move in ("loadu", "store")]
    found = sum(nbytes[pointer] for pointers in moves for pointer in pointers)
    assert found == moved - 2 * is_half
