"""Gradients of weights that are put off: the same numbers, later; and what cannot be put off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, LlamaConfig, MixtralConfig, PretrainedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from models.experts.grouped import GROUPED
from models.layers.decoder import Embedding
from models.parallel.sequence import BlockInput, ColumnParallelLinear
from models.parallel.shard import TensorParallel
from training.pipeline.weight_gradients import DeferredGradients, add_rows, compute_gradients, split_projections


class Layer(nn.Module):
    def __init__(self, conv: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.first = Conv1D(10, 6) if conv else nn.Linear(6, 10, bias=bias)
        self.second = Conv1D(6, 10) if conv else nn.Linear(10, 6, bias=bias)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.second(torch.tanh(self.first(self.norm(x))))


def gradients(layer: Layer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.grad is not None}


def run_twice(layer: Layer, deferred: DeferredGradients | None, recomputes: bool) -> tuple[torch.Tensor, list[str]]:
    """Two micro-batches, their second halves in the order of the first; the input's gradients, and the parameters
    without a gradient in between."""
    torch.manual_seed(1)
    inputs = [torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    put_off = []
    for x in inputs:
        y = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        if deferred is None:
            y.square().sum().backward()
            continue
        with deferred.defer() as products:
            y.square().sum().backward()
        put_off.append(products)
    missing = [name for name, parameter in layer.named_parameters() if parameter.grad is None]
    arrived: list[nn.Parameter] = []
    for products in put_off:
        compute_gradients(products, arrived.append)
        assert not products
    waiting = [id(dict(layer.named_parameters())[name]) for name in missing]
    assert Counter(map(id, arrived)) == dict.fromkeys(waiting, len(put_off))  # once a pass
    return torch.stack([x.grad for x in inputs]), missing


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
def test_they_are_those_of_autograd(conv: bool, bias: bool, recomputes: bool) -> None:
    plain, split = (Layer(conv, bias).double() for _ in range(2))
    deferred = DeferredGradients()
    can, matrices = split_projections(split, deferred)
    assert can == matrices == 2 * 6 * 10
    expected, _ = run_twice(plain, None, recomputes)
    found, missing = run_twice(split, deferred, recomputes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert gradients(split).keys() == gradients(plain).keys()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], gradient, rtol=1e-12, atol=1e-14)
    assert missing == [name for name, _ in plain.named_parameters() if "norm" not in name]
    assert split.runs == plain.runs == (4 if recomputes else 2)  # the second half runs no layer again


def test_outside_of_defer_nothing_is_put_off() -> None:
    plain, split = (Layer().double() for _ in range(2))
    split_projections(split, DeferredGradients())
    run_twice(plain, None, recomputes=False)
    run_twice(split, None, recomputes=False)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], gradient, rtol=1e-12, atol=1e-14)


class Mixture(nn.Module):
    """Stacked experts of `transformers`; a fixed router sends no token to the last one."""

    def __init__(self, experts: Any, config: PretrainedConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        config._experts_implementation = GROUPED
        self.experts = experts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        chosen = torch.tensor([[0, 1], [2, 1], [1, 0]]).repeat(5, 1)
        weights = torch.linspace(0.1, 0.9, chosen.numel(), dtype=x.dtype).view_as(chosen)
        return x + self.experts(x.flatten(0, 1), chosen, weights).view_as(x)


SIZES = {"hidden_size": 6, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("experts", "config"),
    [(MixtralExperts, MixtralConfig(**SIZES)), (GptOssExperts, GptOssConfig(**SIZES))],
    ids=["mixtral", "gpt_oss, transposed, with biases"],
)
def test_those_of_stacked_experts(experts: Any, config: PretrainedConfig, recomputes: bool) -> None:
    plain, split = (Mixture(experts, config).double() for _ in range(2))
    deferred = DeferredGradients()
    can, _ = split_projections(split, deferred)
    stacks = [name for name, parameter in plain.named_parameters() if parameter.ndim == 3]
    assert can == sum(plain.get_parameter(name).numel() for name in stacks) > 0
    expected, _ = run_twice(plain, None, recomputes)
    found, missing = run_twice(split, deferred, recomputes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert missing == stacks  # biases have their gradients at once
    assert gradients(split).keys() == gradients(plain).keys()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], gradient, rtol=1e-12, atol=1e-14)
    assert not gradients(split)[stacks[0]][3].any() and gradients(split)[stacks[0]][:3].flatten(1).any(dim=1).all()
    assert split.runs == plain.runs


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_is_frozen_or_does_more_than_a_product_is_left_alone() -> None:
    layer = Layer()
    layer.first.weight.requires_grad_(False)
    layer.second = Doubled(10, 6)
    can, matrices = split_projections(layer, DeferredGradients())
    assert (can, matrices) == (0, 60)
    assert "forward" not in vars(layer.first) and "forward" not in vars(layer.second)


# Whole backward passes, whose gradients are added to sums


def add_in_passes(layer: nn.Module, inputs: Sequence[torch.Tensor], deferred: DeferredGradients) -> dict[str, Any]:
    """Return the sum of each parameter's gradients over backward passes, in fp32, and how often a hook saw each: those
    that are lent, and what autograd adds."""
    sums = {parameter: torch.zeros(parameter.shape) for parameter in layer.parameters()}
    seen = Counter[str]()
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    for x in inputs:
        with deferred.defer(False, sums.get) as products:
            layer(x).float().square().sum().backward()
        assert not products
        for parameter, total in sums.items():
            if parameter.grad is not None:
                total += parameter.grad
                parameter.grad = None
    return {name: (sums[parameter], seen[name]) for name, parameter in layer.named_parameters()}


class Twice(nn.Module):
    """One projection in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(torch.tanh(self.first(self.norm(x))))


