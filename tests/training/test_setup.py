"""The setup of a run, before a process group exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file
from support.adapters import make_adapter
from support.cases import this_rank
from support.configs import build_config
from support.tiny import save_llama
from support.workers import WorkerGroup

from data.loading.row_lengths import RowLengths
from errors import UserError
from models.adapters.folder import BASE_FINGERPRINT
from models.adapters.options import AdapterName
from models.weights.fingerprint import fingerprint_weights
from models.weights.sources import open_weights
from training import setup as setups
from training.costs.hardware import GIB
from training.distributed.ranks import SINGLE_PROCESS
from training.objectives.auxiliary import AuxiliaryModel
from training.resolution import counts


def test_costs_are_counted_once_for_the_split_and_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "hf")
    count = Mock(wraps=counts.count_layers)
    monkeypatch.setattr(counts, "count_layers", count)
    monkeypatch.setattr(setups, "describe_device", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(setups, "has_accelerator", lambda: True)
    config = build_config(
        f"model_name_or_path={tmp_path}/hf", f"output_dir={tmp_path}/out", "micro_batch_size=1", "global_batch_size=2",
    )  # fmt: skip
    setup = setups.check_run(config, SINGLE_PROCESS)
    machine = setups.find_run_machine(config, SINGLE_PROCESS)
    rows = RowLengths(longest=config.max_seq_length, padded=config.max_seq_length, filled=config.max_seq_length)
    monkeypatch.setattr(setups, "broadcast_from_main", lambda compute, ranks: compute())
    monkeypatch.setattr(setups, "measure_rows", Mock(return_value=rows))
    run = setups.Run.of(setup, SINGLE_PROCESS)
    predicted = setups.predict_run(run, machine, train_path=tmp_path, num_samples=2, steps=range(1))
    assert predicted is not None
    assert count.call_count == 1 and predicted.plan.costs is setup.costs
    assert machine is not None and predicted.plan.run.hardware is machine
    assert predicted.is_known and predicted.plan.peak_flops == machine.peak_flops["bf16"]


@pytest.mark.parametrize(
    ("name", "memory", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 80, ("h100", 79.1)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, ("rtx4090", 16)),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20, ("a100_40g", 20)),
        ("NVIDIA GH200 480GB", 95, None),
    ],
)
def test_a_gpu_has_no_more_memory_than_there_is(
    name: str, memory: float, found: tuple[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setups, "describe_device", lambda: name)
    monkeypatch.setattr(setups, "measure_device_memory", lambda: memory * GIB)
    machine = setups.find_run_machine(build_config("micro_batch_size=1", "global_batch_size=2"), SINGLE_PROCESS)
    assert (machine and (machine.name, machine.memory)) == found


def take_other_gpu(folder: str) -> tuple[Any, ...]:
    """Each rank resolves a run as if it had a GPU of another size. Returns what it then runs by."""
    from training.run import agree_on_setup

    ranks = this_rank()
    config = build_config(
        f"model_name_or_path={folder}/hf", f"output_dir={folder}/out", "micro_batch_size=1", "global_batch_size=2",
        "num_stages=2", "schedule=zero_bubble",
    )  # fmt: skip
    own = setups.build_setup(config, setups.open_source(config, None), ranks)
    interval, bounds = (0, [0, 2, len(own.layers)]) if ranks.is_main else (1, [0, 3, len(own.layers)])
    config = dataclasses.replace(own.config, activation_checkpoint_interval=interval)
    times = tuple(each._replace(forward=each.forward + ranks.rank) for each in own.layout.pass_times)
    assert times
    layout = dataclasses.replace(own.layout, pass_times=times)
    own = dataclasses.replace(own, config=config, bounds=bounds, layout=layout)
    auxiliary = setups.AuxiliarySetup(AuxiliaryModel(), own)
    own = dataclasses.replace(own, auxiliary=auxiliary)  # its times are measured where `hardware` states no rates
    agreed = agree_on_setup(setups.Run.of(own, ranks)).setup
    assert agreed.auxiliary is not None
    other = agreed.auxiliary.setup
    assert (other.bounds, other.layout) == (agreed.bounds, agreed.layout)
    return agreed.config.activation_checkpoint_interval, agreed.bounds, agreed.layout.pass_times


def test_ranks_with_different_gpus_run_by_the_main_ranks(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """Else their exchanges would not match."""
    save_llama(tmp_path / "hf")
    main, other = workers(2).run(take_other_gpu, str(tmp_path))
    assert main == other and main[:2] == (0, [0, 2, main[1][-1]])


def read_own_export(folder: Path) -> tuple[str, ...]:
    return (f"model_name_or_path={folder}/out/hf", "adapter=lora")


def read_through_a_link(folder: Path) -> tuple[str, ...]:
    (folder / "base").symlink_to(folder / "out/hf")
    return (f"model_name_or_path={folder}/base",)


def read_data_of_an_export(folder: Path) -> tuple[str, ...]:
    save_llama(folder / "model")
    (folder / "out/hf/train.jsonl").write_text("{}")
    return f"model_name_or_path={folder}/model", f"train_file={folder}/out/hf/*.jsonl"


@pytest.mark.parametrize("name", [read_own_export, read_through_a_link, read_data_of_an_export])
def test_a_run_does_not_write_over_what_it_reads(
    tmp_path: Path, name: Callable[[Path], tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "out/hf")
    monkeypatch.chdir(tmp_path)
    given = (*name(tmp_path), "micro_batch_size=1", "global_batch_size=2")
    for output_dir in (f"{tmp_path}/out", "out"):
        config = build_config(*given, f"output_dir={output_dir}")
        with pytest.raises(UserError, match="the run would write over .*out/hf, where .* is; give another output_dir"):
            setups.check_run(config, SINGLE_PROCESS)
    config.adapter.name = AdapterName.none
    setups.check_run(dataclasses.replace(config, evaluate_only=True, eval_file="eval.jsonl"), SINGLE_PROCESS)


def test_an_adapter_that_a_run_does_not_read_may_be_written_over(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    make_adapter(tmp_path / "out/hf", tmp_path / "model")
    config = build_config(
        "adapter=lora", f"adapter.name_or_path={tmp_path}/out/hf", f"model_name_or_path={tmp_path}/model",
        f"output_dir={tmp_path}/out", "micro_batch_size=1", "global_batch_size=2",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"out/hf, where adapter.name_or_path"):
        setups.check_run(config, SINGLE_PROCESS)
    config.adapter.name = AdapterName.none
    setups.check_run(config, SINGLE_PROCESS, given=("adapter",))


def name_teacher(folder: Path) -> tuple[str, ...]:
    save_llama(folder / "student")
    return f"model_name_or_path={folder}/student", f"distill.teacher={folder}/out/hf", "data=sft"


def name_adapter(folder: Path) -> tuple[str, ...]:
    make_adapter(folder / "adapter", folder / "out/hf")
    return (f"model_name_or_path={folder}/adapter",)


@pytest.mark.parametrize("name", [name_teacher, name_adapter])
def test_overwriting_is_refused_for_every_model_that_a_run_reads(
    tmp_path: Path, name: Callable[[Path], tuple[str, ...]]
) -> None:
    """An export of the run before is the teacher, or the base model of an adapter that is elsewhere."""
    save_llama(tmp_path / "out/hf")
    config = build_config(
        *name(tmp_path), f"output_dir={tmp_path}/out", "overwrite_output_dir=true", "micro_batch_size=1",
        "global_batch_size=2",
    )  # fmt: skip
    with pytest.raises(UserError, match="overwrite_output_dir=true would delete .*out/hf, where "):
        setups.check_run(config, SINGLE_PROCESS)


def test_an_exported_adapter_is_trained_on_its_own_base_alone(tmp_path: Path) -> None:
    for name, seed in (("own", 0), ("other", 1)):
        save_llama(tmp_path / name, seed=seed)
    make_adapter(tmp_path / "adapter", tmp_path / "own")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    known = {"format": "pt", BASE_FINGERPRINT: fingerprint_weights(open_weights(str(tmp_path / "own")))}
    save_file(load_file(file), file, metadata=known)
    given = (
        "adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", f"output_dir={tmp_path}/out", "micro_batch_size=1",
        "global_batch_size=2",
    )  # fmt: skip
    other = build_config(*given, f"model_name_or_path={tmp_path}/other")
    with pytest.raises(UserError, match=f"{tmp_path}/adapter holds an adapter of another base model than .*/other"):
        setups.check_run(other, SINGLE_PROCESS)
    setups.check_run(dataclasses.replace(other, trust_checkpoint=True), SINGLE_PROCESS)
    setups.check_run(build_config(*given, f"model_name_or_path={tmp_path}/own"), SINGLE_PROCESS)


@pytest.mark.parametrize("evaluate_only", [False, True])
def test_the_fp32_weights_of_a_run_in_bf16_are_for_a_run_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate_only: bool
) -> None:
    """An evaluation is of the weights that are exported."""
    weights, masters = Mock(), Mock()
    monkeypatch.setattr(setups, "choose_whole", lambda resumable, say: tmp_path)
    monkeypatch.setattr(setups, "MasterWeights", lambda *step: masters)
    monkeypatch.setattr(setups, "edit_weights", lambda source, edits: (source, edits))
    monkeypatch.setattr(setups, "_open_resized", lambda config, path: weights)
    config = build_config("precision=fp32", f"evaluate_only={str(evaluate_only).lower()}")
    monkeypatch.setattr(dataclasses, "replace", lambda setup, **found: found)
    found = setups.load_resumed(Mock(adapter=None, config=config), print)
    assert found["source"] == (weights, [] if evaluate_only else [masters])
