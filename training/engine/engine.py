"""What a run asks of whatever trains its stages. Nothing outside of training/engine/ looks behind this interface.

`training/engine/pipeline_engine.py` implements it with DeepSpeed; `training/engine/steps.py` says what a run does with
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from models.losses.cross_entropy import Loss
from training.distributed.topology import Layout
from training.optim.state_kinds import DeclaredState
from training.pipeline.module import StageModule

# The units of a step that are timed, by the names that an observer gets.
FORWARD, BACKWARD, OPTIMIZER = "ForwardPass", "BackwardPass", "OptimizerStep"
WEIGHTS = "WeightPass"  # the second half of a backward pass, where a schedule puts it off
# The first two are with the stage before, the others with the next.
TRANSFERS = ("RecvActivation", "SendGrad", "SendActivation", "RecvGrad")
REDUCTIONS = ("ReduceTiedGrads", "ReduceGrads")  # of gradients


class StepObserver(Protocol):
    """Is called around every unit of a step and of a forward pass alone, on the thread that runs it."""

    def before(self, unit: str) -> None: ...

    def after(self, unit: str) -> None: ...


@dataclass(frozen=True)
class Partition:
    """What this rank's optimizer holds of one parameter group.

    weights: fp32 [number of elements], flat. state: the optimizer's own of them, by name; empty before its first step.
    declared: what is declared of that state.
    """

    weights: torch.Tensor
    state: Mapping[str, Any]
    declared: DeclaredState


@dataclass(frozen=True)
class PartitionSlice:
    """Where a partition holds a run of elements of one parameter.

    partition: which one. start, length: elements of the partition. parameter_start: the first of them in the flattened
    parameter.
    """

    partition: int
    start: int
    length: int
    parameter_start: int


class Engine(ABC):
    """Trains and evaluates this rank's stage. All ranks call each method that runs passes, in the same order.

    module: the stage. rank: of this process in `layout`.
    """

    module: StageModule
    layout: Layout
    rank: int
    device: torch.device
    saves_state = True  # False where another rank has the same partitions

    @abstractmethod
    def train_step(self, micro_batches: Iterator[Any], learning_rate: float, seed: int) -> torch.Tensor:
        """One optimizer step over the next `layout.gradient_accumulation_steps` micro-batches.

        micro_batches: of this rank's loader; a rank in the middle of the pipeline does not read them.
        seed: of all random numbers that the step draws on this rank.
        Returns the loss of the global batch, still on the device; the same on every rank.
        """

    @abstractmethod
    def forward_only(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, loss: Loss | None = None
    ) -> list[Any]:
        """What the loss makes of each micro-batch, without gradients; empty on a rank that does not hold it.

        micro_batches: None on a rank that reads nothing. loss: instead of the module's own.
        """

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """The norm of the last step's gradient over all parameters, before clipping; a float64 scalar, still on its
        device."""

    @abstractmethod
    def has_skipped_step(self) -> bool:
        """Whether the last step left the weights as they were because its gradient was not finite. Another rank may
        know more, but in fp16, where that is how the loss scale finds its value: there all know the same."""

    @abstractmethod
    def restore_step(self, step: int) -> None:
        """Continues counting from `step` optimizer steps."""

    @abstractmethod
    def list_partitions(self) -> list[Partition]:
        """The optimizer's partitions; empty where nothing is trained."""

    @abstractmethod
    def restore_state(self, partition: int, state: Mapping[str, Any]) -> None:
        """Makes the optimizer continue with this as its state of a partition, by name; other names stay."""

    @abstractmethod
    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        """Where a partition of this rank holds elements of `parameter`; None where it is frozen, or held by other ranks
        alone."""

    @abstractmethod
    def read_loss_scaler(self) -> dict[str, float]:
        """What changes in a dynamic loss scaler (fp16), by name; empty without one."""

    @abstractmethod
    def restore_loss_scaler(self, state: Mapping[str, float]) -> None:
        """Takes what `read_loss_scaler` has given; ignores other names."""

    @abstractmethod
    def observe(self, observer: StepObserver | None) -> None:
        """Calls `observer` around every unit from now on; None ends that."""
