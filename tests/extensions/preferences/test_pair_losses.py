"""The losses of preference optimization against their formulas on whole logits, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma2Config, LlamaConfig

from batch import Targets
from benchmarks.allocation import AllocationPeak
from data.collator import shift_labels
from extensions.preferences.cpo import CPOFormula
from extensions.preferences.dpo import DPOFormula
from extensions.preferences.keys import DPOLossType
from extensions.preferences.orpo import OddsRatioFormula
from extensions.preferences.pairs import REWARDS, PairFormula, PairLoss, Pairs, WithNLL
from extensions.preferences.reference import AnswerScore
from extensions.preferences.simpo import SimPOFormula
from tests.support.logit_chunks import set_chunk_size

R, T, D, V = 6, 12, 16, 40  # rows: three pairs; sequence, hidden, vocabulary
BETA, GAMMA = 0.7, 0.4
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


@dataclass(frozen=True)
class Sums:
    """Log-probabilities, numbers of tokens and the reference's log-probabilities of the answers of pairs."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    num_chosen: torch.Tensor
    num_rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor


Expected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # loss, both rewards, the rest


def expect_dpo(loss_type: str, smoothing: float, sums: Sums) -> Expected:
    chosen, rejected = sums.chosen - sums.reference_chosen, sums.rejected - sums.reference_rejected
    if loss_type == "ipo":
        chosen, rejected = chosen / sums.num_chosen, rejected / sums.num_rejected
    scaled = BETA * (chosen - rejected)
    right, flipped = -torch.sigmoid(scaled).log(), -torch.sigmoid(-scaled).log()
    loss = {
        "sigmoid": (1 - smoothing) * right + smoothing * flipped,
        "robust": ((1 - smoothing) * right - smoothing * flipped) / (1 - 2 * smoothing),
        "ipo": (chosen - rejected - 1 / (2 * BETA)) ** 2,
        "hinge": (1 - BETA * (chosen - rejected)).clamp(min=0),
    }[loss_type]
    return loss, BETA * chosen, BETA * rejected, {}


def expect_orpo(sums: Sums) -> Expected:
    chosen, rejected = sums.chosen / sums.num_chosen, sums.rejected / sums.num_rejected
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in (chosen, rejected)]
    ratio_loss = torch.log(1 + odds[1] / odds[0])  # -log sigmoid(log(a / b)) = log(1 + b / a)
    reported = {"log_odds_ratio": torch.log(odds[0] / odds[1]), "odds_ratio_loss": ratio_loss, "nll_loss": -chosen}
    return -chosen + BETA * ratio_loss, BETA * chosen, BETA * rejected, reported


def expect_simpo(sums: Sums) -> Expected:
    chosen, rejected = BETA * sums.chosen / sums.num_chosen, BETA * sums.rejected / sums.num_rejected
    return torch.log(1 + torch.exp(rejected - chosen + GAMMA)), chosen, rejected, {}


def expect_cpo(alpha: float, per_token: bool, sums: Sums) -> Expected:
    nll = -sums.chosen / (sums.num_chosen if per_token else 1)
    loss = torch.log(1 + torch.exp(BETA * sums.rejected - BETA * sums.chosen)) + alpha * nll
    return loss, BETA * sums.chosen, BETA * sums.rejected, {"nll_loss": nll}


def expect_dpo_and_sft(sums: Sums) -> Expected:
    loss, *rewards, reported = expect_dpo("sigmoid", 0.0, sums)
    nll = -sums.chosen / sums.num_chosen
    return loss + 0.3 * nll, *rewards, {**reported, "nll_loss": nll}


def build_dpo(loss_type: str = "sigmoid", smoothing: float = 0.0) -> DPOFormula:
    return DPOFormula(BETA, smoothing, DPOLossType(loss_type))


CASES: dict[str, tuple[PairFormula, Callable[[Sums], Expected]]] = {
    "dpo": (build_dpo(), partial(expect_dpo, "sigmoid", 0.0)),
    "dpo smoothed": (build_dpo("sigmoid", 0.1), partial(expect_dpo, "sigmoid", 0.1)),
    "dpo robust": (build_dpo("robust", 0.1), partial(expect_dpo, "robust", 0.1)),
    "ipo": (build_dpo("ipo"), partial(expect_dpo, "ipo", 0.0)),
    "hinge": (build_dpo("hinge"), partial(expect_dpo, "hinge", 0.0)),
    "dpo and sft": (WithNLL(build_dpo(), 0.3), expect_dpo_and_sft),
    "orpo": (WithNLL(OddsRatioFormula(BETA), 1.0), expect_orpo),
    "simpo": (SimPOFormula(BETA, GAMMA), expect_simpo),
    "cpo": (WithNLL(CPOFormula(BETA), 0.5), partial(expect_cpo, 0.5, True)),
    "cpo of sums": (WithNLL(CPOFormula(BETA), 0.5, per_token=False), partial(expect_cpo, 0.5, False)),
}
FORMULAS = pytest.mark.parametrize("name", CASES)


