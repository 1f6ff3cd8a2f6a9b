"""The keys of a distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from training.config.ranges import at_least, positive, share


class Divergence(Enum):
    """How far a student's distribution is from its teacher's, see `divergence.py`."""

    forward = "forward"
    reverse = "reverse"
    jensen_shannon = "jensen_shannon"


@dataclass
class DistillConfig:
    """The group `distill`."""

    teacher: str | None = None  # as model_name_or_path, with the same tokens; None: no distillation
    coef: float = share(default=0.5)  # of the distillation loss; the cross entropy has 1 - coef
    temperature: float = positive(default=1.0)  # of both distributions
    divergence: Divergence = Divergence.forward
    # The teacher's most probable tokens that are known at each target; None, with `online`: the whole vocabulary
    top_k: int | None = at_least(1, default=64)
    online: bool = False  # whether the teacher stays in memory next to the student, and runs before each step
    num_stages: int | None = at_least(1, default=None)  # of the teacher; None: as the run
    tensor_parallel_size: int | None = at_least(1, default=None)  # of the teacher; None: as the run
    # The teacher's architecture, for a plan where its folder is not there, as a file of `conf/model/`
    model: dict[str, Any] = field(default_factory=dict)
