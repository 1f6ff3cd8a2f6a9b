"""A run that starts from an earlier step sets the later ones aside, and its restarts go by what it recorded."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_checkpoint import write_checkpoint

import filesystem
from errors import UserError
from models.storage.steps import list_checkpoints
from training.checkpoint import timeline
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.timeline import (
    Abandoned,
    announce_start,
    find_abandoned,
    find_last_step,
    find_own,
    name_start,
    record_start,
    set_aside,
)
from training.config.schema import LoggerConfig
from training.distributed.ranks import SINGLE_PROCESS
from training.observability.loggers import identify_run
from training.run import begin_line
from training.setup import Run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that has finished at step 6, with exports of steps 2 and 4, and of its end."""
    folder = RunFolder(tmp_path / "out")
    folder.checkpoints.mkdir(parents=True)
    for name in ("config.json", "1_Pooling/config.json"):
        (folder.checkpoints / name).parent.mkdir(exist_ok=True)
        (folder.checkpoints / name).write_text("{}")
    for step in (2, 4, 6):
        write_checkpoint(folder.checkpoints, step)
    for export in (folder.find_export(2), folder.find_export(4), folder.export):
        export.mkdir()
        (export / "config.json").write_text("{}")
    folder.metrics.write_text('{"step": 1}\n{"step": 5}\n')
    folder.events.write_text('{"step": 6}\n')
    folder.write_completed({"step": 6})
    return folder


def names(abandoned: Abandoned) -> list[str]:
    return [path.name for path in [*abandoned.steps, *abandoned.exports]]


