"""Where a run takes place, or is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from training.costs.hardware import Machine


@dataclass(frozen=True)
class Target:
    """The ranks and the device of a run.

    machine: whose times the run is split and ordered by; None where no file of conf/hardware describes it, and for a
    run on a CPU. fills: whether a split respects what its GPUs hold. is_planned: the run is not to start here, so this
    machine's packages and GPUs say nothing.
    """

    world_size: int
    has_accelerator: bool
    machine: Machine | None = None
    fills: bool = True
    is_planned: bool = False
