"""What is summed up between two reports of a run."""

from __future__ import annotations

import time

import torch


class Interval:
    """The steps since the last report. The loss stays on the device until it is asked for: reading it waits for the
    step.

    num_skipped: of them, or in fp16 beside their losses, those that left the weights as they were. grad_norm: of the
    last step that did not; None while there is none.
    """

    def __init__(self, zero: torch.Tensor) -> None:
        self._zero = zero
        self.start()

    def start(self) -> None:
        self._loss_sum = self._zero.clone()  # of tokens, or of pairs
        self._num_terms = self._num_tokens = self._num_steps = self.num_skipped = 0
        self.grad_norm: torch.Tensor | None = None
        self._seconds, self._since = 0.0, time.perf_counter()

    def add(self, loss: torch.Tensor, num_terms: int, num_tokens: int) -> None:
        self._loss_sum += loss.detach().double().squeeze() * num_terms
        self._num_terms += num_terms
        self._num_tokens += num_tokens
        self._num_steps += 1

    @property
    def is_empty(self) -> bool:
        return self._num_steps == 0

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def finish(self) -> tuple[float, float, float]:
        """(mean loss a target token or a pair, tokens a second, seconds a step) since the last call; begins a new
        interval."""
        loss = self._loss_sum.item() / self._num_terms
        self.pause()
        result = (loss, self._num_tokens / self._seconds, self._seconds / self._num_steps)
        self.start()
        return result
