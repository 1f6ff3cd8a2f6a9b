"""File systems that cannot do all that a local disk can."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

import filesystem
from filesystem import publish_folder, sync_to_disk, write_atomically


def test_folders_that_cannot_be_synced_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filesystem._warned.clear()
    refused = {stat.S_ISDIR: errno.EINVAL}

    def sync(descriptor: int) -> None:
        for is_kind, number in refused.items():
            if is_kind(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", sync)
    (tmp_path / "below").mkdir()
    for file in (tmp_path / "a", tmp_path / "below" / "b"):
        write_atomically(file, "content")
    (warning,) = caplog.records
    assert warning.getMessage().startswith(f"{tmp_path} is on a file system that cannot sync folders")
    for changed in ({stat.S_ISREG: errno.EINVAL}, {stat.S_ISREG: errno.EIO}, {stat.S_ISDIR: errno.EIO}):
        refused.clear()
        refused |= changed
        with pytest.raises(OSError):
            write_atomically(tmp_path / "c", "content")
    assert len(caplog.records) == 1


def test_of_two_folders_for_one_name_the_first_stays(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.tmp").mkdir()
        (tmp_path / f"{number}.tmp" / "file").write_text(str(number))
    for number in (1, 2):
        publish_folder(tmp_path / f"{number}.tmp", tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "file").read_text() == "1"
    (tmp_path / "3.tmp").mkdir()
    with pytest.raises(FileNotFoundError):
        publish_folder(tmp_path / "4.tmp", tmp_path / "other")
    sync_to_disk(tmp_path)
