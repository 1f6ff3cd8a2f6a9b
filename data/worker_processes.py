"""Worker processes of torch's DataLoader next to a rank that signals may end.

A rank has threads: the save, heartbeats, the loggers. A process that is forked from it inherits the locks that they
hold at that moment, and no thread that would release them: with Python 3.11 one worker in some thousands never started,
since another thread began or ended meanwhile. So workers are forked from a server with one Python thread
(`forkserver`), which has imported what they need.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which make a rank save and leave
_SECONDS_BETWEEN_LOOKS = 1.0
_ROOT = Path(__file__).resolve().parents[1]
# What workers unpickle, and the program of a run, which `multiprocessing` imports in each of them.
_IMPORTED = ["data.loading.loader", "data.streaming.stream", "trainer_base_ds_mp"]


def start_server() -> None:
    """Start the process that workers are forked from, unless it runs; it ends with this one. Its imports take seconds,
    during which this process can go on."""
    forkserver.set_forkserver_preload(_IMPORTED)
    resource_tracker.ensure_running()  # which would unblock signals
    with _blocked_signals(), _on_path(_ROOT):
        forkserver.ensure_running()


def iterate_dataset(
    dataset: Dataset, *, num_workers: int, pin_memory: bool = False, sampler: range | None = None
) -> Iterator[Any]:
    """Iterate over a data set in its order, or in that of the sampler, read ahead by worker processes. They are
    started here, and end with the iterator. num_workers: 0 reads in this process. Raises UserError where they can have
    no queues."""
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
        multiprocessing_context="forkserver" if num_workers else None,
    )
    if num_workers:
        start_server()
    try:
        return iter(loader)
    except OSError as error:
        if error.filename is not None:
            raise
        raise UserError(
            f"num_workers={num_workers}: {error.strerror}, for the queues of data workers in shared memory; "
            "let this user write to /dev/shm and make it larger (a container: --shm-size 16g), or set num_workers=0"
        ) from error


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals of a run for what is started within this context, so that none is too early."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Let what is started within this context import from `folder`, whatever the current folder is."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _leave_signals_to_rank(worker: int) -> None:
    """A terminal and launchers signal workers too; the rank still needs them for the step that it ends and saves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    """An interpreter that exits with workers sends them SIGTERM and then waits for them, forever if they ignore it. One
    that is killed sends nothing, and torch watches the parent, which is the server."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    while rank.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, _SECONDS_BETWEEN_LOOKS)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(0)


def _keep(batch: Any) -> Any:
    return batch
