"""Says how long the first step takes before it has ended, from the passes that are done.

The plan says at which share of a step each pass of the first stage ends. The first micro-batch also pays for what
happens once (allocations, kernels that are chosen or compiled), so the time of the others is what the rest is
estimated by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from console import say
from formatting import render_seconds
from training.engine.engine import BACKWARD, FORWARD, WEIGHTS
from training.objectives.registry import get_objective
from training.observability.stage_timer import StageTimer
from training.planner.plan import Plan

_SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_LINES = 0.2, 30.0
_FEWEST_SECONDS = 2.0  # that have passed, and that are left, for a line


def list_pass_ends(plan: Plan) -> list[float]:
    """Return the share of the step at which each pass of the first stage ends, in order."""
    return sorted(p.stop / plan.step_seconds for p in plan.passes if p.stage_id == 0)


def estimate_step(shares: Sequence[float], seconds: Sequence[float], first_backward: int) -> float | None:
    """Return the seconds of a step of which some passes are done; None before the first backward pass.

    shares: of the step, at the end of each pass, by the plan. seconds: from the start of the step to the end of each
    pass that is done. first_backward: the index of the first backward pass.
    """
    last = len(seconds) - 1
    if last < first_backward:
        return None
    share = shares[last] - shares[first_backward]
    if share <= 0:
        return seconds[last] / shares[last]
    return seconds[last] + (1 - shares[last]) * (seconds[last] - seconds[first_backward]) / share


class FirstStep:
    """Follows a step in a thread, since the host runs ahead of a GPU and then waits for it."""

    def __init__(self, plan: Plan, timer: StageTimer) -> None:
        self._shares, self._timer = list_pass_ends(plan), timer
        # Which the plan counts with the forward passes of the step
        runs_first = get_objective(plan.run.config).pass_over(plan.run.config) is not None
        self._num_before = len(plan.schedule.list_forward(0)) if runs_first else 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._since = time.monotonic()
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        next_line = _FEWEST_SECONDS
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            elapsed = time.monotonic() - self._since
            if elapsed >= next_line and (text := self._describe(elapsed)):
                say(text)
                next_line = elapsed + _SECONDS_BETWEEN_LINES

    def _describe(self, elapsed: float) -> str:
        done = [(unit, at) for unit, at in self._timer.list_finished() if unit in (FORWARD, BACKWARD, WEIGHTS)]
        passes = done[self._num_before :]
        first_backward = next((i for i, (unit, _) in enumerate(passes) if unit == BACKWARD), len(passes))
        whole = estimate_step(self._shares, [at for _, at in passes], first_backward)
        if whole is None or whole - elapsed < _FEWEST_SECONDS:
            return ""
        passed = f"{len(passes)} of {len(self._shares)} passes after {render_seconds(elapsed)}"
        return f"first step: {passed}, about {render_seconds(whole)} in all"
