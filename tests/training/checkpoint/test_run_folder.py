"""Who may write into a run's folder, and files that are complete or do not exist."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from errors import UserError
from filesystem import write_atomically
from training.checkpoint import run_folder
from training.checkpoint.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import sys, time
from training.checkpoint.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.acquire_lock()
print("taken", flush=True)
time.sleep(60)
"""


@contextmanager
def another_run(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_folder_in_use_is_refused_until_its_run_is_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out")
    with another_run(folder.path) as process:
        folder.write_completed({"step": 1})
        with pytest.raises(
            UserError, match=f"output_dir={folder.path} is in use by another run .*; give another output_dir"
        ):
            folder.acquire_lock()
        assert folder.completed.exists()  # nothing of the other run was touched
        process.send_signal(signal.SIGKILL)
        process.wait()
        folder.acquire_lock()
    assert folder.read_completed() == {"step": 1}  # the run may find that it is complete
    folder.reopen()
    assert folder.read_completed() == {}
    folder.release_lock()


def test_a_released_folder_can_be_taken_again(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.acquire_lock()
    with pytest.raises(UserError):
        second.acquire_lock()
    first.release_lock()
    second.acquire_lock()
    second.release_lock()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder, "lock_file", refuse)
    with pytest.raises(
        UserError, match=f"output_dir={tmp_path} cannot be locked: No locks available; .* file system that has locks"
    ):
        RunFolder(tmp_path).acquire_lock()


def fill(folder: RunFolder) -> None:
    for directory in (folder.checkpoints / "global_step2", folder.export, folder.path / "mine"):
        directory.mkdir(parents=True)
    (folder.checkpoints / "latest").write_text("global_step2")
    folder.metrics.write_text('{"step": 1}\n')


def test_checkpoints_are_not_written_over_unasked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_usable(resuming=False, overwrite=False)
    fill(folder)
    folder.check_usable(resuming=True, overwrite=False)
    folder.check_usable(resuming=False, overwrite=True)
    with pytest.raises(
        UserError,
        match=f"output_dir={tmp_path} holds checkpoints .* resume=latest, .* overwrite_output_dir=true .* another",
    ):
        folder.check_usable(resuming=False, overwrite=False)


def test_checkpoints_without_latest_are_not_written_over_unasked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.find_checkpoint(2).mkdir(parents=True)
    with pytest.raises(UserError, match=f"output_dir={tmp_path} holds checkpoints .* resume=latest"):
        folder.check_usable(resuming=False, overwrite=False)
    folder.check_usable(resuming=True, overwrite=False)
    folder.check_usable(resuming=False, overwrite=True)


def test_overwriting_removes_the_old_run_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    fill(folder)
    folder.tracker_id.write_text("the run before")  # this one gets its own page
    folder.acquire_lock()
    folder.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "mine"]
    folder.release_lock()


def test_overwriting_deletes_what_a_link_leads_to_and_keeps_the_link(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out")
    fill(folder)
    for path in (folder.checkpoints, folder.metrics):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert folder.measure() == len("global_step2")
    folder.clear()
    assert list((tmp_path / "checkpoints").iterdir()) == [] and not (tmp_path / "metrics.jsonl").exists()
    assert folder.checkpoints.is_symlink()
    folder.clear()  # nothing is left to delete


def test_what_cannot_be_deleted_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    fill(folder)
    unlink = os.unlink

    def refuse(path: str, *args: object, **options: object) -> None:  # root may delete anything
        if path == "latest":
            raise PermissionError(13, "Permission denied", path)
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(UserError, match="overwrite_output_dir=true: .*latest cannot be deleted: Permission denied; "):
        folder.clear()


@pytest.mark.parametrize("where", ["checkpoints/global_step2", "hf", "hf-step2"])
def test_overwriting_is_refused_for_what_the_run_starts_from(tmp_path: Path, where: str) -> None:
    folder = RunFolder(tmp_path / "out")
    fill(folder)
    (folder.path / "hf-step2").mkdir()
    (tmp_path / "link").symlink_to(folder.path / where)
    (tmp_path / "elsewhere").mkdir()
    (folder.path / where / "led_away").symlink_to(tmp_path / "elsewhere")
    for source in (folder.path / where, tmp_path / "link", folder.path / where / "led_away"):
        with pytest.raises(
            UserError, match=f"would delete .*/{where.partition('/')[0]}, where adapter.name_or_path is"
        ):
            sources = [("model_name_or_path", tmp_path / "elsewhere"), ("adapter.name_or_path", source)]
            folder.check_keeps(sources, overwrite=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"output_dir={tmp_path}/file/out cannot be written: {tmp_path}/file is a file"):
        RunFolder(tmp_path / "file" / "out").check_usable(False, False)
    monkeypatch.setattr(run_folder.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=f"{tmp_path} is read-only"):
        RunFolder(tmp_path / "new" / "out").check_usable(False, False)


def test_a_file_is_old_or_new_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "latest"
    file.write_text("old")
    seen: list[tuple[str, str]] = []  # (what a reader finds, what is about to replace it) at the moment of the rename

    def replace(temporary: Path, target: Path) -> None:
        seen.append((file.read_text(), Path(temporary).read_text()))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        write_atomically(file, "new")
    assert seen == [("old", "new")] and file.read_text() == "old"
    write_atomically(file, "newer")
    assert file.read_text() == "newer" and list(tmp_path.iterdir()) == [file]


def test_it_is_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "file", "text")
    assert calls == ["fsync", "replace", "fsync"]  # the content, the name, the folder


def test_each_of_many_sources_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus may have a hundred thousand files, and each look follows links."""
    folder, looks, resolve = RunFolder(tmp_path / "out"), list[Path](), Path.resolve

    def look(path: Path) -> Path:
        looks.append(path)
        return resolve(path)

    monkeypatch.setattr(Path, "resolve", look)
    folder.check_keeps([("train_file", tmp_path / f"{number}.jsonl") for number in range(200)], overwrite=False)
    assert len(looks) < 250
    with pytest.raises(UserError, match="would write over .*/hf, where train_file is"):
        folder.check_keeps([("train_file", tmp_path / "out" / "x" / ".." / "hf" / "a.jsonl")], overwrite=False)
