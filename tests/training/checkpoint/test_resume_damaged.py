"""Damage in a real checkpoint: reported before anything is loaded, by name, by all ranks together; and by whatever else
reads its weights."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import Case, train_run
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

import convert2ckpt
from errors import UserError
from models.architecture.lookup import build_layers
from models.storage.manifest import FileRecord, HashedFile, read_manifest, write_manifest
from models.weights.sources import open_weights
from scripts import generate
from training.export import export


@pytest.fixture(scope="module")
def saved(workers: Callable[[int], WorkerGroup], tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run of three steps on two stages, each step saved."""
    root = tmp_path_factory.mktemp("damaged")
    save_llama(root / "hf", num_hidden_layers=2)
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", 24)
    case = Case(root / "hf", root / "train.jsonl", root, 2, 2, 3, ("optimizer=adamw", "save_steps=1"))
    workers(2).run(train_run, case)
    return case


@pytest.fixture
def copied(saved: Case, tmp_path: Path) -> Path:
    """A copy of its checkpoints, for a test to damage."""
    return Path(shutil.copytree(saved.workdir / "out" / "checkpoints", tmp_path / "checkpoints"))


@pytest.fixture
def choose(workers: Callable[[int], WorkerGroup], saved: Case) -> Callable[[Path | str], tuple[str, list[str]]]:
    """choose(resume): the checkpoint that a run of two ranks resumes from, or the error; and its messages."""

    def run(resume: Path | str) -> tuple[str, list[str]]:
        first, second = workers(2).run(choose_checkpoint, saved, f"resume={resume}")
        assert first == second
        return first

    return run


def choose_checkpoint(case: Case, resume: str) -> tuple[str, list[str]]:
    """On a rank: the steps of `trainer_base_ds_mp.py` for `resume` before it builds anything."""
    import torch.distributed as dist

    from training.checkpoint import resume as resuming
    from training.distributed.ranks import Ranks
    from training.setup import check_run

    config = Case(
        case.model, case.train_file, case.workdir, case.num_stages, overrides=(*case.overrides, resume)
    ).config()
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    messages: list[str] = []

    def raise_here(error: UserError) -> None:
        raise error

    with patch.object(resuming, "raise_together", raise_here):  # each rank returns its error instead of exiting
        try:
            return str(resuming.choose_whole(check_run(config, ranks).resumable, messages.append)), messages
        except UserError as error:
            return str(error), messages


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_whole_ones_are_taken_without_a_word(choose, copied: Path) -> None:
    assert choose(copied) == (f"{copied}/global_step3", [])
    assert choose(copied / "global_step1") == (f"{copied}/global_step1", [])


@pytest.mark.parametrize(
    "name", ["layer_01-model_states.pt", "optimizer-stage_00-dp_00.safetensors", "optimizer-stage_01-dp_00.safetensors"]
)
def test_a_flipped_byte_makes_latest_go_back_and_say_so(choose, copied: Path, name: str) -> None:
    flip_a_byte(copied / "global_step3" / name)
    damage = f"{copied}/global_step3/{name} is damaged: its bytes are not those that were saved"
    assert choose(copied) == (
        f"{copied}/global_step2",
        [f"resume: {damage}", f"resume: going back to {copied}/global_step2, the newest complete checkpoint"],
    )
    error, messages = choose(copied / "global_step3")
    assert (error, messages) == (f"resume: {damage}; copy the checkpoint again, or resume from another one", [])


