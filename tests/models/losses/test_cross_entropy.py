"""The exact loss: for any split into micro-batches, the mean is the global batch's loss, and so is its gradient."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from batch import Targets, find_indices
from benchmarks.allocation import AllocationPeak
from data.collator import shift_labels
from models.losses import logit_chunks
from models.losses.cross_entropy import causal_lm_loss
from models.losses.logit_chunks import CHUNK_LOGITS, CHUNK_LOGITS_ON_GPU, list_chunks
from models.losses.token_loss import TokenAccuracy, TokenLoss
from tests.support.logit_chunks import set_chunk_size
from tests.support.mixed_addmm import play_mixed_addmm

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
    targets = shift_labels(labels)
    losses = [causal_lm_loss((hidden_states[row], weight), Targets.find(targets[row], denominator)) for row in rows]
    loss = torch.stack(losses).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12) == pytest.approx(hugging_face.item(), rel=1e-6)
    for gradient, other in zip(torch.autograd.grad(loss, (hidden_states, weight)), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_micro_batch_without_a_target_is_zero(batch, dtype: torch.dtype) -> None:
    hidden_states, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in batch[:2])
    loss = causal_lm_loss((hidden_states, weight), Targets.find(torch.full((B, T), -100), torch.tensor(3.0)))
    assert loss.item() == 0 and loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    for gradient in torch.autograd.grad(loss, (hidden_states, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_logits_are_in_fp32_at_least(batch) -> None:
    hidden_states, weight, labels = (tensor.detach() for tensor in batch)
    low = [tensor.to(torch.bfloat16) for tensor in (hidden_states, weight)]
    loss = causal_lm_loss((low[0], low[1]), Targets.find(shift_labels(labels), torch.tensor(22.0)))
    logits = F.linear(*low).float()
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_logits_are_made_for_targets_only(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states, weight, labels = batch
    made: list[torch.Size] = []
    linear = F.linear
    monkeypatch.setattr("models.losses.cross_entropy.F.linear", lambda x, w: (made.append(x.shape), linear(x, w))[1])
    causal_lm_loss((hidden_states, weight), Targets.find(shift_labels(labels), torch.tensor(22.0)))
    assert made == [(22, D)]


def plain_loss(
    outputs: tuple[torch.Tensor, torch.Tensor],
    targets: Targets,
    logit_softcap: float | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the same loss from whole logits."""
    (hidden_states, weight), target_ids = outputs, targets.ids
    has_target = target_ids != -100
    logits = F.linear(hidden_states[has_target], weight)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    loss = F.cross_entropy(logits, target_ids[has_target], reduction="sum", label_smoothing=label_smoothing)
    return loss / targets.denominator.to(logits.dtype)