@pytest.mark.parametrize("build", [Layer, Twice, lambda: Layer(conv=True)])
def test_products_are_added_to_lent_sums(build: Callable[[], nn.Module]) -> None:
    """As autograd's are; the hook of a parameter fires once in a pass, after all that it is used for."""
    torch.manual_seed(1)
    inputs = [torch.randn(3, 5, 6).bfloat16() for _ in range(2)]
    plain, added = (build().bfloat16() for _ in range(2))
    deferred = DeferredGradients()
    split_projections(added, deferred)
    expected, found = (add_in_passes(layer, inputs, deferred) for layer in (plain, added))
    for name, (total, _) in expected.items():
        torch.testing.assert_close(found[name], (total, 2), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_weight_has_arrived_with_the_last_of_its_products(recomputes: bool) -> None:
    """As mixers run, once per batch of documents: what has arrived is reduced, and must not change any more."""
    plain, split, deferred = Twice().double(), Twice().double(), DeferredGradients()
    split_projections(split, deferred)
    run_twice(plain, None, recomputes)
    assert run_twice(split, deferred, recomputes)[1] == ["first.weight", "first.bias"]
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(split)[name], gradient, rtol=1e-12, atol=0)


def test_a_projection_that_keeps_a_part_of_its_input_is_split_for_a_schedule_alone() -> None:
    """With sequence parallelism: split, it keeps what is gathered."""
    for defers in (False, True):
        layer, deferred = nn.Sequential(ColumnParallelLinear(6, 4), ColumnParallelLinear(6, 4)), DeferredGradients()
        layer[0].entry = BlockInput(TensorParallel(rank=0, size=2, splits_sequence=True))
        split_projections(layer, deferred, defers=defers)
        assert ["forward" in vars(part) for part in layer] == [defers, True]


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_are_added_to_lent_sums(padding: int | None) -> None:
    """A token that stands in many places: its gradients are summed in fp32, where autograd sums them in bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=7, hidden_size=6, num_attention_heads=1, pad_token_id=padding)
    embedding, deferred = Embedding(config).bfloat16(), DeferredGradients()
    input_ids = torch.randint(7, (4, 200))
    factors = torch.randn(4, 200, 6).bfloat16()

    def run(is_exact: bool) -> torch.Tensor:
        rows = embedding((input_ids, None, None))[0]
        rows = rows.double() if is_exact else rows
        (rows * factors).sum().backward()
        gradient, embedding.weight.grad = embedding.weight.grad, None
        return gradient

    exact = torch.zeros(7, 6, dtype=torch.float64).index_put_((input_ids,), factors.double(), accumulate=True)
    if padding is not None:
        exact[padding] = 0
    by_autograd = run(False)
    add_rows(embedding, deferred)
    assert torch.equal(run(False), by_autograd)
    total = torch.ones(7, 6)
    with deferred.defer(False, {embedding.weight: total}.get):
        assert run(False) is None
    torch.testing.assert_close(total.double() - 1, exact, rtol=1e-5, atol=1e-5)
    assert (by_autograd - exact).abs().max() > 100 * (total - 1 - exact).abs().max()


def test_an_embedding_that_does_more_than_look_rows_up_is_left_alone() -> None:
    config = LlamaConfig(vocab_size=7, hidden_size=6, num_attention_heads=1)
    frozen, limited = Embedding(config), Embedding(config)
    frozen.weight.requires_grad_(False)
    limited.max_norm = 1.0
    for layer in (frozen, limited, nn.Embedding(7, 6), Layer()):
        add_rows(layer, DeferredGradients())
        assert "lookup" not in vars(layer)
