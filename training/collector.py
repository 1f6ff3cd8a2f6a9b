"""Python's cyclic garbage collection between the steps of a run, in place of whenever objects were allocated.

Within a pass it stops one rank for as long as it looks through the objects of the process, while the other ranks wait.
"""

from __future__ import annotations

import gc

EVERY = 50  # steps between collections of what is new; torchtitan's `gc_freq` has the same default


class Collector:
    """Collects at steps, evaluations and saves, from `start` to `close`. Where collection is off, as
    `deepspeed.disable_python_gc` has it, it stays off."""

    def __init__(self) -> None:
        self._is_active = False

    def start(self) -> None:
        self._is_active = gc.isenabled()
        gc.disable()

    def finish_step(self, step: int) -> None:
        """Collect what is new since the last collections, every so many steps."""
        if self._is_active and step % EVERY == 0:
            gc.collect(1)

    def free(self) -> None:
        """Collect everything: cycles may hold memory of the device."""
        if self._is_active:
            gc.collect()

    def close(self) -> None:
        if self._is_active:
            gc.enable()
