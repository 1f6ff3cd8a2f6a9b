"""A save is complete or does not exist. The tensors themselves: test_run.py, test_resume_layouts.py."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_checkpoint import STATE

from errors import Ending, UserError
from models.storage import manifest
from models.storage.steps import list_checkpoints, step_of
from training.checkpoint import share_file
from training.checkpoint import writer as checkpoint_writer
from training.checkpoint.resume import find_damage, find_resume
from training.checkpoint.state import read_state, remove_leftovers
from training.checkpoint.writer import CheckpointWriter, ShareFile, have_room

TENSORS = {"layer_00-model_states.pt": 1.0, "optimizer-stage_00-dp_00.safetensors": 2.0}


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointWriter]:
    """The writer of a single rank, into tmp_path. Its thread has ended before the next test begins."""

    def gather(gathered: list[Any], mine: Any, group: object) -> None:
        gathered[0] = mine

    def raise_alone(error: UserError | None) -> None:
        if error is not None:
            raise error

    alone = SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
        all_gather_object=gather,
        broadcast_object_list=lambda *_, **__: None,
    )
    monkeypatch.setattr(checkpoint_writer, "dist", alone)
    monkeypatch.setattr(checkpoint_writer, "make_group_with_timeout", lambda timeout: None)
    monkeypatch.setattr(checkpoint_writer, "raise_together", raise_alone)
    monkeypatch.setattr(
        checkpoint_writer,
        "plan_whole_share",
        lambda *_: [ShareFile(n, {"x@0": torch.full((4, 2), v)}) for n, v in TENSORS.items()],
    )
    writer = CheckpointWriter(object(), tmp_path)
    yield writer
    if (thread := writer._thread) is not None:
        thread.join()


def save(writer: CheckpointWriter, step: int) -> None:
    writer.save(replace(STATE, step=step))


def latest(folder: Path) -> Path:
    resumable = find_resume("latest", folder, trust=False)
    assert resumable.damages == [] and find_damage(resumable.candidates[0], 0, 1) is None
    return resumable.candidates[0]


def test_a_save_is_found_and_read_back(writer: CheckpointWriter, tmp_path: Path) -> None:
    save(writer, 2)
    assert latest(tmp_path) == tmp_path / "global_step2"
    save(writer, 4)
    assert latest(tmp_path) == tmp_path / "global_step4" and read_state(tmp_path / "global_step4") == replace(
        STATE, step=4
    )
    assert sorted(file.name for file in latest(tmp_path).iterdir()) == [
        "layer_00-model_states.pt",
        "manifest.json",
        "mp_rank_00_model_states.pt",
        "optimizer-stage_00-dp_00.safetensors",
        "trainer_state.json",
    ]
    weights = torch.load(latest(tmp_path) / "layer_00-model_states.pt", weights_only=True)
    assert weights["x@0"].tolist() == [[1.0, 1.0]] * 4


@pytest.mark.parametrize(
    "owner, name",
    [
        (checkpoint_writer, "write_share"),
        (checkpoint_writer, "save_torch"),
        (manifest, "sync_to_disk"),
        (os, "rename"),
        (checkpoint_writer, "write_atomically"),
    ],
)
def test_a_save_that_fails_leaves_the_one_before(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    save(writer, 2)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="saving: somewhere cannot be written .No space left on device.; the check"),
    ):
        patch.setattr(owner, name, fail)
        save(writer, 4)
    assert latest(tmp_path) == tmp_path / "global_step2"
    remove_leftovers(tmp_path)
    save(writer, 4)
    assert latest(tmp_path) == tmp_path / "global_step4"


@pytest.mark.parametrize("size", [10, 10_000_000], ids=["small", "large"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_disk_that_is_full_is_survived(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    save(writer, 2)

    class OnFullDisk(manifest.HashedFile):
        def __init__(self, path: Path, *given: object) -> None:
            super().__init__(path, *given)
            if path.name == name:
                self._file = open("/dev/full", "wb")

    monkeypatch.setattr(
        checkpoint_writer, "plan_whole_share", lambda *_: [ShareFile(n, {"x@0": torch.zeros(size)}) for n in TENSORS]
    )
    monkeypatch.setattr(checkpoint_writer, "HashedFile", OnFullDisk)
    with pytest.raises(
        UserError,
        match="saving: .*tmp-global_step4.* cannot be written .*; the checkpoints before it are untouched. Make room",
    ) as caught:
        save(writer, 4)
    assert caught.value.ending is Ending.DISK
    assert latest(tmp_path) == tmp_path / "global_step2"


def test_no_room_is_reported_before_a_byte_is_written(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="saving: .* needs 0.02 GB and its disk has 0.00 GB free"):
        save(writer, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("atomic", [True, False], ids=["exchange", "no exchange"])
def test_a_step_that_is_saved_again_replaces_the_old(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    save(writer, 2)
    monkeypatch.setitem(TENSORS, "layer_00-model_states.pt", 3.0)
    if not atomic:
        monkeypatch.setattr("filesystem.RENAME_EXCHANGE", 1 << 30)  # no such flag, as on NFS
    save(writer, 2)
    assert torch.load(latest(tmp_path) / "layer_00-model_states.pt", weights_only=True)["x@0"][0, 0] == 3.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest"]


@pytest.mark.parametrize("what", ["its export", "deleting older checkpoints"])
def test_a_failure_after_a_save_does_not_deny_the_save(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "there")

    if what == "its export":
        monkeypatch.setattr(writer, "_export", refuse)
    else:
        monkeypatch.setattr(checkpoint_writer, "prune_checkpoints", refuse)
    with pytest.raises(UserError, match=f"^step 2 is saved, but {what} failed: .*Permission denied: 'there'; fix"):
        save(writer, 2)
    assert latest(tmp_path) == tmp_path / "global_step2"


def test_other_ranks_hear_of_a_failure(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(gathered: list[Any], mine: Any, group: object) -> None:
        gathered[:] = (
            [mine, ({}, UserError("saving: rank 1 has no room"))]
            if isinstance(mine[0], dict)
            else [mine, ("elsewhere", 0, 0, 0, 1)]
        )

    monkeypatch.setattr(checkpoint_writer.dist, "all_gather_object", gather)  # rank 1 is another host's
    writer._world_size = 2
    with pytest.raises(UserError, match="rank 1 has no room"):
        save(writer, 2)
    assert not (tmp_path / "latest").exists()


def test_training_continues_while_a_copy_is_written(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer._asynchronous, trained, may_write = True, torch.ones(3), threading.Event()
    write_share = checkpoint_writer.write_share

    def write_late(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(20)
        return write_share(*args, **kwargs)

    monkeypatch.setattr(checkpoint_writer, "write_share", write_late)
    monkeypatch.setattr(
        checkpoint_writer, "plan_whole_share", lambda *_: [ShareFile("layer_00-model_states.pt", {"x": trained})]
    )
    save(writer, 2)
    trained.fill_(5.0)  # the next step
    assert not (tmp_path / "latest").exists() and find_checkpoints(tmp_path) == []
    may_write.set()
    save(writer, 4)  # waits for the first
    assert 2 in find_checkpoints(tmp_path)
    writer.wait()
    assert latest(tmp_path) == tmp_path / "global_step4"
    copies = writer._copies["layer_00-model_states.pt"].tensors["x"].data_ptr()
    save(writer, 6)
    assert writer._copies["layer_00-model_states.pt"].tensors["x"].data_ptr() == copies  # the same memory
    for step, value in ((2, 1.0), (4, 5.0)):
        assert (
            torch.load(tmp_path / f"global_step{step}" / "layer_00-model_states.pt", weights_only=True)["x"].tolist()
            == [value] * 3
        )


def pretend_to_be_on_a_gpu(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """The tensors are on the CPU; the operations on them are recorded in `events`."""
    copy = torch.Tensor.copy_

    def copy_noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        events.append("queued" if non_blocking else "blocked")
        return copy(self, source)

    def allocate(like: torch.Tensor) -> torch.Tensor:
        events.append("pinned")
        return torch.empty_like(like)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_noted)
    monkeypatch.setattr(share_file, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(share_file, "_allocate_pinned", allocate)
    monkeypatch.setattr(checkpoint_writer, "synchronize", lambda: events.append("waited"))


def test_copies_from_a_gpu_are_pinned_and_waited_for_once(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer._asynchronous = True
    events: list[str] = []
    pretend_to_be_on_a_gpu(monkeypatch, events)
    write_share = checkpoint_writer.write_share
    monkeypatch.setattr(
        checkpoint_writer, "write_share", lambda *a, **k: events.append("written") or write_share(*a, **k)
    )
    save(writer, 2)
    writer.wait()
    assert events[:6] == ["pinned", "queued"] * len(TENSORS) + ["waited", "written"]
    events.clear()
    save(writer, 4)  # into the same memory
    writer.wait()
    assert events[:4] == ["queued"] * len(TENSORS) + ["waited", "written"]
    assert latest(tmp_path) == tmp_path / "global_step4"


def test_copies_from_a_gpu_take_what_pinning_rounds_up_to(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer._asynchronous = True
    share = [ShareFile("layer_00-model_states.pt", {"x": torch.zeros(5), "y": torch.zeros(9)})]  # 20 and 36 bytes
    monkeypatch.setattr(checkpoint_writer, "plan_whole_share", lambda *_: share)
    limit = (32 + 64) / checkpoint_writer._SHARE_OF_MEMORY
    found: dict[float, bool] = {}
    pretend_to_be_on_a_gpu(monkeypatch, [])
    for available in (limit - 1, limit + 1):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_writer, "measure_available_memory", lambda: available)
            save(writer, 2)
            found[available] = bool(writer._copies)
            writer.wait()
    assert list(found.values()) == [False, True]


def test_an_error_during_training_is_reported_at_the_end(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer._asynchronous = True
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_torch", lambda *_: 1 / 0)
        save(writer, 2)
        with pytest.raises(UserError, match="saving: .*tmp-global_step2 could not be written .ZeroDivisionError"):
            writer.wait()
    writer.wait()  # reported once


def test_a_save_under_way_reaches_the_disk_whatever_ends_the_run(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.finish()  # nothing is being written
    writer._asynchronous, write_share = True, checkpoint_writer.write_share

    def write_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return write_share(*args, **kwargs)

    monkeypatch.setattr(checkpoint_writer, "write_share", write_slowly)
    save(writer, 2)
    assert find_checkpoints(tmp_path) == []
    writer.finish()
    assert latest(tmp_path) == tmp_path / "global_step2"


def test_where_a_copy_does_not_fit_the_save_is_waited_for(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer._asynchronous = True
    monkeypatch.setattr(checkpoint_writer, "measure_available_memory", lambda: 10)
    monkeypatch.setattr(ShareFile, "copy", lambda *_: pytest.fail("copied"))
    save(writer, 2)
    assert latest(tmp_path) == tmp_path / "global_step2"


def find_checkpoints(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder)]


def test_all_ranks_agree_whether_every_host_has_room_for_copies() -> None:
    gib = 2**30
    assert have_room([(10 * gib, 0, 30 * gib), (10 * gib, 10 * gib, 29 * gib)])
    assert not have_room(
        [(10 * gib, 0, 30 * gib), (10 * gib, 0, 20 * gib)]
    )  # the second looked when the first had begun to copy