def loss_and_gradients(
    loss_fn, hidden_states: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the loss and its gradients, scaled as the engine scales them for 3 micro-batches."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (hidden_states, weight)]
    loss = loss_fn((inputs[0], inputs[1]), Targets.find(target_ids, torch.tensor(17.0)))
    return loss, *torch.autograd.grad(loss / 3, inputs)


# fp32 and fp64: sums in another order. bf16: the scale of the loss is applied after rounding and not before, one more
# rounding.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("logit_softcap", [None, 3.0])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [1, 3 * V, 7 * V + 1, 22 * V, 2**25])
def test_chunks_are_the_whole(
    batch,
    dtype: torch.dtype,
    chunk: int,
    label_smoothing: float,
    logit_softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any size of a chunk: one target, several that do not divide the targets, all."""
    set_chunk_size(monkeypatch, chunk)
    hidden_states, weight = (tensor.detach().to(dtype) for tensor in batch[:2])
    found, expected = (
        loss_and_gradients(
            partial(function, logit_softcap=logit_softcap, label_smoothing=label_smoothing),
            hidden_states,
            weight,
            shift_labels(batch[2]),
        )
        for function in (causal_lm_loss, plain_loss)
    )
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == plain.dtype
        assert (ours - plain).abs().max() <= TOLERANCES[dtype] * plain.abs().max()
    assert abs(found[0] - expected[0]) <= 1e-6 * expected[0]


def test_bf16_gradients_are_no_further_from_fp64_than_the_plain_ones(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk_size(monkeypatch, 4 * V)
    low = [tensor.detach().to(torch.bfloat16) for tensor in batch[:2]]
    targets = shift_labels(batch[2])
    exact = loss_and_gradients(plain_loss, *(tensor.double() for tensor in low), targets)
    ours, plain = (loss_and_gradients(function, *low, targets) for function in (causal_lm_loss, plain_loss))
    for index in (1, 2):
        errors = [(gradients[index].double() - exact[index]).norm() for gradients in (ours, plain)]
        assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("as_a_gpu", [False, True])
def test_many_targets_in_bf16_are_summed_in_fp32(as_a_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four of 50 targets per product, the gradient is as close to fp64 as that of one product. On a GPU, which is
    played, each product is added to the sum as it is computed."""
    set_chunk_size(monkeypatch, 4 * V)
    monkeypatch.setattr(logit_chunks, "WAITING", 0)
    generator = torch.Generator().manual_seed(1)
    hidden_states, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 50, 8), (V, 8)))
    low = [tensor.to(torch.bfloat16) for tensor in (hidden_states, weight)]
    targets = torch.randint(V, (1, 50), generator=generator)
    assert logit_chunks.count_waiting(50, 8, V, on_gpu=False) == 4
    with play_mixed_addmm() if as_a_gpu else nullcontext([]) as shapes:
        ours = loss_and_gradients(causal_lm_loss, *low, targets)
    assert sum(rows for rows, _ in shapes) == (13 * V if as_a_gpu else 0)
    plain = loss_and_gradients(plain_loss, *low, targets)
    exact = loss_and_gradients(plain_loss, *(tensor.double() for tensor in low), targets)
    for index in (1, 2):
        assert ours[index].dtype is torch.bfloat16
        errors = [(gradients[index].double() - exact[index]).norm() for gradients in (ours, plain)]
        assert errors[0] <= 1.25 * errors[1]


