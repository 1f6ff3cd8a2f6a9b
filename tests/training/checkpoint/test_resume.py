"""Which checkpoint a run resumes from, and which settings must match. With real checkpoints:
test_resume_damaged.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import build_config
from test_checkpoint import FILES, STATE, write_checkpoint

from errors import UserError
from models.adapters.options import AdapterName, AdapterOptions
from training.checkpoint.resume import check_resumable, choose_resume, find_damage, find_resume
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import remove_leftovers
from training.checkpoint.timeline import announce_start, record_start
from training.inputs.step_budget import _describe_adapter, _has_same_loss, _resume
from training.objectives.registry import describe_objective


@pytest.fixture
def save(tmp_path: Path) -> Callable[[int], Path]:
    """save(step): a complete checkpoint, which `latest` names."""
    return lambda step: write_checkpoint(tmp_path, step)


def find(resume: str, folder: Path, trust: bool = False) -> Path:
    return find_resume(resume, folder, trust).candidates[0]


def test_latest_or_a_path(save: Callable[[int], Path], tmp_path: Path) -> None:
    first, second = save(2), save(10)
    assert find("latest", tmp_path) == find(str(tmp_path), Path("elsewhere")) == second == tmp_path / "global_step10"
    assert find_resume(str(first), tmp_path, trust=False).candidates == [first]  # a path means that one
    assert find_damage(second, 0, 1) is None


def test_latest_comes_first_then_those_before_it_then_those_after(save: Callable[[int], Path], tmp_path: Path) -> None:
    two, four, six, eight = (save(step) for step in (2, 4, 6, 8))
    (tmp_path / "latest").write_text("global_step6")  # the run went back and took another way
    assert find_resume("latest", tmp_path, trust=False).candidates == [six, four, two, eight]
    (tmp_path / "latest").unlink()
    assert find_resume("latest", tmp_path, trust=False).candidates == [eight, six, four, two]


@pytest.mark.parametrize(
    "break_it, damage",
    [
        (lambda d: (d / FILES[1]).write_text("half"), f"{FILES[1]} is damaged: 4 bytes, 35 were saved"),
        (lambda d: (d / FILES[2]).unlink(), f"{FILES[2]} is missing"),
        (lambda d: (d / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json is missing or damaged"),
        (
            lambda d: (d / "manifest.json").unlink(),
            "has no manifest.json: it is not complete, or not from this project .trust_checkpoint=true accepts",
        ),
    ],
    ids=["truncated", "missing", "no state", "damaged manifest", "no manifest"],
)
def test_a_broken_checkpoint_is_named_and_latest_goes_back(
    save, tmp_path: Path, break_it: Callable[[Path], None], damage: str
) -> None:
    step_dir = save(2)
    break_it(step_dir)
    for resume in ("latest", str(step_dir)):
        with pytest.raises(
            UserError, match=f"resume: {step_dir}.{damage}.*; copy the checkpoint again, or resume from another one$"
        ):
            find_resume(resume, tmp_path, trust=False)
    whole, broken = save(4), save(6)
    break_it(broken)
    resumable = find_resume("latest", tmp_path, trust=False)
    assert (
        resumable.candidates == [whole] and len(resumable.damages) == 1 and resumable.damages[0].startswith(str(broken))
    )
    with pytest.raises(UserError, match=str(broken)):
        find_resume(str(broken), tmp_path, trust=False)


def test_latest_that_names_nothing(save: Callable[[int], Path], tmp_path: Path) -> None:
    whole = save(2)
    (tmp_path / "latest").write_text("global_step4")
    resumable = find_resume("latest", tmp_path, trust=False)
    assert (resumable.candidates, resumable.damages) == ([whole], [f"{tmp_path}/global_step4 is missing"])


@pytest.mark.parametrize(
    "content, words",
    [(b"", "is empty"), (b"\n", "is empty"), (b"global_st", "holds 'global_st'"), (b"\xff\0", "holds '")],
)
def test_a_damaged_latest_is_named_and_the_newest_complete_one_taken(
    content: bytes, words: str, save: Callable[[int], Path], tmp_path: Path
) -> None:
    two, four = save(2), save(4)
    (tmp_path / "latest").write_bytes(content)
    resumable = find_resume("latest", tmp_path, trust=False)
    assert resumable.candidates == [four, two]
    (damage,) = resumable.damages
    assert damage.startswith(f"{tmp_path / 'latest'} is damaged: it {words}")


def test_each_byte_is_some_ranks_to_check(save: Callable[[int], Path]) -> None:
    step_dir = save(2)
    content = bytearray((step_dir / FILES[1]).read_bytes())
    content[5] ^= 1
    (step_dir / FILES[1]).write_bytes(content)
    found = [find_damage(step_dir, rank, 3) for rank in range(3)]
    assert [damage for damage in found if damage] == [
        f"{step_dir / FILES[1]} is damaged: its bytes are not those that were saved"
    ]


def test_one_without_a_manifest_can_be_trusted(save: Callable[[int], Path], tmp_path: Path) -> None:
    step_dir = save(2)
    (step_dir / "manifest.json").unlink()
    assert find(str(step_dir), tmp_path, trust=True) == step_dir and find_damage(step_dir, 0, 1) is None
    (step_dir / "manifest.json").write_text("{")  # a manifest that exists is read
    with pytest.raises(UserError, match="manifest.json is missing or damaged"):
        find(str(step_dir), tmp_path, trust=True)


def test_a_temporary_folder_is_never_taken(save: Callable[[int], Path], tmp_path: Path) -> None:
    leftover = save(4).rename(tmp_path / "tmp-global_step4")  # everything is written, but not renamed
    (tmp_path / "latest").unlink()
    with pytest.raises(UserError, match="resume=latest: there is no checkpoint at"):
        find("latest", tmp_path)
    with pytest.raises(UserError, match="a save that never ended"):
        find(str(leftover), tmp_path)
    kept = save(6)
    remove_leftovers(tmp_path)
    assert not leftover.exists() and find("latest", tmp_path) == kept


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume=latest: there is no checkpoint at .*; omit resume to start a new run"):
        find("latest", tmp_path / "none")
    (tmp_path / "converted" / "global_step0").mkdir(parents=True)
    (tmp_path / "converted" / "latest").write_text("global_step0")
    with pytest.raises(
        UserError, match="converted/global_step0 is not a training checkpoint .* give it as model_name_or_path"
    ):
        find(str(tmp_path / "converted"), tmp_path)


@pytest.mark.parametrize(
    "name, other",
    [("global_batch_size", 9), ("num_samples", 41), ("seed", 43), ("precision", "fp32"), ("optimizer", "sgd")],
)
def test_what_changes_the_run_is_refused_by_name(name: str, other: object) -> None:
    changed = replace(STATE, **{name: other})
    with pytest.raises(
        UserError,
        match=f"{name} was {getattr(STATE, name)}, is {other}. Give the same values, or "
        ".*resume_allow_changes=true.*=/c/global_step2",
    ):
        check_resumable(STATE, changed, Path("/c/global_step2"))
    assert check_resumable(STATE, changed, Path("/c/global_step2"), allow_changes=True) == [
        f"{name} was {getattr(STATE, name)}, is {other}"
    ]


def test_all_that_differs_is_named_at_once() -> None:
    with pytest.raises(UserError, match="num_samples was 40, is 1; seed was 42, is 1"):
        check_resumable(STATE, replace(STATE, num_samples=1, seed=1), Path("/c/global_step2"))


DATA = {"packing": "none", "mixture": "weight 2, 1 by samples", "the hash of the tokens of train_file entry 1": "3fa"}


@pytest.mark.parametrize("name", DATA)
def test_data_that_is_other_is_named(name: str) -> None:
    saved, run = replace(STATE, data=DATA), replace(STATE, data=DATA | {name: "other"})
    with pytest.raises(
        UserError, match=f"differs from the one that saved /c/global_step2: {name} was {DATA[name]}, is other. Give"
    ):
        check_resumable(saved, run, Path("/c/global_step2"))
    assert check_resumable(saved, run, Path("/c/global_step2"), allow_changes=True) == [
        f"{name} was {DATA[name]}, is other"
    ]
    assert check_resumable(saved, saved, Path("/c/global_step2")) == []


def test_an_additional_entry_is_named_and_a_checkpoint_without_data_entries() -> None:
    more = {"the hash of the tokens of train_file entry 2": "9c1"}
    with pytest.raises(UserError, match="the hash of the tokens of train_file entry 2 was none, is 9c1. Give"):
        check_resumable(replace(STATE, data=DATA), replace(STATE, data=DATA | more), Path("/c/global_step2"))
    with pytest.raises(UserError, match="the hash of the tokens of train_file entry 2 was 9c1, is none. Give"):
        check_resumable(replace(STATE, data=DATA | more), replace(STATE, data=DATA), Path("/c/global_step2"))
    with pytest.raises(
        UserError, match="packing was none, is in rows.*entry 1 was none, is 3fa. Give"
    ):  # saved by an earlier version of this project
        check_resumable(STATE, replace(STATE, data=DATA | {"packing": "in rows"}), Path("/c/global_step2"))


def test_another_layout_and_a_longer_schedule_may_continue() -> None:
    run = replace(STATE, step=0, num_tokens=0, total_steps=99, num_stages=1, dp_size=4, micro_batch_size=1)
    assert check_resumable(STATE, run, Path("/c/global_step2")) == []


def test_auto_is_latest_where_there_is_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out")
    assert choose_resume("auto", folder) is choose_resume(None, folder) is None
    assert choose_resume("elsewhere", folder) == "elsewhere"
    folder.find_checkpoint(3).mkdir(parents=True)
    assert choose_resume("auto", folder) == "latest"


def test_auto_is_the_named_start_of_a_run_that_has_saved_nothing_since(tmp_path: Path) -> None:
    """Else a restart would begin a new run, or continue the steps that it was to leave."""
    keys: Any = SimpleNamespace(resume="/c/global_step2", stop_after_steps=None)
    folder = RunFolder(tmp_path)
    folder.find_checkpoint(6).mkdir(parents=True)
    announce_start(folder, keys)
    assert choose_resume("auto", folder) == "/c/global_step2" and choose_resume("latest", folder) == "latest"
    record_start(folder, keys, Path("/c/global_step2"), 9)
    assert choose_resume("auto", folder) == "latest"
    folder.find_checkpoint(6).rmdir()
    assert choose_resume("auto", folder) == "/c/global_step2"
    folder.write_completed({"step": 9})
    assert choose_resume("auto", folder) is None, "it has finished, and its checkpoints were removed"


def test_other_rope_is_for_another_folder(tmp_path: Path) -> None:
    """All steps of a folder have one config.json, by which the earlier ones would be read too."""
    folder = RunFolder(tmp_path / "out")
    folder.checkpoints.mkdir(parents=True)
    own = write_checkpoint(folder.checkpoints, 2)
    (folder.checkpoints / "config.json").write_text('{"model_type": "llama", "vocab_size": 96}')
    stretched = replace(STATE, data=STATE.data | {"rope_parameters": "linear, factor 4"})
    config: Any = SimpleNamespace(output_dir=str(folder.path), resume_allow_changes=True, trust_remote_code=False)
    with pytest.raises(UserError, match="rope_parameters was none, is linear, factor 4, and all steps of a"):
        _resume(stretched, STATE, own, config, None, 96)
    config.output_dir = str(tmp_path / "another")
    assert _resume(stretched, STATE, own, config, None, 96).step == 2


def test_more_rows_are_for_another_folder(tmp_path: Path) -> None:
    """All steps of a folder share one config.json, with the old number of rows; a step with more cannot be opened."""
    folder = RunFolder(tmp_path / "out")
    folder.checkpoints.mkdir(parents=True)
    own = write_checkpoint(folder.checkpoints, 2)
    (folder.checkpoints / "config.json").write_text('{"model_type": "llama", "vocab_size": 96}')
    config: Any = SimpleNamespace(output_dir=str(folder.path), resume_allow_changes=True, trust_remote_code=False)
    assert _resume(STATE, STATE, own, config, None, 96).step == 2
    with pytest.raises(
        UserError, match=f"vocab_size was 96, is 97, .* one config.json; .*model_name_or_path={own} output_dir="
    ):
        _resume(STATE, STATE, own, config, None, 97)
    config.output_dir = str(tmp_path / "another")
    assert _resume(STATE, STATE, own, config, None, 97).step == 2


def test_a_checkpoint_names_the_start_of_a_new_adapter_alone() -> None:
    """One that exists is loaded; its matrices are no part of the base weights."""
    new = AdapterOptions(AdapterName.lora, init_lora_weights="pissa")
    described = [
        _describe_adapter(SimpleNamespace(adapter=adapter))
        for adapter in (new, replace(new, name_or_path="somewhere"), replace(new, name=AdapterName.none))
    ]
    assert described == [{"adapter.init_lora_weights": "pissa"}, {}, {}]


def test_an_evaluation_of_another_loss_is_not_compared() -> None:
    config = build_config("data=preference", "dpo.beta=0.2")
    now = replace(STATE, data=describe_objective(config) | {"the data": "x"})
    assert _has_same_loss(now, now, config)
    before = replace(now, data=describe_objective(build_config("data=preference", "dpo.beta=0.3")) | {"the data": "x"})
    assert not _has_same_loss(before, now, config)
    assert not _has_same_loss(replace(now, data=now.data | {"label_smoothing": "0.1"}), now, config)