def list_tree(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_what_comes_after_the_start_is_abandoned(folder: RunFolder) -> None:
    earlier = find_abandoned(folder, folder.find_checkpoint(2))
    assert names(earlier) == ["global_step6", "global_step4", "hf-step4", "hf"]
    assert earlier.measure() == 2 * sum(f.stat().st_size for f in folder.find_checkpoint(4).iterdir()) + 4
    assert names(find_abandoned(folder, folder.find_checkpoint(6))) == []
    folder.find_checkpoint(6).rename(folder.path / "removed by hand")
    assert names(find_abandoned(folder, folder.find_checkpoint(4))) == ["hf"], "the run had ended at step 6"
    folder.reopen()
    assert not find_abandoned(folder, folder.find_checkpoint(4))
    assert names(find_abandoned(folder, None)) == ["global_step4", "global_step2", "hf-step2", "hf-step4", "hf"]


def test_no_step_of_another_line_is_kept(folder: RunFolder, tmp_path: Path) -> None:
    """Those before the start are not the ones that led to it, and neither are their exports."""
    (tmp_path / "other").mkdir()
    other = write_checkpoint(tmp_path / "other", 4)
    abandoned = find_abandoned(folder, other)
    assert names(abandoned) == ["global_step6", "global_step4", "global_step2", "hf-step2", "hf-step4", "hf"]
    place = set_aside(folder, abandoned)
    assert list_checkpoints(folder.checkpoints) == [] and not (folder.checkpoints / "latest").exists()
    assert (place / "metrics.jsonl").exists()
    assert list_tree(folder.path) == ["checkpoints", "events.jsonl", "metrics.jsonl"]


def test_no_records_of_a_run_that_saved_nothing_are_those_of_another_folders_start(
    folder: RunFolder, tmp_path: Path
) -> None:
    """Its lines for steps before the start would be taken for those that led to it."""
    (tmp_path / "other").mkdir()
    config: Any = SimpleNamespace(overwrite_output_dir=False)
    own: Any = SimpleNamespace(config=config, resume_from=folder.find_checkpoint(6))
    assert begin_line(Run(SINGLE_PROCESS, folder, own)) == [] and folder.metrics.exists() and folder.events.exists()
    for path in [*list_checkpoints(folder.checkpoints), *folder.list_exports().values(), folder.export]:
        shutil.rmtree(path)
    other: Any = SimpleNamespace(config=config, resume_from=write_checkpoint(tmp_path / "other", 4))
    assert begin_line(Run(SINGLE_PROCESS, folder, other)) == []
    assert not folder.metrics.exists() and not folder.events.exists()


def test_no_file_of_a_start_that_saved_nothing_becomes_the_runs_own(folder: RunFolder, tmp_path: Path) -> None:
    """A chat template or an adapter's config would be exported with weights that were never trained so."""
    (folder.checkpoints / "adapter_config.json").write_text("{}")
    config: Any = SimpleNamespace(overwrite_output_dir=False)
    shared = {file.name for file in folder.checkpoints.rglob("*.json")} - {"trainer_state.json", "manifest.json"}
    own: Any = SimpleNamespace(config=config, resume_from=folder.find_checkpoint(2))
    begin_line(Run(SINGLE_PROCESS, folder, own))
    assert (folder.checkpoints / "adapter_config.json").is_file()
    new: Any = SimpleNamespace(config=config, resume_from=None)
    begin_line(Run(SINGLE_PROCESS, folder, new))
    assert [path.name for path in folder.checkpoints.rglob("*.json") if folder.abandoned not in path.parents] == []
    kept = {file.name for file in (folder.abandoned / "2").rglob("*.json")}
    assert shared <= kept and {"adapter_config.json", "config.json"} <= shared


def test_a_step_is_the_runs_own_by_whatever_path(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.checkpoints)
    assert find_own(folder, tmp_path / "link" / "global_step2") == folder.find_checkpoint(2)
    folder.find_checkpoint(4).rename(tmp_path / "global_step4")
    folder.find_checkpoint(4).symlink_to(tmp_path / "global_step4")
    assert find_own(folder, folder.find_checkpoint(4)) == find_own(folder, tmp_path / "global_step4") is not None
    assert find_own(folder, None) is None and find_own(folder, tmp_path / "global_step6") is None


def test_abandoned_steps_are_a_folder_of_checkpoints(folder: RunFolder) -> None:
    abandoned = find_abandoned(folder, folder.find_checkpoint(2))
    assert abandoned.describe() == "global_step6, global_step4, hf-step4, hf, since the run starts from step 2"
    place = set_aside(folder, abandoned)
    assert place == folder.checkpoints / "abandoned" / "1"
    assert list_tree(place) == [
        "1_Pooling", "completed.json", "config.json", "events.jsonl", "global_step4", "global_step6", "hf", "hf-step4",
        "latest", "metrics.jsonl",
    ]  # fmt: skip
    assert (place / "1_Pooling" / "config.json").read_text() == "{}"
    assert (place / "latest").read_text() == "global_step6" and len(list(place.glob("global_step6/*"))) == 5
    assert list_tree(folder.checkpoints) == ["1_Pooling", "abandoned", "config.json", "global_step2", "latest"]
    assert (folder.checkpoints / "latest").read_text() == "global_step2"
    assert list_tree(folder.path) == ["checkpoints", "events.jsonl", "hf-step2", "metrics.jsonl"]
    assert not find_abandoned(folder, folder.find_checkpoint(2))


def test_a_line_of_steps_has_a_run_of_its_own_at_trackers(folder: RunFolder) -> None:
    """A tracker's run has no figures of steps that were set aside. A restart that sets none aside keeps its run."""
    folder.tracker_id.write_text("the first line")
    keys: Any = SimpleNamespace(overwrite_output_dir=False)
    at_its_end: Any = SimpleNamespace(config=keys, resume_from=folder.find_checkpoint(6))
    begin_line(Run(SINGLE_PROCESS, folder, at_its_end))
    assert folder.tracker_id.read_text() == "the first line"
    assert identify_run(LoggerConfig(), folder.path, first_step=6).id == "the first line"
    back: Any = SimpleNamespace(config=keys, resume_from=folder.find_checkpoint(2))
    begin_line(Run(SINGLE_PROCESS, folder, back))
    assert (folder.abandoned / "1" / folder.tracker_id.name).read_text() == "the first line"
    second = identify_run(LoggerConfig(), folder.path, first_step=2)
    assert second.id != "the first line" and not second.is_resumed
    begin_line(Run(SINGLE_PROCESS, folder, back))
    assert identify_run(LoggerConfig(), folder.path, first_step=2).id == second.id


def test_going_back_twice_keeps_both(folder: RunFolder) -> None:
    set_aside(folder, find_abandoned(folder, folder.find_checkpoint(4)))
    write_checkpoint(folder.checkpoints, 6)
    place = set_aside(folder, find_abandoned(folder, folder.find_checkpoint(2)))
    assert [path.name for path in list_checkpoints(folder.abandoned / "1")] == ["global_step6"]
    assert place.name == "2" and [path.name for path in list_checkpoints(place)] == ["global_step6", "global_step4"]


@pytest.mark.parametrize("count", range(4))
def test_a_start_that_dies_in_between_is_completed_by_the_next(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Killed before any of its four renames, it leaves every step whole, and `latest` names its start."""
    left = count

    def rename(source: Path, target: Path, **options: object) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        os.replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(timeline, "os", SimpleNamespace(rename=rename, link=os.link))
        patch.setattr(timeline, "shutil", SimpleNamespace(move=rename, copyfile=shutil.copyfile))
        with pytest.raises(KeyboardInterrupt):
            set_aside(folder, find_abandoned(folder, folder.find_checkpoint(2)))
    assert (folder.checkpoints / "latest").read_text() == "global_step2"
    set_aside(folder, find_abandoned(folder, folder.find_checkpoint(2)))
    assert [path.name for path in list_checkpoints(folder.checkpoints)] == ["global_step2"]
    found = [path for place in folder.abandoned.iterdir() for path in list_checkpoints(place)]
    assert sorted(path.name for path in found) == ["global_step4", "global_step6"]
    assert all(len(list(path.iterdir())) == 5 for path in found)


def test_exports_are_copied_to_another_file_system_under_the_watchdogs_eyes(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `checkpoints/` is a link. The copy of 140 GB takes longer than a stuck run may."""
    copied: list[str] = []
    rename = os.rename

    def refuse(source: Path, target: Path, **options: object) -> None:
        if Path(source).name.startswith("hf"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(filesystem, "report_progress", lambda: copied.append("a block"))
    place = set_aside(folder, find_abandoned(folder, folder.find_checkpoint(4)))
    assert copied and (place / "hf" / "config.json").read_text() == "{}" and not folder.export.exists()


def test_files_are_copied_where_the_file_system_has_no_links(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(timeline.os, "link", refuse)
    place = set_aside(folder, find_abandoned(folder, folder.find_checkpoint(4)))
    assert (place / "config.json").read_text() == "{}"


@pytest.mark.parametrize("inside", ["hf", "hf-step4", "checkpoints/global_step6"])
def test_what_the_run_reads_is_never_set_aside(folder: RunFolder, inside: str) -> None:
    abandoned = find_abandoned(folder, folder.find_checkpoint(2))
    source = ("distill.teacher", folder.path / inside)
    with pytest.raises(UserError, match=f"a start from step 2 sets .*/{inside} aside, where distill.teacher is"):
        abandoned.check_inputs([("model_name_or_path", folder.checkpoints), source])
    abandoned.check_inputs([("model_name_or_path", folder.find_checkpoint(2))])


def keys(resume: str | None, stop_after_steps: int | None = None) -> Any:
    return SimpleNamespace(resume=resume, stop_after_steps=stop_after_steps)


def test_restarts_know_the_checkpoint_that_the_run_was_to_start_from(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    start = folder.find_checkpoint(2)
    assert name_start("auto") is name_start("latest") is name_start(None) is None
    record_start(folder, keys(str(start)), start, 9)
    begun = {"resume": str(start), "has_begun": True, "job": "7", "stop_after_steps": None, "last_step": 9}
    assert folder.read_started() == begun
    record_start(folder, keys("latest"), folder.find_checkpoint(6), 9)
    assert folder.read_started()["resume"] == str(start), "it continues the run that started from there"
    record_start(folder, keys("auto"), None, 9)
    assert folder.read_started()["resume"] is None
    announce_start(folder, keys(str(start)))
    announce_start(folder, keys("latest"))
    assert folder.read_started()["resume"] == str(start) and not folder.read_started()["has_begun"]
    record_start(folder, keys("latest"), folder.find_checkpoint(6), 9)
    assert folder.read_started()["resume"] is None, "it never began there"


def test_a_run_that_is_continued_ends_where_it_was_to_end(folder: RunFolder) -> None:
    folder.reopen()
    assert find_last_step(folder, keys("auto"), 4, 100) == 100
    assert find_last_step(folder, keys("auto", 10), 4, 100) == 14
    record_start(folder, keys(None, 10), None, 10)
    assert [find_last_step(folder, keys("latest", 10), step, 100) for step in (0, 4, 10)] == [10, 10, 10]
    assert find_last_step(folder, keys("auto", 10), 4, 8) == 8
    assert find_last_step(folder, keys("auto", 20), 4, 100) == 24, "another number is meant anew"
    assert find_last_step(folder, keys("some/global_step4", 10), 4, 100) == 14
    folder.write_completed({"step": 10})
    assert find_last_step(folder, keys("latest", 10), 10, 100) == 20, "the first ten are done"
