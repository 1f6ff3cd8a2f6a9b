"""Saving: every rank writes its share, and rank 0 publishes the checkpoint when all of it is on the disk.

A save is written to `tmp-global_stepN`. Each rank writes its layers and its partition of the optimizer (the layers of a
stage are divided among its replicas), flushes them, and reports their sizes and hashes to rank 0. Rank 0 writes state
and manifest, renames the folder and moves `latest`. All that happens in a thread, which communicates with the other
ranks' threads over a process group of its own. With `async_save` it writes a copy of the state in host memory while
training continues; the next save and the end of the run wait for it. (DeepSpeed's decoupled writer queues the tensors
themselves, which training then changes; seen in 0.19.8.)
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections import ChainMap
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from console import progress, report_progress
from errors import UserError
from filesystem import exchange, sync_to_disk, write_atomically
from models.conversion.convert import ENGINE_STATE, ENGINE_STATE_NAME
from models.parallel.exchanges import wait_for
from models.storage.folders import check_disk_space
from models.storage.manifest import STATE_NAME, FileRecord, HashedFile, write_manifest
from models.storage.safetensors_writer import TensorInfo, write_safetensors_to
from models.storage.steps import LATEST_NAME, TEMPORARY_PREFIX
from models.storage.torch_writer import save_torch
from training.checkpoint.retention import KEEP_ALL, Retention, prune_checkpoints
from training.checkpoint.share import plan_whole_share
from training.checkpoint.share_file import ShareFile
from training.checkpoint.state import TrainerState
from training.distributed.host_memory import measure_available_memory
from training.distributed.leaving import saving
from training.distributed.process import make_group_with_timeout, synchronize
from training.distributed.ranks import find_ending, raise_together
from training.engine.engine import Engine

_SLOWEST_RANK = timedelta(hours=2)  # ranks wait this long for the last one to have written its share
_SHARE_OF_MEMORY = 0.8  # of the memory that this host or container has left, for copies
_SECONDS_BETWEEN_POLLS = 0.2  # of the progress of a save that is waited for
_SPARE_BYTES = 16 * 2**20  # headers, state, manifest


class CheckpointWriter:
    """Saves the state of one engine into one `checkpoints` folder. All ranks call each method at the same step."""

    def __init__(
        self,
        engine: Engine,
        checkpoints: Path,
        retention: Retention = KEEP_ALL,
        asynchronous: bool = False,
        *,
        weights_only: bool = False,
        export: Callable[[int], None] = lambda step: None,
    ) -> None:
        """checkpoints: the folder of all steps; the first save makes it. retention: which older steps stay when a save
        is complete. asynchronous: return from `save` once the state is copied, where the hosts' memory has room for
        that. weights_only: without the optimizer's state. export: called on rank 0, in the thread, with the step whose
        checkpoint is complete, before older ones are deleted."""
        self._engine, self._checkpoints, self._retention = engine, checkpoints, retention
        self._asynchronous, self._weights_only, self._export = asynchronous, weights_only, export
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group = make_group_with_timeout(_SLOWEST_RANK)
        self._thread: threading.Thread | None = None
        self._is_share_written, self._has_ended = threading.Event(), threading.Event()
        self._error: UserError | None = None
        self._copies: dict[str, ShareFile] = {}  # of the last save, by file
        self._held = 0  # bytes of host memory that they take

    def save(self, state: TrainerState) -> None:
        """Write `global_step{state.step}`; if asynchronous, only copy the state and start to write it.

        Raises UserError when this or the last save could not be written, or when a weight is not finite.
        """
        self._wait_before(f", before step {state.step}")
        share = plan_whole_share(self._engine, state.step, self._group, self._weights_only)
        state = replace(state, weights_only=self._weights_only)
        folder = self._checkpoints / f"{TEMPORARY_PREFIX}global_step{state.step}"
        copied = sum(file.copy_nbytes for file in share)
        fits = self._prepare(folder, sum(file.nbytes for file in share), copied)
        if not fits:
            self._copies, self._held = {}, 0
        if self._asynchronous and fits:
            self._copies = {file.name: file.copy(self._copies.get(file.name)) for file in share}
            self._held, share = copied, list(self._copies.values())
            synchronize()  # once, for all tensors: training must not change them before
        self._what, self._num_bytes, self._written = f"saving step {state.step}", sum(file.nbytes for file in share), 0
        self._is_share_written.clear()
        self._has_ended.clear()
        self._thread = threading.Thread(target=self._write, args=(folder, share, state), daemon=True)
        self._thread.start()
        if not (self._asynchronous and fits):
            self.wait()

    @property
    def is_writing(self) -> bool:
        """Returns whether this rank is still writing the last save."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises UserError when the save failed."""
        self._wait_before("")

    def _wait_before(self, what: str) -> None:
        """what: what waits for the save, for the bar that shows it."""
        if self.finish(what):
            raise_together(self._error)

    def finish(self, what: str = "") -> bool:
        """Wait until nothing is being written, whatever becomes of it. Returns whether a save was under way. A rank
        that is about to end calls it alone: a save needs only the threads of the others. what: as in `_wait_before`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        with progress(f"{self._what}{what}", self._num_bytes, "B", shown=self._rank == 0) as bar:
            while not self._is_share_written.wait(_SECONDS_BETWEEN_POLLS):
                bar.reach(self._written)
            wait_for([self._has_ended])
        thread.join()
        return True

    def _count(self, num_bytes: int) -> None:
        self._written += num_bytes
        report_progress()

    def _prepare(self, folder: Path, nbytes: int, copied: int) -> bool:
        """Create the empty folder, after a check that its disk has room for what all ranks write: `nbytes` by this one.

        Returns whether a copy of what its ranks write fits into memory on every host; this rank's takes `copied` bytes.
        The same on all ranks: a rank that copies continues training, where one that does not would wait for it.
        """
        gathered: list[Any] = [None] * self._world_size
        available = measure_available_memory()
        dist.all_gather_object(
            gathered, (socket.gethostname(), nbytes, copied, self._held, available), group=self._group
        )
        error = None
        if self._rank == 0:
            try:
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                check_disk_space(self._checkpoints, sum(count for _, count, *_ in gathered) + _SPARE_BYTES)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            except (UserError, OSError) as mistake:
                error = _explain(mistake, folder)
        raise_together(error)
        return all(
            have_room([entry[2:] for entry in gathered if entry[0] == host])
            for host in {entry[0] for entry in gathered}
        )

    @saving()
    def _write(self, folder: Path, share: list[ShareFile], state: TrainerState) -> None:
        """Runs in the thread. Every rank ends with the same `_error`, or None."""
        records: dict[str, FileRecord] = {}
        error = None
        try:
            error = find_nonfinite(share, state.step)
            if error is None:
                records = write_share(folder, share, writes_engine_state=self._rank == 0, wrote=self._count)
        except Exception as mistake:  # of any kind: the other ranks must not wait for this one
            error = _explain(mistake, folder)
        self._is_share_written.set()
        gathered: list[Any] = [None] * self._world_size
        try:
            dist.all_gather_object(gathered, (records, error), group=self._group)
            ended = [next((error for _, error in gathered if error is not None), None)]
            if self._rank == 0 and ended == [None]:
                ended = [self._complete(folder, state, dict(ChainMap(*(part for part, _ in gathered))))]
            dist.broadcast_object_list(ended, src=0, group=self._group)
            self._error = ended[0]
        except Exception as mistake:  # mostly that a rank is gone, or has not done its part in time
            self._error = _explain(mistake, folder)
        finally:
            self._has_ended.set()

    def _complete(self, folder: Path, state: TrainerState, records: dict[str, FileRecord]) -> UserError | None:
        """On rank 0: make the folder a checkpoint, export it where that is due, and delete older ones. Returns what
        went wrong."""
        try:
            publish(folder, self._checkpoints, state, records)
        except Exception as mistake:
            return _explain(mistake, folder)
        what = "its export"
        try:
            self._export(state.step)
            what = "deleting older checkpoints"
            prune_checkpoints(self._checkpoints / f"global_step{state.step}", self._retention)
        except Exception as mistake:
            return _explain_follow_up(mistake, what, state.step)
        return None


def have_room(ranks: list[tuple[int, int, int]]) -> bool:
    """Returns whether the copies of one host's ranks fit into its memory.

    ranks: each (bytes to copy, bytes it holds for copies already, bytes it found available).
    """
    return sum(nbytes - held for nbytes, held, _ in ranks) < _SHARE_OF_MEMORY * min(
        available for *_, available in ranks
    )


def find_nonfinite(share: list[ShareFile], step: int) -> UserError | None:
    """Return an error for weights or state that are not finite, from which no run could continue; None when all are.
    Finite gradients times a large learning rate can produce them."""
    for file in share:
        for name, tensor in file.tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return UserError(
                    f"saving: '{name}' of {file.name} is not finite after step {step}, so that step is not saved; the "
                    "checkpoints before it are untouched. Lower learning_rate and continue with resume=auto"
                )
    return None


def write_share(
    folder: Path, share: list[ShareFile], writes_engine_state: bool, wrote: Callable[[int], None] = lambda count: None
) -> dict[str, FileRecord]:
    """Write a rank's files into `folder`, all of them on the disk on return. Returns their sizes and hashes by name.

    writes_engine_state: write the file that marks a checkpoint as this engine's too; one rank does. wrote: called with
    the number of bytes of each piece that was written. Raises OSError where the disk refuses.
    """
    records = {file.name: _write_file(folder / file.name, partial(_fill, file=file), wrote) for file in share}
    if writes_engine_state:
        records[ENGINE_STATE_NAME] = _write_file(
            folder / ENGINE_STATE_NAME, lambda stream: save_torch(ENGINE_STATE, stream)
        )
    sync_to_disk(folder)
    return records


def _fill(stream: HashedFile, file: ShareFile) -> None:
    if file.name.endswith(".pt"):
        # copy: torch.save writes whole storages, and ZeRO makes the weights views of one flat buffer
        save_torch({name: tensor.to("cpu", copy=True) for name, tensor in file.tensors.items()}, stream)
        return
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in file.tensors.items()]
    infos.sort(key=lambda info: -info.dtype.itemsize)  # stable; each tensor is aligned in its file
    write_safetensors_to(stream, file.name, infos, read=lambda info: file.tensors[info.name].cpu())


def _write_file(
    path: Path, fill: Callable[[HashedFile], Any], wrote: Callable[[int], None] = lambda count: None
) -> FileRecord:
    with HashedFile(path, wrote) as stream:
        fill(stream)
        return stream.finish()


def publish(folder: Path, checkpoints: Path, state: TrainerState, records: dict[str, FileRecord]) -> None:
    """Make the written folder a checkpoint, and point `latest` to it. folder: `tmp-global_stepN` in `checkpoints`.
    records: of the files of all ranks, by name. Raises OSError where the disk refuses."""
    text = json.dumps(asdict(state), indent=2) + "\n"
    record = _write_file(folder / STATE_NAME, lambda stream: stream.write(text.encode()))
    write_manifest(folder, {**records, STATE_NAME: record})
    sync_to_disk(folder)
    final = checkpoints / folder.name.removeprefix(TEMPORARY_PREFIX)
    if final.exists():  # a step that is saved once more: swap, so that the name always exists
        exchange(folder, final)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        os.rename(folder, final)
    sync_to_disk(checkpoints)
    write_atomically(checkpoints / LATEST_NAME, final.name)


def _explain_follow_up(error: Exception, what: str, step: int) -> UserError:
    """Return the error of what follows a save, once its checkpoint has its name."""
    reason = str(error) if isinstance(error, OSError | UserError) else f"{type(error).__name__}: {error}"
    return UserError(
        f"step {step} is saved, but {what} failed: {reason}; fix that or make room, then continue with resume=latest",
        find_ending(error),
    )


def _explain(error: Exception, folder: Path) -> UserError:
    if isinstance(error, OSError):
        reason = f"{error.filename or folder} cannot be written ({error.strerror or error})"
    else:
        reason = (
            str(error)
            if isinstance(error, UserError)
            else f"{folder} could not be written ({type(error).__name__}: {error})"
        )
    return UserError(
        f"saving: {reason}; the checkpoints before it are untouched. Make room or fix the disk, then continue with "
        "resume=auto",
        find_ending(error),
    )
