"""The memory that a teacher adds to the loss, against what is allocated."""

from __future__ import annotations

import pytest
import torch
from support.configs import build_config
from support.logit_chunks import set_chunk_size
from transformers import LlamaConfig

from batch import Targets
from benchmarks.allocation import AllocationPeak
from data.storage.scores import count_bytes
from extensions.distillation.divergence import DistillOptions
from extensions.distillation.keys import Divergence
from extensions.distillation.loss import KeptTeacherTerm, OnlineTeacherTerm, TeacherHead
from extensions.distillation.modifier import Teacher
from extensions.distillation.scores import list_teacher_columns
from models.losses.token_loss import TokenLoss
from training.config.schema import Precision
from training.cost_terms.loss import LossBytes


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_what_a_teacher_adds_to_the_loss(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """The teacher's distributions go in, and are not counted by either side."""
    tokens, hidden_size, vocabulary, top_k = 2048, 128, 3000, 8
    set_chunk_size(monkeypatch, 512 * vocabulary)
    states, weight = (
        torch.randn(*shape, requires_grad=True) for shape in ((1, tokens, hidden_size), (vocabulary, hidden_size))
    )
    target_ids = torch.randint(vocabulary, (1, tokens))
    logs = torch.full((tokens, top_k + 1), 1 / (top_k + 1)).log()
    token_ids = torch.arange(top_k, dtype=torch.int32).expand(tokens, -1).contiguous()
    columns = {"teacher_token_ids": token_ids, "teacher_log_probabilities": logs}
    targets = Targets.find(target_ids, torch.tensor(1.0), columns=columns)
    term = KeptTeacherTerm(DistillOptions(0.5, temperature))
    loss = TokenLoss(LlamaConfig(vocab_size=vocabulary), terms=(term,))
    with AllocationPeak(states, weight) as counter:
        torch.autograd.grad(loss((states, weight), targets), (states, weight))
    given = ("distill.teacher=a", f"distill.temperature={temperature}", f"distill.top_k={top_k}", "precision=fp32")
    planned = LossBytes(tokens, vocabulary, hidden_size, Precision.fp32, on_gpu=False)
    kept = tokens * count_bytes(list_teacher_columns(top_k))
    added = Teacher().count_loss_bytes(build_config(*given), tokens, vocabulary, on_gpu=False) - kept
    gradients = 4 * (2 * states.numel() + weight.numel())
    assert counter.peak == pytest.approx(planned.peak + added + gradients, rel=0.1)


@pytest.mark.parametrize("divergence", list(Divergence))
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (2.0, None), (1.0, 8), (2.0, 8)])
def test_what_a_teacher_in_memory_adds_to_the_loss(
    monkeypatch: pytest.MonkeyPatch, divergence: Divergence, temperature: float, top_k: int | None
) -> None:
    """Next to its head and its hidden states, which the plan counts where the teacher is."""
    tokens, hidden_size, vocabulary = 1024, 128, 3000
    set_chunk_size(monkeypatch, 512 * vocabulary)
    config = LlamaConfig(vocab_size=vocabulary)
    states, weight = (torch.randn(*shape, requires_grad=True) for shape in ((1, tokens, 128), (vocabulary, 128)))
    teacher_outputs = (torch.randn(1, tokens, 64), torch.randn(vocabulary, 64))
    targets = Targets.find(torch.randint(vocabulary, (1, tokens)), torch.tensor(1.0))
    head = TeacherHead(config, temperature, top_k, vocabulary)
    term = OnlineTeacherTerm(DistillOptions(0.5, temperature, divergence), head)
    loss = TokenLoss(config, terms=(term,))
    term.take_states([head.take(teacher_outputs, targets)])
    with AllocationPeak(states, weight) as counter:
        torch.autograd.grad(loss((states, weight), targets), (states, weight))
    known = "null" if top_k is None else top_k
    given = (
        "distill.teacher=a", "distill.online=true", f"distill.temperature={temperature}", f"distill.top_k={known}",
        f"distill.divergence={divergence.value}", "precision=fp32",
    )  # fmt: skip
    planned = LossBytes(tokens, vocabulary, hidden_size, Precision.fp32, on_gpu=False)
    added = Teacher().count_loss_bytes(build_config(*given), tokens, vocabulary, on_gpu=False)
    gradients = 4 * (2 * states.numel() + weight.numel())
    assert counter.peak == pytest.approx(planned.peak + added + gradients, rel=0.1)