def build_targets(target_ids: torch.Tensor, denominator: float, **columns: torch.Tensor) -> Targets:
    """Targets with a document in each row."""
    is_target = target_ids != -100
    sums = {"num_targets": is_target.sum(dim=1).double(), "target_documents": is_target.nonzero()[:, 0]}
    return Targets.find(target_ids, torch.tensor(denominator), columns={**sums, **columns})


def pack(targets: Targets, num_rows: int) -> Targets:
    """The same documents in fewer rows."""
    ids = targets.ids.reshape(num_rows, -1)
    return Targets.find(ids, targets.denominator, columns=targets.columns)


@pytest.mark.parametrize("chunk", [2**25, 3 * V], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("config", [CONFIG, CAPPED], ids=["plain", "capped"])
@FORMULAS
def test_loss_gradient_and_metrics(
    batch: tuple[torch.Tensor, ...], name: str, config: object, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunk_size(monkeypatch, chunk)
    (formula, expect), (hidden_states, weight, target_ids, reference) = CASES[name], batch
    sums = compute_sums(hidden_states, weight, target_ids, getattr(config, "final_logit_softcapping", None))
    lengths = (target_ids != -100).sum(dim=1)
    by_answer = [part for rows in (sums, lengths, reference) for part in (rows[::2], rows[1::2])]
    losses, chosen, rejected, reported = expect(Sums(*by_answer))
    expected = losses.sum() / 2
    expected_gradients = torch.autograd.grad(expected, (hidden_states, weight), retain_graph=True)

    loss_function = PairLoss(config, formula)
    loss = loss_function((hidden_states, weight), build_targets(target_ids, 2.0, reference=reference))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for gradient, other in zip(torch.autograd.grad(loss, (hidden_states, weight)), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-13)

    rewards = [chosen, rejected, chosen - rejected, (chosen > rejected).double()]
    (metrics,) = loss_function.sums
    assert metrics.names == (*REWARDS, *reported)
    found, counts = metrics.take().tolist()
    assert found == pytest.approx([values.sum().item() for values in (*rewards, *reported.values())], rel=1e-12)
    assert counts == [3] * len(found)
    assert metrics.take() is None


@pytest.mark.parametrize("config", [CONFIG, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("num_rows", [R, 2])
def test_the_score_of_an_answer(batch: tuple[torch.Tensor, ...], config: object, num_rows: int) -> None:
    hidden_states, weight, target_ids, _ = batch
    outputs = (hidden_states.reshape(num_rows, -1, D), weight)
    (scores,) = AnswerScore(config)(outputs, pack(build_targets(target_ids, 1.0), num_rows))
    sums = compute_sums(hidden_states, weight, target_ids, getattr(config, "final_logit_softcapping", None))
    torch.testing.assert_close(scores, sums, rtol=1e-12, atol=0)


@FORMULAS
@pytest.mark.parametrize("num_rows", [1, 3])
def test_packed_pairs_are_the_same_pairs(batch: tuple[torch.Tensor, ...], name: str, num_rows: int) -> None:
    (formula, _), (hidden_states, weight, target_ids, reference) = CASES[name], batch
    targets = build_targets(target_ids, 2.0, reference=reference)
    alone, packed = PairLoss(CONFIG, formula), PairLoss(CONFIG, formula)
    expected = alone((hidden_states, weight), targets)
    loss = packed((hidden_states.reshape(num_rows, -1, D), weight), pack(targets, num_rows))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    torch.testing.assert_close(packed.sums[0].take(), alone.sums[0].take(), rtol=1e-14, atol=0)
    gradients = (torch.autograd.grad(each, (hidden_states, weight)) for each in (loss, expected))
    for found, other in zip(*gradients, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-15)


@FORMULAS
def test_rows_that_only_fill_the_micro_batch_are_not_counted(batch: tuple[torch.Tensor, ...], name: str) -> None:
    """They have no documents; nor does a whole micro-batch of them."""
    (formula, _), (hidden_states, weight, target_ids, reference) = CASES[name], batch
    expected, filled = PairLoss(CONFIG, formula), PairLoss(CONFIG, formula)
    targets = build_targets(target_ids[:4], 1.0, reference=reference[:4])
    loss = expected((hidden_states[:4], weight), targets)
    target_ids = target_ids.clone()
    target_ids[4:] = -100
    other = filled((hidden_states, weight), Targets.find(target_ids, targets.denominator, columns=targets.columns))
    assert other.item() == pytest.approx(loss.item(), rel=1e-14)
    assert torch.equal(filled.sums[0].take(), expected.sums[0].take())
    (gradient,) = torch.autograd.grad(other, hidden_states)
    assert not gradient[4:].any() and gradient.isfinite().all()
    nothing = build_targets(target_ids[:0], 1.0, reference=reference[:0])
    nothing = Targets.find(target_ids[4:], nothing.denominator, columns=nothing.columns)
    assert filled((hidden_states[4:], weight), nothing).item() == 0 and not filled.sums[0].take().any()


def test_the_odds_of_answers_that_are_nearly_certain_are_finite() -> None:
    """In fp32 their log-probability is 0, and so is 1 - P, the divisor of the odds."""
    log_probabilities = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    terms = OddsRatioFormula(BETA)(Pairs(log_probabilities, torch.ones_like(log_probabilities)))
    (gradient,) = torch.autograd.grad(terms.losses.sum(), log_probabilities)
    assert terms.losses.isfinite().all() and gradient.isfinite().all()
    assert terms.losses[0] < 1e-6 < 1 < terms.losses[1]


def test_where_policy_and_reference_agree_the_loss_is_log_2(batch: tuple[torch.Tensor, ...]) -> None:
    hidden_states, weight, target_ids, _ = batch
    (reference,) = AnswerScore(CONFIG)((hidden_states.detach(), weight), build_targets(target_ids, 1.0))
    targets = build_targets(target_ids, 3.0, reference=reference)
    loss = PairLoss(CONFIG, DPOFormula(BETA))((hidden_states, weight), targets)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**12)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["dpo and sft", "orpo", "simpo", "cpo"])
def test_the_gradient_in_16_bits_is_rounded_once(
    batch: tuple[torch.Tensor, ...], name: str, dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scale: the loss scale in fp16, without which parts of the gradient underflow."""
    set_chunk_size(monkeypatch, 3 * V)
    formula = CASES[name][0]
    hidden_states, weight = (tensor.detach().to(dtype) for tensor in batch[:2])
    targets = build_targets(batch[2], 3e4, reference=batch[3])
    gradients = []
    for computed, scaled in ((dtype, scale), (torch.float64, 1.0)):
        inputs = (hidden_states.to(computed).requires_grad_(), weight.to(computed).requires_grad_())
        loss = PairLoss(CONFIG, formula)(inputs, targets)
        gradients.append([each.double() / scaled for each in torch.autograd.grad(loss * scaled, inputs)])
    for rounded, exact in zip(*gradients, strict=True):
        assert (rounded - exact).abs().max() / exact.abs().max() < (0.02 if dtype is torch.bfloat16 else 0.003)


def test_a_frozen_head_gets_no_gradient_and_costs_none(batch: tuple[torch.Tensor, ...]) -> None:
    hidden_states, weight, target_ids, reference = batch
    targets = build_targets(target_ids, 3.0, reference=reference)
    loss = PairLoss(CONFIG, DPOFormula(BETA))((hidden_states, weight.detach()), targets)
    (gradient,) = torch.autograd.grad(loss, hidden_states)
    whole = PairLoss(CONFIG, DPOFormula(BETA))((hidden_states, weight), targets)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, hidden_states)[0], rtol=1e-12, atol=0)


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, length, vocabulary = 2, 513, 4000
    set_chunk_size(monkeypatch, 16 * vocabulary)
    inputs = [torch.randn(rows, length, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)]
    target_ids = torch.randint(vocabulary, (rows, length))
    with AllocationPeak() as peak:
        targets = build_targets(target_ids, 1.0, reference=torch.zeros(rows, dtype=torch.float64))
        PairLoss(CONFIG, DPOFormula(BETA))(tuple(inputs), targets).backward()
    assert peak.peak < 4 * rows * length * vocabulary / 8
