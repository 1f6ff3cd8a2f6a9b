"""Weights that no layer reads, such as layers that predict further tokens, through a run: what it exports has them as
they were published, unless it is asked to omit them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, train_run
from support.configs import build_config, compose_config
from support.launching import run_deepspeed
from support.model_folders import Tensors, convert, export, load_transformers
from support.tiny import save_records, save_tokenizer
from support.unused import load_export, save_with_unused
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.architecture.unused import group_names
from models.weights.sources import open_weights
from training.checkpoint.run_folder import RunFolder
from training.config.schema import to_typed
from training.disk_space import CheckpointSize, count_disk_bytes
from training.distributed.ranks import SINGLE_PROCESS
from training.export import prepare_folder
from training.plan_command.run import plan_run
from training.setup import Run
from training.summary import describe_unused


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, Tensors]]:
    """case(model_type) at pp2, and the tensors of its folder that no layer reads."""
    root = tmp_path_factory.mktemp("unused")
    records, made = save_records(root / "train.jsonl", 22), {}
    save_tokenizer(root / "tokenizer")

    def case(model_type: str) -> tuple[Case, Tensors]:
        if model_type not in made:
            made[model_type] = save_with_unused(root / model_type, model_type)
        overrides = (f"tokenizer_name_or_path={root}/tokenizer", "learning_rate=0.05")
        return Case(root / model_type, records, root, 2, 2, 2, overrides), made[model_type]

    return case


def with_output(case: Case, out: Path, *overrides: str) -> Case:
    return replace(case, overrides=(*case.overrides, f"output_dir={out}", *overrides))


def assert_exported(out: Path, source: Path, unused: Tensors) -> None:
    """The export has every name of the source: trained weights, and the others to the bit."""
    before, after = load_file(source / "model.safetensors"), load_export(out / "hf")
    assert before.keys() == after.keys() and unused.keys() == load_file(out / "checkpoints/carried.safetensors").keys()
    for name, tensor in unused.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    weights = [name for name in before if name not in unused and name.endswith("proj.weight")]
    assert weights and not any(torch.equal(before[name].float(), after[name].float()) for name in weights)
    _, report = AutoModelForCausalLM.from_pretrained(out / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert group_names(report["unexpected_keys"]).keys() <= group_names(unused).keys()


def assert_omitted(out: Path, source: Path, unused: Tensors) -> None:
    """No file of them, no tensor, and config.json says that there are none."""
    assert not (out / "checkpoints/carried.safetensors").exists()
    for folder in (out / "hf", out / "checkpoints"):
        fields = read_config(folder)
        assert fields["num_nextn_predict_layers"] == 0 and "passthrough_tensors" not in fields
    load_transformers(out / "hf")
    assert load_export(out / "hf").keys() == load_file(source / "model.safetensors").keys() - unused.keys()


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_run_exports_them_as_they_were(workers: Callable[[int], WorkerGroup], material, tmp_path: Path) -> None:
    case, unused = material("deepseek_v3")
    out = tmp_path / "out"
    workers(2).run(train_run, with_output(case, out))
    assert_exported(out, case.model, unused)
    assert read_config(out / "checkpoints")["passthrough_tensors"] == len(unused)
    assert read_config(out / "hf")["num_nextn_predict_layers"] == 1


def test_a_run_without_them_neither_saves_nor_counts_them(material, tmp_path: Path) -> None:
    case, unused = material("deepseek_v3")
    source, folder = open_weights(str(case.model)), RunFolder(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(case.workdir / "tokenizer")
    for export_unused in (True, False):
        config = build_config(f"export_unused={str(export_unused).lower()}", "overwrite_output_dir=true")
        setup: Any = SimpleNamespace(config=config, source=source, architecture=source.config, adapter=None)
        prepare_folder(Run(SINGLE_PROCESS, folder, setup), tokenizer)
        fields = read_config(folder.checkpoints)
        assert fields["num_nextn_predict_layers"] == int(export_unused)
        assert fields.get("passthrough_tensors", 0) == len(unused) * export_unused
        assert (folder.checkpoints / "carried.safetensors").exists() == export_unused


@pytest.mark.full
def test_a_run_exports_none_when_asked(workers: Callable[[int], WorkerGroup], material, tmp_path: Path) -> None:
    case, unused = material("deepseek_v3")
    workers(2).run(train_run, with_output(case, tmp_path / "out", "export_unused=false"))
    assert_omitted(tmp_path / "out", case.model, unused)


@pytest.mark.full
def test_a_resumed_run_has_them_from_its_checkpoints(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path
) -> None:
    """Or omits them from its export alone."""
    case, unused = material("deepseek_v3")
    out, case = tmp_path / "out", replace(case, steps=4, model=convert(case.model, tmp_path / "converted"))
    workers(2).run(train_run, with_output(case, out, "stop_after_steps=2", "save_steps=1"))
    (tmp_path / "converted").rename(tmp_path / "moved")
    workers(2).run(train_run, with_output(replace(case, num_stages=1), out, "resume=latest"))
    assert_exported(out, material("deepseek_v3")[0].model, unused)
    more = replace(case, steps=5, num_stages=1)
    workers(2).run(train_run, with_output(more, out, "resume=latest", "export_unused=false"))
    assert load_export(out / "hf").keys().isdisjoint(unused)
    assert read_config(out / "hf")["num_nextn_predict_layers"] == 0
    load_transformers(out / "hf")


@pytest.mark.full
def test_a_merged_adapter_has_them_from_its_base(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path
) -> None:
    case, unused = material("deepseek_v3")
    out = tmp_path / "out"
    workers(2).run(train_run, with_output(case, out, "adapter=lora", "optimizer=adamw"))
    assert not (out / "checkpoints/carried.safetensors").exists()
    for folder in ("checkpoints", "hf"):
        merged = load_export(export(out / folder, tmp_path / f"of_{folder}"))
        assert merged.keys() == load_file(case.model / "model.safetensors").keys()
        assert all(torch.equal(merged[name], tensor) for name, tensor in unused.items())


@pytest.mark.full
def test_through_the_launcher(material, tmp_path: Path) -> None:
    case, unused = material("qwen3_next")
    ended = run_deepspeed(["-cn", "base", *with_output(case, tmp_path / "out").list_overrides()], tmp_path)
    assert ended.code == 0, ended.output
    assert f"not trained: {len(unused)} tensors that no layer reads (" in ended.output
    assert_exported(tmp_path / "out", case.model, unused)


def test_a_run_says_what_becomes_of_them(material) -> None:
    case, unused = material("deepseek_v3")
    source = open_weights(str(case.model))
    size = f"{sum(tensor.nbytes for tensor in unused.values()) / 2**20:,.1f} MiB"
    counted = f"{len(unused)} tensors that no layer reads ({size}; model.layers.4: {len(unused)})"
    for keys, fate in (
        ((), "are passed through unchanged"),
        (("export_unused=false",), "are left out (export_unused=false)"),
        (("adapter=lora",), "stay in the base model"),
    ):
        assert describe_unused(source, build_config(*keys)) == {"not trained": f"{counted} {fate}"}


def test_the_disk_has_room_for_them(material, tmp_path: Path) -> None:
    """Once next to the checkpoints, and in each export."""
    size = CheckpointSize(weights=10, optimizer=60, passthrough=3)
    assert count_disk_bytes(build_config("export_steps=[1]"), size) == 2 * 70 + 3 + 2 * 13

    case, _ = material("deepseek_v3")
    planned = []
    for export_unused in ("true", "false"):
        overrides = (*case.list_overrides(), "plan=true", "world_size=2", "hardware=a100_80g", f"output_dir={tmp_path}")
        composed = compose_config("base", *overrides, f"export_unused={export_unused}")
        (plan,) = (text for text in plan_run(to_typed(composed)) if "on disk: " in text)
        planned.append(next(line for line in plan.splitlines() if line.startswith("on disk: ")))
    assert planned[0] != planned[1], planned
