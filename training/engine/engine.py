"""The interface between a run and the code that trains its stages. Nothing outside training/engine/ bypasses it.

`training/engine/pipeline_engine.py` implements it with DeepSpeed; `training/engine/steps.py` evaluates with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from data.loading.step_totals import StepTotals
from models.losses.cross_entropy import Loss
from training.distributed.topology import Layout
from training.optim.state_kinds import DeclaredState
from training.pipeline.module import StageModule

# The units of a step that are timed, by the names that an observer receives.
FORWARD, BACKWARD, OPTIMIZER = "ForwardPass", "BackwardPass", "OptimizerStep"
WEIGHTS = "WeightPass"  # the second half of a backward pass, where a schedule defers it
# The first two are transfers with the previous stage, the others with the next.
TRANSFERS = ("RecvActivation", "SendGrad", "SendActivation", "RecvGrad")
REDUCTIONS = ("ReduceTiedGrads", "ReduceGrads")  # of gradients


class StepObserver(Protocol):
    """Callbacks around every unit of a training step or an evaluation, on the thread that runs it."""

    def before(self, unit: str) -> None: ...

    def after(self, unit: str) -> None: ...


@dataclass(frozen=True)
class Partition:
    """This rank's part of one parameter group, in its optimizer.

    weights: fp32 [number of elements], flat. state: the optimizer's state for them, by name; empty before its first
    step. declared: the declaration of that state.
    """

    weights: torch.Tensor
    state: Mapping[str, Any]
    declared: DeclaredState


@dataclass(frozen=True)
class PartitionSlice:
    """A contiguous range of a partition that holds elements of one parameter.

    partition: its index. start, length: in elements of the partition. parameter_start: the position of the first
    element in the flattened parameter.
    """

    partition: int
    start: int
    length: int
    parameter_start: int


class Engine(ABC):
    """Trains and evaluates this rank's stage. All ranks call each method that runs passes, in the same order.

    module: the stage. rank: this process's rank in `layout`.
    """

    module: StageModule
    layout: Layout
    rank: int
    device: torch.device
    replicas: dist.ProcessGroup  # the ranks that hold the same stage, and the same shards of it, for other samples
    saves_state = True  # False where another rank has the same partitions

    @abstractmethod
    def train_step(
        self,
        micro_batches: Iterator[Any],
        step: int,
        total_steps: int,
        totals: StepTotals | None = None,
        is_last: bool = False,
    ) -> tuple[torch.Tensor, float]:
        """Run optimizer step `step` (from 0) of a schedule of `total_steps`, over the next
        `layout.gradient_accumulation_steps` micro-batches.

        Returns the loss of the global batch, still on the device and the same on every rank, and the learning rate.
        Learning rate and random numbers (dropout) are functions of the step, so a resumed run restores neither.

        micro_batches: from this rank's loader; a rank in the middle of the pipeline does not read them. totals: of the
        step's global batch; None if they are not known, and documents have to be read from each micro-batch. Router
        losses need them. is_last: whether the run is to end with this step, which is logged whatever `logging_steps`
        is.
        """

    @abstractmethod
    def forward_only(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, loss: Loss | None = None
    ) -> list[Any]:
        """Return the loss function's output for each micro-batch, without gradients; empty on a rank without the loss.

        micro_batches: None on a rank that reads nothing. loss: replaces the module's own.
        """

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Return the last step's gradient norm over all parameters, before clipping: a float64 scalar, still on its
        device."""

    @abstractmethod
    def has_skipped_step(self) -> bool:
        """Returns whether the last step left the weights unchanged because its gradient was not finite.

        All ranks agree in fp16, where the loss scale depends on it; otherwise another rank may have seen such a
        gradient when this one has not.
        """

    @abstractmethod
    def restore_step(self, step: int) -> None:
        """Continue counting from `step` optimizer steps."""

    @abstractmethod
    def list_partitions(self) -> list[Partition]:
        """Return the optimizer's partitions; empty where nothing is trained."""

    @abstractmethod
    def restore_state(self, partition: int, state: Mapping[str, Any]) -> None:
        """Replace entries of the optimizer's state for a partition, by name; other entries stay."""

    @abstractmethod
    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        """Return where this rank's partitions hold elements of `parameter`; None when it is frozen or only other ranks
        hold it."""

    @abstractmethod
    def read_loss_scaler(self) -> dict[str, float]:
        """Return the changing values of a dynamic loss scaler (fp16), by name; empty without one."""

    @abstractmethod
    def restore_loss_scaler(self, state: Mapping[str, float]) -> None:
        """Restore values that `read_loss_scaler` returned; other names are ignored."""

    @abstractmethod
    def observe(self, observer: StepObserver | None) -> None:
        """Call `observer` around every unit from now on; None stops that."""
