"""The exact loss: whatever the micro-batches hold, their mean is the global batch's loss, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from models.loss import causal_lm_loss

B, T, D, V = 8, 12, 16, 40  # samples of a global batch, sequence, hidden, vocabulary


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states [B, T, D], head weight [V, D], labels [B, T] with 0 to T - 1 targets a sample."""
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(B, T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (B, T), generator=generator)
    for sample, num_targets in enumerate([0, 1, 2, 11, 5, 0, 0, 3]):
        labels[sample, : T - num_targets] = -100
    labels[1, 0] = 7  # nothing predicts the first token: no target
    return hidden_states, weight, labels


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_the_mean_over_micro_batches_is_hugging_faces_loss(batch, micro_batch_size: int) -> None:
    hidden_states, weight, labels = batch
    expected = F.cross_entropy((hidden_states @ weight.T)[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    hugging_face = ForCausalLMLoss(hidden_states @ weight.T, labels, V)  # in fp32
    expected_gradients = torch.autograd.grad(expected, (hidden_states, weight))

    num_micro_batches = B // micro_batch_size
    denominator = torch.tensor(22 / num_micro_batches, dtype=torch.float64)
    rows = [slice(start, start + micro_batch_size) for start in range(0, B, micro_batch_size)]
    losses = [causal_lm_loss((hidden_states[row], weight), (labels[row], denominator)) for row in rows]
    loss = torch.stack(losses).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12) == pytest.approx(hugging_face.item(), rel=1e-6)
    for gradient, other in zip(torch.autograd.grad(loss, (hidden_states, weight)), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_micro_batch_without_a_target_is_zero(batch, dtype: torch.dtype) -> None:
    hidden_states, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in batch[:2])
    loss = causal_lm_loss((hidden_states, weight), (torch.full((B, T), -100), torch.tensor(3.0)))
    assert loss.item() == 0 and loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    for gradient in torch.autograd.grad(loss, (hidden_states, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_logits_are_in_fp32_at_least(batch) -> None:
    hidden_states, weight, labels = (tensor.detach() for tensor in batch)
    low = [tensor.to(torch.bfloat16) for tensor in (hidden_states, weight)]
    loss = causal_lm_loss((low[0], low[1]), (labels, torch.tensor(22.0)))
    logits = F.linear(*low).float()
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_logits_are_made_for_targets_only(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states, weight, labels = batch
    made: list[torch.Size] = []
    linear = F.linear
    monkeypatch.setattr("models.loss.F.linear", lambda x, w: (made.append(x.shape), linear(x, w))[1])
    causal_lm_loss((hidden_states, weight), (labels, torch.tensor(22.0)))
    assert made == [(22, D)]
