"""Why a run has ended, as an exit code and as a record."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.small_disk import small_disk

from errors import Ending, UserError
from masking import MASKED
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.writer import _explain
from training.distributed import ending, ranks
from training.distributed.ending import discard_earlier_end, record_end, record_end_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(ending, "_place", None)
    return RunFolder(tmp_path)


def test_the_first_end_is_recorded(folder: RunFolder) -> None:
    record_end(Ending.DISK, "before the run has its folder")
    assert folder.read_ended() == {} and not folder.ended.exists()
    record_end_in(folder.ended, 3)
    record_end(Ending.DISK, "\nerror: no room, https://me:secret@host\n")
    first = folder.read_ended()
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "reason": "disk", "code": 74, "rank": 3, "message": f"error: no room, https://{MASKED}@host",
    }  # fmt: skip
    record_end(143, "stopped by SIGTERM, since another rank has ended")
    assert folder.read_ended()["code"] == 74
    folder.ended.unlink()
    record_end(143, "stopped by SIGTERM")
    assert (folder.read_ended()["reason"], folder.read_ended()["code"]) == ("signal", 143)


def test_a_record_that_cannot_be_written_changes_nothing(folder: RunFolder) -> None:
    record_end_in(folder.path / "missing" / "ended.json", 0)
    record_end(Ending.EXCEPTION, "x")
    folder.ended.write_text("")  # as on a full disk
    assert folder.read_ended() == {}
    folder.ended.write_text(json.dumps({"code": "x"}))
    assert folder.read_ended() == {}


def test_a_record_of_an_earlier_start_is_replaced(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever ends first, also before the main rank has deleted it; a record of this start is left."""
    record_end_in(folder.ended, 1)
    record_end(Ending.LOST_RANK, "an earlier start")
    monkeypatch.setattr(ending, "_BEGAN", datetime.now(UTC) + timedelta(seconds=1))
    record_end_in(folder.ended, 1)
    record_end(Ending.DISK, "this one")
    assert folder.read_ended()["reason"] == "disk"
    monkeypatch.setattr(ending, "_BEGAN", datetime.now(UTC) - timedelta(minutes=1))
    discard_earlier_end(folder.ended)
    record_end(143, "its consequence")
    assert folder.read_ended()["reason"] == "disk"
    folder.ended.write_text("")  # as on a full disk
    discard_earlier_end(folder.ended)
    assert not folder.ended.exists()
    discard_earlier_end(folder.ended)


def test_before_the_folder_is_the_runs_a_mistake_is_recorded_where_no_run_is(tmp_path: Path, folder: RunFolder) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    record_end_in(folder.ended, 0, folder.claim)
    assert not folder.path.exists()
    record_end(Ending.MISTAKE, "num_stages=3")
    assert folder.read_ended()["reason"] == "mistake"
    folder.acquire_lock()  # it was released
    folder.ended.unlink()
    record_end(Ending.MISTAKE, "output_dir is in use")
    assert not folder.ended.exists()
    folder.release_lock()
    folder.write_completed({"step": 3})
    record_end(Ending.MISTAKE, "output_dir holds the export of a finished run")
    assert not folder.ended.exists()
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file" / "run")
    record_end_in(folder.ended, 0, folder.claim)
    record_end(Ending.MISTAKE, "output_dir cannot be written")


def fill(disk: Path) -> None:
    descriptor = os.open(disk / "filler", os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):
        while os.write(descriptor, bytes(4096)):
            pass
    os.close(descriptor)


def test_a_full_disk_takes_the_record(tmp_path: Path, folder: RunFolder) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        record_end_in(disk / "ended.json", 1)
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            (disk / "another.json").write_text("x")
        record_end(Ending.DISK, "no room\n" + 1000 * "its stack trace")
        first = RunFolder(disk).read_ended()
        assert (first["code"], first["rank"]) == (74, 1) and first["message"].startswith("no room\nits")
        record_end(Ending.EXCEPTION, "another rank")
        assert RunFolder(disk).read_ended() == first


def test_where_nothing_can_be_reserved_the_record_is_written(folder: RunFolder, monkeypatch) -> None:
    monkeypatch.setattr(ending, "_reserve", lambda folder: [])
    record_end_in(folder.ended, 0)
    for code in (Ending.DISK, Ending.EXCEPTION):
        record_end(code, "x")
    assert folder.read_ended()["code"] == 74


def lose_peer() -> RuntimeError:
    error = RuntimeError("Connection closed by peer")
    try:
        exec("raise error", {"__name__": "torch.distributed", "error": error})
    except RuntimeError as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("x"), Ending.MISTAKE),
        (UserError("x", Ending.DISK), Ending.DISK),
        (PermissionError(errno.EACCES, "Permission denied"), Ending.MISTAKE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), Ending.DISK),
        (OSError(errno.EIO, "Input/output error"), Ending.DISK),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), Ending.EXCEPTION),
        (KeyError("x"), Ending.EXCEPTION),
        (lose_peer(), Ending.LOST_RANK),
    ],
)
def test_what_an_exception_ends_a_rank_as(error: Exception, expected: Ending, tmp_path: Path) -> None:
    assert ranks.find_ending(error) == expected
    saving = _explain(error, tmp_path)  # the same, as the error of a save
    assert ranks.find_ending(saving) == expected
