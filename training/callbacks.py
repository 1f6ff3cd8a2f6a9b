"""User-defined callbacks of a run: `callbacks: [{_target_: my.module.Class, ...}]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from errors import UserError
from masking import print_exception
from training.distributed.ranks import raise_together


@dataclass
class RunView:
    """A callback's view of its run, to read and not to change, and the requests that it may make.

    model: this rank's pipeline stage, not the whole model. step: optimizer steps done. num_tokens: tokens seen so far,
    without padding. record: the last line of metrics.jsonl on the main rank; empty on the others. ended_by: why the run
    ends; empty before `on_end`.
    """

    output_dir: Path
    rank: int
    world_size: int
    last_step: int
    model: torch.nn.Module
    step: int = 0
    num_tokens: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    ended_by: str = ""
    asks_to_stop: bool = False
    asks_to_save: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def stop(self) -> None:
        """Ask the run to end after this step: it is evaluated, saved and exported. One rank is enough to ask."""
        self.asks_to_stop = True

    def save(self) -> None:
        """Ask for a checkpoint at the end of this step. One rank is enough to ask."""
        self.asks_to_save = True


class Callback(Protocol):
    """The methods that a callback may have; a class defines only those that it needs.

    They are called on every rank at the same points, in the order of the config. A rank waits for the others after each
    call, so a slow rank delays all of them. Collectives are allowed if every rank reaches them. A request made in
    `on_save` or later takes effect at the end of the next step.
    """

    def on_step(self, run: RunView) -> None:
        """Called after each step, skipped steps included."""
        ...

    def on_evaluate(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation. metrics: its record, the same on all ranks."""
        ...

    def on_save(self, run: RunView, checkpoint: Path) -> None:
        """Called when a checkpoint is complete: with `async_save` some steps after it was started. `run.step` is the
        current step."""
        ...

    def on_end(self, run: RunView) -> None:
        """Called when the run ends without an error: checkpoints are saved, `hf/` is not exported yet."""
        ...


class Callbacks:
    """The callbacks of a run on this rank. All ranks call each method together."""

    def __init__(
        self,
        callbacks: Sequence[tuple[str, Any]],
        run: RunView,
        *,
        wait_for_save: Callable[[], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """callbacks: each with its name for messages. run: what they see, which the loop keeps up to date.
        wait_for_save: returns when the last save is complete; all ranks call it. group: all ranks, for tensors in host
        memory."""
        self._callbacks, self.view, self._wait_for_save, self._group = callbacks, run, wait_for_save, group
        self._unannounced: Path | None = None  # a checkpoint that is being saved

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, method: str, *arguments: Any) -> None:
        """Call the method of each callback that has it. Raises UserError on the first rank that has failed, and ends
        the other ranks."""
        if not self._callbacks:
            return
        error = None
        for name, callback in self._callbacks:
            try:
                getattr(callback, method, _do_nothing)(self.view, *arguments)
            except Exception as mistake:
                print_exception(mistake, sys.stdout)  # the rank's log
                error = UserError(
                    f"callbacks: {name}.{method} has failed at step {self.view.step} ({type(mistake).__name__}: "
                    f"{mistake}); its stack trace is in {self.view.output_dir}/logs/rank_{self.view.rank}.log. Saved "
                    "checkpoints are complete: fix it, and continue with resume=auto"
                )
                break
        failed, *asked = self._agree(error is not None, self.view.asks_to_stop, self.view.asks_to_save)
        self.view.asks_to_stop, self.view.asks_to_save = asked
        if failed:
            self._wait_for_save()
            raise_together(error)

    def take_requests(self) -> tuple[bool, bool]:
        """Return whether any rank has asked to stop and whether any has asked to save, since the last call."""
        asked = self.view.asks_to_stop, self.view.asks_to_save
        self.view.asks_to_stop = self.view.asks_to_save = False
        return asked

    def expect_save(self, checkpoint: Path) -> None:
        """Record that this checkpoint is being saved; `on_save` follows when it is complete."""
        self._unannounced = checkpoint

    def announce_save(self, is_writing: bool) -> None:
        """Call `on_save` if no rank is still writing. is_writing: whether this rank is."""
        if self._callbacks and self._unannounced is not None and not self._agree(is_writing)[0]:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait until the checkpoint that is being saved is complete, and call `on_save`."""
        checkpoint, self._unannounced = self._unannounced, None
        if self._callbacks and checkpoint is not None:
            self._wait_for_save()
            self.call("on_save", checkpoint)

    def _agree(self, *flags: bool) -> list[bool]:
        numbers = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(number) for number in numbers.tolist()]


def _do_nothing(*arguments: Any) -> None: ...
