"""The loader of a stream: step k takes the rows from k x global_batch_size on, over blocks and passes.

Every rank that reads data tokenizes the whole stream, and takes its share of each step's rows. Steps are read forward
only; a step that is left out (`skip_data_intervals`) is read and thrown away.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from data.loading.loader import LoaderOptions, StepLoader
from data.loading.row_source import RowSource
from data.streaming.blocks import Cursor
from data.streaming.stream import RowStream, StreamPlan


class StreamLoader(StepLoader):
    """The micro-batches of a stream, from `first_step` on, at which the stream is at `cursor`.

    num_steps: the length of the run, which a stream itself does not have.
    """

    first = None

    def __init__(
        self,
        plan: StreamPlan,
        cursor: Cursor,
        options: LoaderOptions,
        *,
        first_step: int,
        num_steps: int,
        global_batch_size: int,
        gradient_accumulation_steps: int,
    ) -> None:
        # The processes that read ahead are those of the stream: this rank's batches are made of their rows here.
        super().__init__(replace(options, num_workers=0), global_batch_size, gradient_accumulation_steps)
        self._stream = RowStream(plan, cursor, options.num_workers)
        self._global_batch_size, self._num_steps = global_batch_size, num_steps
        self._next_step = first_step  # the one at which the stream is

    def __len__(self) -> int:
        return self._num_steps

    def name_samples(self, step: int) -> str:
        """Return the rows of the step's global batch in words: which records they were made of is not kept."""
        first = step * self._global_batch_size
        return f"rows {first} to {first + self._global_batch_size - 1} of the stream (counted from 0)"

    def describe_position(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint at the step keeps: where the stream is after the steps before it."""
        self._skip_to(step)
        return {"cursor": self._stream.cursor.to_json()}

    def describe_records(self) -> str:
        """Return in words what became of the records that were read so far."""
        return self._stream.counts.describe()

    def close(self) -> None:
        """End the processes that tokenize; no step is read afterwards."""
        super().close()
        self._stream.close()

    def _open_step(self, step: int) -> tuple[RowSource, np.ndarray]:
        self._skip_to(step)
        self._next_step = step + 1
        return self._stream.take(self._global_batch_size), np.arange(self._global_batch_size)

    def _skip_to(self, step: int) -> None:
        if step < self._next_step:
            raise RuntimeError(f"the stream is at step {self._next_step}, and step {step} is before it")
        for _ in range(step - self._next_step):
            self._stream.take(self._global_batch_size)
        self._next_step = step
