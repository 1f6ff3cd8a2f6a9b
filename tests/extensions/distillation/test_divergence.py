"""The distillation loss against its formulas, differentiated by autograd in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.distilling import compute_divergence, join_others
from torch.nn import functional as F
from transformers import LlamaConfig

from batch import Targets
from extensions.distillation.divergence import DistillOptions, choose_top
from extensions.distillation.keys import Divergence
from extensions.distillation.loss import KeptTeacherTerm, OnlineTeacherTerm, TeacherHead, TeacherTop
from models.losses.token_loss import TokenLoss

B, T, D, V = 2, 7, 6, 11
COEF = 0.7


def build_config(softcap: float | None) -> LlamaConfig:
    return LlamaConfig(vocab_size=V, hidden_size=D, num_attention_heads=2, final_logit_softcapping=softcap)


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("divergence", list(Divergence))
@pytest.mark.parametrize(
    ("temperature", "top_k", "softcap", "smoothing"),
    [(1.0, 4, None, 0.0), (2.0, 4, 3.0, 0.1), (1.0, V, None, 0.0), (0.5, V, None, 0.0)],
)
def test_the_loss_is_cross_entropy_and_the_gradient_that_of_both_terms(
    divergence: Divergence, temperature: float, top_k: int, softcap: float | None, smoothing: float
) -> None:
    hidden, weight = draw(B, T, D, seed=0).requires_grad_(), draw(V, D, seed=1).requires_grad_()
    target_ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
    target_ids[0, 2] = target_ids[1, 4:] = -100
    indices = (target_ids.flatten() != -100).nonzero().squeeze(1)
    log_q = (draw(len(indices), V, seed=3, scale=2.0) / temperature).log_softmax(-1)
    token_ids, known = choose_top(log_q, top_k, None, V)

    options = DistillOptions(COEF, temperature, divergence)
    term = KeptTeacherTerm(options)
    loss_fn = TokenLoss(build_config(softcap), label_smoothing=smoothing, terms=(term,))
    denominator = torch.tensor(4.0, dtype=torch.float64)
    columns = {"teacher_token_ids": token_ids, "teacher_log_probabilities": known}
    loss = loss_fn((hidden, weight), Targets(target_ids, indices, denominator, columns))
    found = torch.autograd.grad(loss, (hidden, weight))

    logits = (hidden @ weight.T).flatten(0, 1)[indices]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    entropy = F.cross_entropy(logits, target_ids.flatten()[indices], reduction="sum", label_smoothing=smoothing)
    p, q = (logits / temperature).softmax(-1), log_q.exp()
    distilled = temperature**2 * compute_divergence(*join_others(p, q, top_k), divergence.value).sum()
    expected = torch.autograd.grad(((1 - COEF) * entropy + COEF * distilled) / 4, (hidden, weight))

    assert loss.item() == pytest.approx(entropy.item() / 4, rel=1e-10)
    totals = term.sums.take()
    assert totals is not None and totals[:, 0].tolist() == pytest.approx([distilled.item(), len(indices)], rel=1e-10)
    assert term.sums.take() is None
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", list(Divergence))
def test_fewer_tokens_are_a_lower_bound_that_grows_to_the_whole_vocabulary(divergence: Divergence) -> None:
    p, q = draw(50, V, seed=4).softmax(-1), draw(50, V, seed=5, scale=2.0).softmax(-1)
    values = [compute_divergence(*join_others(p, q, k), divergence.value) for k in range(1, V + 1)]
    assert all((fewer <= more + 1e-12).all() for fewer, more in pairwise(values))
    torch.testing.assert_close(values[-1], compute_divergence(p, q, divergence.value))


def test_a_teacher_that_is_certain_and_a_student_that_is_wrong_give_finite_numbers() -> None:
    hidden, weight = torch.eye(V)[None, :1].requires_grad_(), (200 * torch.eye(V)).requires_grad_()
    log_q = torch.full((1, V), -300.0)
    log_q[0, 5] = 0.0
    token_ids, known = choose_top(log_q, 2, None, V)
    columns = {"teacher_token_ids": token_ids, "teacher_log_probabilities": known}
    targets = Targets.find(torch.tensor([[0]]), torch.tensor(1.0), columns=columns)
    for divergence in Divergence:
        term = KeptTeacherTerm(DistillOptions(COEF, 1.0, divergence))
        loss = TokenLoss(build_config(None), terms=(term,))
        gradients = torch.autograd.grad(loss((hidden, weight), targets), (hidden, weight))
        totals = term.sums.take()
        assert totals is not None and totals.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients), divergence


def test_the_teachers_pass_keeps_what_the_formula_needs() -> None:
    hidden, weight = draw(1, 3, D, seed=6), draw(V, D, seed=7)
    measure = TeacherTop(build_config(None), temperature=2.0, top_k=3, num_tokens=V - 2)
    with torch.no_grad():
        found = measure((hidden, weight), Targets(torch.zeros(1, 3), torch.tensor([0, 2]), torch.tensor(1.0)))
    q = (hidden[0, [0, 2]] @ weight.T / 2).softmax(-1)
    values, token_ids = q[:, : V - 2].topk(3)  # rows that pad the student's vocabulary are never among them
    assert found[0].dtype == torch.int32 and torch.equal(found[0].long(), token_ids)
    expected = torch.cat([values, 1 - values.sum(-1, keepdim=True)], dim=1)
    torch.testing.assert_close(found[1].exp(), expected.float())


@pytest.mark.parametrize("divergence", list(Divergence))
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (2.0, 3.0)])
def test_a_teacher_in_memory_is_compared_over_the_whole_vocabulary(
    divergence: Divergence, temperature: float, softcap: float | None
) -> None:
    hidden, weight = draw(B, T, D, seed=0).requires_grad_(), draw(V, D, seed=1).requires_grad_()
    teacher_outputs = (draw(B, T, D - 2, seed=8), draw(V, D - 2, seed=9, scale=2.0))
    target_ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
    target_ids[0, 2] = target_ids[1, 4:] = -100
    indices = (target_ids.flatten() != -100).nonzero().squeeze(1)
    targets = Targets(target_ids, indices, torch.tensor(4.0, dtype=torch.float64))
    head = TeacherHead(build_config(None), temperature, None, V)
    term = OnlineTeacherTerm(DistillOptions(COEF, temperature, divergence), head)
    loss_fn = TokenLoss(build_config(softcap), terms=(term,))
    term.take_states([head.take(teacher_outputs, targets)])
    found = torch.autograd.grad(loss_fn((hidden, weight), targets), (hidden, weight))

    logits = (hidden @ weight.T).flatten(0, 1)[indices]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    entropy = F.cross_entropy(logits, target_ids.flatten()[indices], reduction="sum")
    q = ((teacher_outputs[0] @ teacher_outputs[1].T).flatten(0, 1)[indices] / temperature).softmax(-1)
    distilled = temperature**2 * compute_divergence((logits / temperature).softmax(-1), q, divergence.value).sum()
    expected = torch.autograd.grad(((1 - COEF) * entropy + COEF * distilled) / 4, (hidden, weight))
    totals = term.sums.take()
    assert totals is not None and totals[:, 0].tolist() == pytest.approx([distilled.item(), len(indices)], rel=1e-10)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)
