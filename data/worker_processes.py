"""Worker processes of torch's DataLoader next to a rank that signals may end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which make a rank save and leave


def iterate_dataset(
    dataset: Dataset, *, num_workers: int, pin_memory: bool = False, sampler: range | None = None
) -> Iterator[Any]:
    """Iterate over a data set in its order, or in that of the sampler, read ahead by worker processes. They are
    started here, and end with the iterator."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=_keep,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # An iterator draws a seed; from the global generator that would shift the dropout of a resumed run.
        generator=torch.Generator(),
        worker_init_fn=_leave_signals_to_rank if num_workers else None,
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # workers inherit it, so that no signal is too early
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave_signals_to_rank(worker: int) -> None:
    """A terminal and launchers signal workers too; the rank still needs them for the step that it ends and saves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_end_when_terminated_by_rank, daemon=True).start()


def _end_when_terminated_by_rank() -> None:
    """An interpreter that exits with workers sends them SIGTERM and then waits for them, forever if they ignore it."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
        pass
    os._exit(0)


def _keep(batch: Any) -> Any:
    return batch
