"""A folder is complete or absent: outputs in the way, killed conversions, errors of the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.model_folders import convert, export
from support.tiny import save_llama, save_tokenizer

import filesystem
from errors import Ending, UserError
from models.conversion import model_files
from models.storage import folders
from models.weights.sources import open_weights


def test_an_output_in_the_way_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    pipeline = convert(tmp_path / "hf", tmp_path / "pipeline")
    for output, options, message in (
        (pipeline, {}, "exists; pass --overwrite"),
        (tmp_path / "hf", {"overwrite": True}, "overlaps"),
        (tmp_path / "hf/inside", {}, "overlaps"),
        (tmp_path, {"overwrite": True}, "overlaps"),
        (tmp_path / "hf/config.json", {"overwrite": True}, "overlaps"),
        (pipeline / "latest", {"overwrite": True}, "is a file"),
        (pipeline / "global_step0", {"overwrite": True}, "no config.json"),
    ):
        with pytest.raises(UserError, match=message):
            convert(tmp_path / "hf", output, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "pipeline"]


def test_overwrite_replaces_once_the_new_one_is_whole(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    old = convert(tmp_path / "hf", tmp_path / "pipeline")
    (old / "latest").write_text("of the old one")

    def fail(done: int, total: int) -> None:
        if done == total:
            raise UserError("stop")

    with pytest.raises(UserError, match="stop"):
        convert(tmp_path / "hf", old, overwrite=True, progress=fail)
    assert (old / "latest").read_text() == "of the old one"
    convert(tmp_path / "hf", old, overwrite=True)
    assert (old / "latest").read_text() == "global_step0" and not (old / folders.LOCK_NAME).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "pipeline"]
    export(old, tmp_path / "back")


@pytest.mark.parametrize("has_record", [True, False])
def test_what_may_be_replaced(tmp_path: Path, has_record: bool) -> None:
    """has_record: False for a folder that version 1.1 wrote."""
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    pipeline = convert(tmp_path / "hf", tmp_path / "pipeline")
    back = export(pipeline, tmp_path / "back", max_shard_size=50_000)
    for folder in (pipeline, back):
        if not has_record:
            (folder / folders.RECORD_NAME).unlink()
        folders.check_replaceable(folder)
        for name in ("notes.txt", "data.json", "global_step4/trainer_state.json", "global_step0/my.pt"):
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.touch()
            with pytest.raises(UserError, match=f"holds {name}, which neither a conversion nor an export of a run"):
                folders.check_replaceable(folder)
            file.unlink()
    folders.check_replaceable(tmp_path / "not there")


def test_a_run_that_may_write_there_is_not_disturbed(tmp_path: Path) -> None:
    with folders.hold_run_lock(tmp_path / "hf"):
        assert not (tmp_path / folders.LOCK_NAME).exists()  # this folder is not a run's
    lock = filesystem.lock_file(tmp_path / folders.LOCK_NAME)
    with (
        pytest.raises(UserError, match="is in the folder of a run that has not ended"),
        folders.hold_run_lock(tmp_path / "hf"),
    ):
        pass
    lock.release()
    with folders.hold_run_lock(tmp_path / "hf"), pytest.raises(BlockingIOError):
        filesystem.lock_file(tmp_path / folders.LOCK_NAME)


def test_overwrite_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem.ctypes, "CDLL", lambda *_, **__: None)
    test_overwrite_replaces_once_the_new_one_is_whole(tmp_path)


def run_and_die(step: int, convert_once: Callable[[Callable[[int, int], None]], None]) -> int:
    """Run a conversion in a child that kills itself at its report number `step`; return the child's wait status."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        reports = iter(range(1, 1000))
        try:
            convert_once(lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if next(reports) == step else None)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("way", ["convert", "export"])
def test_a_killed_conversion_leaves_nothing_that_looks_finished(way: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", num_hidden_layers=2)
    source, go = tmp_path / "hf", convert
    if way == "export":
        source, go = convert(tmp_path / "hf", tmp_path / "pipeline"), export
    output = tmp_path / "new"
    known = {path.name for path in tmp_path.iterdir()}
    reports: list[int] = []
    go(source, tmp_path / "counted", progress=lambda done, total: reports.append(done))
    shutil.rmtree(tmp_path / "counted")

    for step in range(2, len(reports) + 1):  # the first report comes before anything is written
        status = run_and_die(step, lambda progress: go(source, output, progress=progress))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert not output.exists()
        (left,) = {path.name for path in tmp_path.iterdir()} - known
        assert left.startswith("new.tmp-")
        with pytest.raises(UserError):
            open_weights(str(tmp_path / left))
    go(source, output)  # removes what the last one left
    assert {path.name for path in tmp_path.iterdir()} == known | {"new"}


def test_a_running_conversion_is_left_alone(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    outcome: list[str] = []

    def second_run(done: int, total: int) -> None:
        if done == total:
            convert(tmp_path / "hf", tmp_path / "pipeline")
            outcome.append("done")

    with pytest.raises(UserError, match="appeared while"):
        convert(tmp_path / "hf", tmp_path / "pipeline", progress=second_run)
    assert outcome == ["done"] and sorted(path.name for path in tmp_path.iterdir()) == ["hf", "pipeline"]
    export(tmp_path / "pipeline", tmp_path / "back")


def test_a_full_disk_is_refused_before_and_reported_during_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "hf")
    pipeline = convert(tmp_path / "hf", tmp_path / "pipeline")
    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
        for go, source in ((convert, tmp_path / "hf"), (export, pipeline)):
            with pytest.raises(UserError, match=r"needs 0.02 GB and its disk has 0.00 GB free"):
                go(source, tmp_path / "new")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fails_in = ((convert, tmp_path / "hf", (filesystem.os, "fsync")), (export, pipeline, (model_files, "write_json")))
    for go, source, target in fails_in:
        with monkeypatch.context() as patch:
            patch.setattr(*target, refuse)
            with pytest.raises(UserError, match="cannot be written: No space left") as caught:
                go(source, tmp_path / "new")
            assert caught.value.ending is Ending.DISK
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "pipeline"]
