"""The losses of preference optimization against their formulas on whole logits, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma2Config, LlamaConfig

from benchmarks.allocation import AllocationPeak
from data.collator import shift_labels
from models.losses.dpo import METRICS, DPOLoss, RowScore
from models.losses.options import DPOLossType
from tests.support.logit_pieces import cut_pieces

R, T, D, V = 6, 12, 16, 40  # rows: three pairs; sequence, hidden, vocabulary
BETA = 0.7
CONFIG, CAPPED = LlamaConfig(), Gemma2Config(final_logit_softcapping=3.0)


@pytest.fixture
def batch() -> tuple[torch.Tensor, ...]:
    """hidden_states [R, T, D], head weight [V, D], target tokens [R, T], 1 to T - 1 of them a row, the reference's
    log-probabilities [R].
    """
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(R, T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (R, T), generator=generator)
    for row, num_targets in enumerate([1, 4, 11, 2, 7, 3]):
        labels[row, : T - num_targets] = -100
    return hidden_states, weight, shift_labels(labels), -30 * torch.rand(R, generator=generator, dtype=torch.float64)


def compute_sums(
    hidden_states: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, cap: float | None = None
) -> torch.Tensor:
    logits = hidden_states @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    token_losses = F.cross_entropy(logits.transpose(1, 2), target_ids, reduction="none")  # 0 where ignored
    return -token_losses.sum(dim=1)


@pytest.mark.parametrize("piece", [2**25, 3 * V], ids=["one-piece", "pieces"])
@pytest.mark.parametrize("config", [CONFIG, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_loss_gradient_and_rewards(
    batch: tuple[torch.Tensor, ...],
    loss_type: str,
    smoothing: float,
    config: object,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_pieces(monkeypatch, piece)
    hidden_states, weight, target_ids, reference = batch
    ratios = (
        compute_sums(hidden_states, weight, target_ids, getattr(config, "final_logit_softcapping", None)) - reference
    )
    if loss_type == "ipo":
        ratios = ratios / (target_ids != -100).sum(dim=1)
    h = ratios[::2] - ratios[1::2]
    if loss_type == "ipo":
        expected = ((h - 1 / (2 * BETA)) ** 2).sum() / 2
    else:
        expected = (
            -(1 - smoothing) * torch.sigmoid(BETA * h).log() - smoothing * torch.sigmoid(-BETA * h).log()
        ).sum() / 2
    expected_gradients = torch.autograd.grad(expected, (hidden_states, weight))

    loss_function = DPOLoss(config, BETA, label_smoothing=smoothing, loss_type=DPOLossType(loss_type))
    loss = loss_function((hidden_states, weight), (target_ids, reference, torch.tensor(2.0)))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for gradient, other in zip(torch.autograd.grad(loss, (hidden_states, weight)), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-13)

    rewards = BETA * ratios.detach()
    means = [
        rewards[::2].mean(),
        rewards[1::2].mean(),
        (rewards[::2] - rewards[1::2]).mean(),
        (rewards[::2] > rewards[1::2]).double().mean(),
    ]
    totals = loss_function.take_totals()
    assert len(METRICS) == 4 and totals.tolist() == pytest.approx([*(3 * mean.item() for mean in means), 3])
    assert loss_function.take_totals() is None
    scores = RowScore(config)((hidden_states, weight), (target_ids, torch.tensor(1.0)))
    sums = compute_sums(hidden_states, weight, target_ids, getattr(config, "final_logit_softcapping", None))
    torch.testing.assert_close(scores, sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss_type", DPOLossType)
def test_a_pair_without_targets_counts_for_nothing(batch: tuple[torch.Tensor, ...], loss_type: DPOLossType) -> None:
    hidden_states, weight, target_ids, reference = batch
    expected = DPOLoss(CONFIG, BETA, loss_type=loss_type)
    loss = expected((hidden_states[:4], weight), (target_ids[:4], reference[:4], torch.tensor(1.0)))
    filled = DPOLoss(CONFIG, BETA, loss_type=loss_type)
    target_ids, reference = target_ids.clone(), reference.clone()
    target_ids[4:], reference[4:] = -100, 0
    other = filled((hidden_states, weight), (target_ids, reference, torch.tensor(1.0)))
    assert other.item() == pytest.approx(loss.item(), rel=1e-14)
    assert torch.equal(filled.take_totals(), expected.take_totals())
    (gradient,) = torch.autograd.grad(other, hidden_states)
    assert not gradient[4:].any() and gradient.isfinite().all()


def test_where_policy_and_reference_agree_the_loss_is_log_2(batch: tuple[torch.Tensor, ...]) -> None:
    hidden_states, weight, target_ids, _ = batch
    reference = RowScore(CONFIG)((hidden_states, weight), (target_ids, torch.tensor(1.0))).detach()
    assert DPOLoss(CONFIG, BETA)(
        (hidden_states, weight), (target_ids, reference, torch.tensor(3.0))
    ).item() == pytest.approx(math.log(2), rel=1e-12)


def test_the_gradient_in_bf16_is_rounded_once(batch: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cut_pieces(monkeypatch, 3 * V)
    hidden_states, weight = (tensor.detach().bfloat16() for tensor in batch[:2])
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = (hidden_states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_())
        loss = DPOLoss(CONFIG, BETA)(inputs, (*batch[2:], torch.tensor(3.0)))
        gradients.append(torch.autograd.grad(loss, inputs))
    for rounded, exact in zip(*gradients, strict=True):
        assert (rounded.double() - exact).abs().max() / exact.abs().max() < 0.02


def test_a_frozen_head_gets_no_gradient_and_costs_none(batch: tuple[torch.Tensor, ...]) -> None:
    hidden_states, weight, target_ids, reference = batch
    loss = DPOLoss(CONFIG, BETA)((hidden_states, weight.detach()), (target_ids, reference, torch.tensor(3.0)))
    (gradient,) = torch.autograd.grad(loss, hidden_states)
    whole = DPOLoss(CONFIG, BETA)((hidden_states, weight), (target_ids, reference, torch.tensor(3.0)))
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, hidden_states)[0], rtol=1e-12, atol=0)


def test_whole_logits_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, length, vocabulary = 2, 513, 4000
    cut_pieces(monkeypatch, 16 * vocabulary)
    inputs = [torch.randn(rows, length, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)]
    target_ids = torch.randint(vocabulary, (rows, length))
    with AllocationPeak() as peak:
        DPOLoss(CONFIG, BETA)(
            tuple(inputs), (target_ids, torch.zeros(rows, dtype=torch.float64), torch.tensor(1.0))
        ).backward()
    assert peak.peak < 4 * rows * length * vocabulary / 8
