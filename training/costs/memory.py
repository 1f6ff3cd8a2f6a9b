"""The bytes of a plan, by kind, and the moment when a GPU is fullest. `training/cost_terms/` adds them up.

A GPU is fullest either in the backward pass (activations, or the loss) or at the optimizer step (DeepSpeed's copies
of the gradients, when the activations are gone); the peak is the larger of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from training.config.schema import Precision

HOST_BYTES_A_RANK = 3 * 2**30  # a process with CUDA's libraries loaded; an assumption


class Summed:
    """A dataclass that is added field by field."""

    def __add__(self, other: Self) -> Self:
        mine, others = vars(self), vars(other)
        return type(self)(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True, kw_only=True)
class Memory(Summed):
    """Bytes of a stage on one GPU, by kind; `host` in the host's memory, for this rank.

    activations: of all micro-batches in flight. recomputation: by how much the one group of layers that is recomputed
    exceeds what later layers have freed by then, or what a layer without a backward pass makes in its forward pass
    exceeds what the others keep. buffers: of communication. step: what the optimizer step allocates for
    itself. first_pass: what a pass before the step does that is not the stage's own.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recomputation: int = 0
    loss: int = 0
    buffers: int = 0
    step: int = 0
    first_pass: int = 0
    host: int = 0

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def backward_peak(self) -> int:
        """The loss is done before the first group is recomputed."""
        return self.resident + self.activations + max(self.recomputation, self.loss)

    @property
    def peak(self) -> int:
        return max(self.backward_peak, self.resident + self.step, self.resident + self.first_pass)


@dataclass(frozen=True, kw_only=True)
class Kept(Summed):
    """Bytes of one micro-batch in one chunk of layers: `Memory.activations` of it alone, and `Memory.recomputation`;
    deferred: its activations between the two halves of its backward pass; host: its bytes in the host's memory."""

    activations: int = 0
    recomputation: int = 0
    deferred: int = 0
    host: int = 0


def bytes_of(precision: Precision) -> int:
    """Return the bytes of one element."""
    return 4 if precision is Precision.fp32 else 2
