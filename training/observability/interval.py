"""The sums over the steps between two reports of a run."""

from __future__ import annotations

import time

import torch


class Interval:
    """The steps since the last report. The loss stays on the device until `finish`: reading it waits for the step.

    Every step counts for time and tokens; the loss of a step that is not finite does not. num_skipped: steps that did
    not change the weights; in fp16 the loss still counts when only gradients overflow. grad_norm: the norm of the last
    step that did; None if there is none.
    """

    def __init__(self, zero: torch.Tensor) -> None:
        self._zero = zero
        self.start()

    def start(self) -> None:
        self._loss_sum = self._zero.clone()  # over tokens, or over pairs
        self._num_terms = self._num_tokens = self._num_samples = self._num_steps = self.num_skipped = 0
        self.grad_norm: torch.Tensor | None = None
        self._seconds, self._since = 0.0, time.perf_counter()

    def add(self, num_tokens: int, num_samples: int) -> None:
        """Count a step. num_samples: the groups that stay together, such as pairs, in its global batch."""
        self._num_tokens += num_tokens
        self._num_samples += num_samples
        self._num_steps += 1

    def add_loss(self, loss: torch.Tensor, num_terms: int) -> None:
        """Add the loss of a step that is finite."""
        self._loss_sum += loss.detach().double().squeeze() * num_terms
        self._num_terms += num_terms

    @property
    def is_empty(self) -> bool:
        """Whether no step has a finite loss."""
        return self._num_terms == 0

    def pause(self) -> None:
        """Stop counting time: an evaluation or a save is not training."""
        self._seconds += time.perf_counter() - self._since

    def resume(self) -> None:
        """Count time again."""
        self._since = time.perf_counter()

    def finish(self) -> tuple[float, float, float, float]:
        """Return the mean loss per target token or pair, tokens per second, seconds per step and samples per step, and
        start a new interval."""
        loss = self._loss_sum.item() / self._num_terms
        self.pause()
        rate, seconds = self._num_tokens / self._seconds, self._seconds / self._num_steps
        result = (loss, rate, seconds, self._num_samples / self._num_steps)
        self.start()
        return result