def convert(step_dir: Path, output_dir: Path, *options: str) -> None:
    arguments = ["--to_hf", "--model_name_or_path", str(step_dir), "--output_dir", str(output_dir), *options]
    convert2ckpt.convert(convert2ckpt.build_parser().parse_args(arguments))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "converter": convert,
    "converter that verifies": lambda step_dir, output_dir: convert(step_dir, output_dir, "--verify"),
    "converter with workers": lambda step_dir, output_dir: convert(step_dir, output_dir, "--workers", "2"),
    "generate.py": lambda step_dir, _: generate.load_model(open_weights(str(step_dir))),
    "the run's own export": lambda step_dir, output_dir: export(
        SimpleNamespace(adapter=None, config=SimpleNamespace(export_unused=True)), step_dir, output_dir
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_weights_finds_a_flipped_byte(reader: str, copied: Path, tmp_path: Path) -> None:
    step_dir, file = copied / "global_step3", "layer_02-model_states.pt"
    READERS[reader](copied, tmp_path / "whole")  # and takes a whole checkpoint
    flip_a_byte(step_dir / file)
    with pytest.raises(UserError) as caught:
        READERS[reader](step_dir, tmp_path / "hf")
    assert str(caught.value) == (
        f"{step_dir}/{file} is damaged: its bytes are not those that were saved; copy the checkpoint again, or use "
        "another one"
    )
    assert not (tmp_path / "hf").exists()


def test_a_file_of_another_size_is_refused_before_any_is_read(copied: Path) -> None:
    source = open_weights(str(copied))
    (copied / "global_step3" / "optimizer-stage_00-dp_00.safetensors").unlink()  # weights do not need it
    source.check_complete(build_layers(source.config))
    os.truncate(copied / "global_step3" / "layer_03-model_states.pt", 100)
    with pytest.raises(UserError, match="layer_03-model_states.pt is damaged: 100 bytes, .*; copy"):
        source.check_complete(build_layers(source.config))


@pytest.mark.parametrize("lost", [("manifest.json",), ("manifest.json", "trainer_state.json")])
def test_weights_of_a_run_without_a_manifest_are_refused(copied: Path, lost: tuple[str, ...], tmp_path: Path) -> None:
    step_dir = copied / "global_step3"
    for name in lost:
        (step_dir / name).unlink()
    with pytest.raises(UserError, match=f"{step_dir} has no manifest.json: .*--trust_checkpoint"):
        convert(copied, tmp_path / "hf")
    convert(copied, tmp_path / "hf", "--trust_checkpoint")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_a_run_checks_the_model_that_it_starts_from(copied: Path, saved: Case) -> None:
    from training.setup import open_source

    def open_from(*overrides: str) -> Any:
        return open_source(Case(copied, saved.train_file, copied, 1, 2, 3, overrides).config(), None)

    source = open_from()
    flip_a_byte(copied / "global_step3" / "layer_00-model_states.pt")
    with pytest.raises(UserError, match="layer_00-model_states.pt is damaged: its bytes"):
        source.read_layer(0, build_layers(source.config)[0])
    (copied / "global_step3" / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no manifest.json"):
        open_from()
    open_from("trust_checkpoint=true")


def test_truncated_flipped_and_missing_at_once(choose, copied: Path) -> None:
    os.truncate(copied / "global_step3" / "layer_00-model_states.pt", 100)
    flip_a_byte(copied / "global_step2" / "layer_02-model_states.pt")
    chosen, messages = choose(copied)
    assert chosen == f"{copied}/global_step1" and len(messages) == 3
    assert (
        "global_step3/layer_00-model_states.pt is damaged: 100 bytes, " in messages[0]
        and "global_step2/layer_02" in messages[1]
    )
    (copied / "global_step1" / "layer_03-model_states.pt").unlink()
    error, _ = choose(copied)
    assert error.startswith(
        f"resume: {copied}/global_step3/layer_00-model_states.pt is damaged: 100 bytes"
    ) and error.endswith("(none of the others there is complete)")


class Malicious:
    """Pickled, it runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("write", ["torch.save", "pickle"])
def test_a_malicious_pickle_does_not_run(choose, copied: Path, tmp_path: Path, write: str) -> None:
    step_dir, trace = copied / "global_step3", tmp_path / "it ran"
    for name in ("layer_00-model_states.pt", "mp_rank_00_model_states.pt", "optimizer-stage_00-dp_00.safetensors"):
        if write == "torch.save":
            torch.save({"weight": Malicious(trace)}, step_dir / name)
        else:
            (step_dir / name).write_bytes(pickle.dumps({"weight": Malicious(trace)}))
    chosen, messages = choose(copied)
    assert chosen == f"{copied}/global_step2" and "is damaged" in messages[0]

    rewrite_manifest(step_dir)  # as an attacker could
    source = open_weights(str(step_dir))
    layer = build_layers(source.config)[0]
    with pytest.raises(UserError, match="layer_00-model_states.pt cannot be read"):
        source.read_layer(0, layer)
    assert not trace.exists()


def rewrite_manifest(step_dir: Path) -> None:
    records: dict[str, FileRecord] = {}
    for name in read_manifest(step_dir) or {}:
        content = (step_dir / name).read_bytes()
        with HashedFile(step_dir / name) as stream:
            stream.write(content)
            records[name] = stream.finish()
    write_manifest(step_dir, records)


def test_a_whole_run_does_not_run_it_either(
    workers: Callable[[int], WorkerGroup], saved: Case, copied: Path, tmp_path: Path
) -> None:
    """The optimizer's files and DeepSpeed's own, with a matching manifest: the run continues or refuses; nothing is
    unpickled."""
    step_dir, trace = copied / "global_step2", tmp_path / "it ran"
    torch.save({"module": Malicious(trace)}, step_dir / "mp_rank_00_model_states.pt")
    rewrite_manifest(step_dir)
    overrides = (*saved.overrides, f"resume={step_dir}", f"output_dir={tmp_path}/out")
    workers(2).run(train_run, Case(saved.model, saved.train_file, saved.workdir, 2, 2, 3, overrides))
    assert not trace.exists() and (tmp_path / "out" / "completed.json").is_file()