def test_a_frozen_head_gets_no_gradient(batch) -> None:
    hidden_states, weight, labels = batch
    targets = Targets.find(shift_labels(labels), torch.tensor(22.0))
    loss = causal_lm_loss((hidden_states, weight.detach()), targets)
    expected = plain_loss((hidden_states, weight), targets)
    (found,), (wanted,) = (torch.autograd.grad(value, [hidden_states]) for value in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_fp16_makes_its_logits_at_once(batch) -> None:
    """Its gradients would underflow before the loss scale is known."""
    hidden_states, weight = (tensor.detach().half().requires_grad_() for tensor in batch[:2])
    loss = causal_lm_loss((hidden_states, weight), Targets.find(shift_labels(batch[2]), torch.tensor(2.0**20)))
    (gradient,) = torch.autograd.grad(loss * 2.0**20, [weight])
    assert gradient.count_nonzero() > 0.99 * gradient.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_smoothed_labels_are_those_of_hugging_face(batch, dtype: torch.dtype) -> None:
    """`LabelSmoother` takes labels that are not shifted, and a mean over targets."""
    hidden_states, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in batch[:2])
    labels, smoother = batch[2], LabelSmoother(epsilon=0.3)
    expected = smoother({"logits": F.linear(hidden_states, weight)}, labels, shift_labels=True)
    targets = Targets.find(shift_labels(labels), torch.tensor(22.0))
    loss = causal_lm_loss((hidden_states, weight), targets, label_smoothing=0.3)
    assert loss.item() == pytest.approx(
        expected.item(), rel=1e-6 if dtype is torch.float64 else 2e-3
    )  # it sums in fp32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_correct_tokens_are_counted_where_no_gradient_is_made(batch, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In addition to the plain loss, without smoothing; of equal logits the first token counts."""
    set_chunk_size(monkeypatch, 3 * V)
    hidden_states, weight, labels = (*(tensor.detach().to(dtype) for tensor in batch[:2]), batch[2])
    weight[30] = weight[3]  # never the first
    best = F.linear(hidden_states, weight)[:, :-1].argmax(-1)
    labels[:, 1:][::2] = torch.where(labels[:, 1:][::2] == -100, -100, best[::2])
    labels[3, 1:] = torch.where(best[3] == 3, 30, labels[3, 1:])
    config = LlamaConfig(vocab_size=V)
    accuracy = TokenAccuracy()
    loss, plain = TokenLoss(config, label_smoothing=0.3, terms=(accuracy,)), TokenLoss(config)
    targets = Targets.find(shift_labels(labels), torch.tensor(1.0))
    with torch.no_grad():
        losses = [each((hidden_states, weight), targets) for each in (loss, plain)]
        loss((hidden_states[:1], weight), Targets.find(targets.ids[:1], targets.denominator))  # no target: not counted
    assert losses[0] == losses[1]
    expected = int((best == labels[:, 1:]).sum())
    assert 0 < expected < 22 and accuracy.sums.take().tolist() == [[expected], [22]]
    assert accuracy.sums.take() is None
    loss((hidden_states, weight.requires_grad_()), targets)
    assert accuracy.sums.take() is None  # training does not count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_peak_is_less_than_a_third(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden, vocabulary = 512, 64, 8000
    set_chunk_size(monkeypatch, tokens * vocabulary // 16)
    states, weight = torch.randn(1, tokens, hidden, dtype=dtype), torch.randn(vocabulary, hidden, dtype=dtype)
    targets = torch.randint(vocabulary, (1, tokens))
    peaks = []
    for function in (causal_lm_loss, plain_loss):
        with AllocationPeak() as counter:
            loss_and_gradients(function, states, weight, targets)
        peaks.append(counter.peak)
    assert peaks[0] < peaks[1] / 3


def test_evaluation_keeps_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden, vocabulary = 512, 16, 2000
    chunk = tokens * vocabulary // 16
    set_chunk_size(monkeypatch, chunk)
    states, weight = (torch.randn(*shape, requires_grad=True) for shape in ((1, tokens, hidden), (vocabulary, hidden)))
    with torch.no_grad(), AllocationPeak() as counter:
        loss = causal_lm_loss(
            (states, weight), Targets.find(torch.randint(vocabulary, (1, tokens)), torch.tensor(22.0))
        )
    assert loss.grad_fn is None
    assert counter.peak < 4 * (3 * chunk + 3 * states.numel() + weight.numel())


@pytest.mark.parametrize(("device", "most"), [("cpu", CHUNK_LOGITS), ("meta", CHUNK_LOGITS_ON_GPU)])
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 128_256, 151_936, 256_000, 262_144])
def test_a_chunk_is_made_of_tiles(vocabulary: int, device: str, most: int) -> None:
    """Chunks but the last are tiles of 128 rows, those of matrix products on tensor cores: as many as fit, four times
    as many on another device than a CPU."""
    hidden, weight = torch.empty(5000, 1, device=device), torch.empty(vocabulary, 1, device=device)
    *chunks, last = list_chunks(hidden, weight, None)
    assert chunks and last.stop >= 5000
    assert all((chunk.stop - chunk.start) % 128 == 0 for chunk in (*chunks, last))
    assert all(most / 2 < (chunk.stop - chunk.start) * vocabulary <= most for chunk in chunks)


def test_known_indices_are_taken(batch) -> None:
    """Given only some of the targets, so that a loss that searches for them itself differs."""
    hidden_states, weight, labels = batch
    targets = shift_labels(labels)
    some = find_indices(targets)[::2]
    kept = torch.full_like(targets, -100).flatten().scatter(0, some, targets.flatten()[some]).view_as(targets)
    found = causal_lm_loss((hidden_states, weight), Targets(targets, some, torch.tensor(22.0)))
    assert found.item() == causal_lm_loss((hidden_states, weight), Targets.find(kept, torch.tensor(22.0))).item() > 0
