"""Conversations about images through real pipeline stages: losses, gradients and weights are those of the plain model
of `transformers` in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.cases import (
    BOUND,
    CHECKPOINTED,
    LAYOUTS,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_run,
    worst_difference,
)
from support.configs import compose_config
from support.images import FAMILIES, load_plain, measure_plain, save_image_records, save_model, train_plain
from support.runs import read_metrics
from support.workers import WorkerError, WorkerGroup

from formatting import render_bytes
from training.config.schema import to_typed
from training.plan_command.run import plan_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_image_records(root, 24)
    for model_type in FAMILIES:
        save_model(root / model_type, model_type)
    return root


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = merge(workers(case.world_size).run(train_case, case))
    oracle = train_plain(case, load_plain(case.model))
    assert result["weights"].keys() < oracle["weights"].keys()
    worst, name = worst_difference(result["weights"], {name: oracle["weights"][name] for name in result["weights"]})
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    assert max(result["losses"]) > 1.001 * min(result["losses"])  # it has moved


ZERO_BUBBLE = ("schedule=zero_bubble",)
PACKED = ("data.packing=true", "max_seq_length=192", "micro_batch_size=1", "global_batch_size=4")
FEW = ("mistral3", "qwen3_vl")  # in the short suite; the others in the long one
full = pytest.mark.full


def list_families(*few: str) -> list[Any]:
    return [each if each in few else pytest.param(each, marks=full) for each in FAMILIES]


def build_case(root: Path, workdir: Path, model_type: str, layout: str, *overrides: str) -> Case:
    num_stages, world_size = LAYOUTS[layout]
    given = ("data=image_chat", "learning_rate=0.005", "max_grad_norm=1", "global_batch_size=8", *overrides)
    return Case(root / model_type, root / "train.jsonl", workdir, num_stages, world_size, 5, given)


@pytest.mark.parametrize("layout", [pytest.param(each, marks=() if each == "pp2" else full) for each in LAYOUTS])
@pytest.mark.parametrize("model_type", list_families(*FEW))
def test_five_steps_equal_the_plain_model(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, model_type: str, layout: str
) -> None:
    compare(workers, build_case(root, tmp_path, model_type, layout))


@pytest.mark.parametrize("model_type", list_families("qwen2_5_vl"))
def test_packed_documents_have_images_of_their_own(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, model_type: str
) -> None:
    compare(workers, build_case(root, tmp_path, model_type, "pp2", *PACKED))


@full
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("how", [(CHECKPOINTED,), SELECTIVE, ZERO_BUBBLE, ("zero_stage=2",)], ids=str)
def test_recomputed_and_with_other_schedules(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, model_type: str, how: tuple[str, ...]
) -> None:
    if how == ZERO_BUBBLE:  # in four chunks, of which the first has a layer beside the embedding
        how = (*how, "partition_method=[2,1,2,2]")
    compare(workers, build_case(root, tmp_path, model_type, "pp2xdp2", *how))


@full
def test_experts_of_two_ranks(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> None:
    compare(workers, build_case(root, tmp_path, "qwen3_vl_moe", "pp2xdp2", "expert_parallel_size=2"))


@full
@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_adapter_is_trained_as_peft_trains_it(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, model_type: str
) -> None:
    """Through a whole run, stopped and resumed at another layout: the loss that peft's model has with what it
    exports is the one that the run has reported."""
    case, out = build_case(root, tmp_path, model_type, "pp2"), tmp_path / "out"
    overrides = (
        *case.overrides, f"output_dir={out}", f"eval_file={root}/train.jsonl", "adapter=lora", "optimizer=adamw",
        "learning_rate=0.02", "max_steps=4", "save_steps=2", "eval_on_start=false",
    )  # fmt: skip
    case = replace(case, overrides=overrides)
    workers(2).run(train_run, replace(case, overrides=(*overrides, "stop_after_steps=2")))
    workers(1).run(train_run, replace(case, num_stages=1, world_size=1, overrides=(*overrides, "resume=latest")))
    reported = read_metrics(out)[-1]["eval_loss"]
    plain = measure_plain(case, load_plain(case.model))
    adapted = measure_plain(case, PeftModel.from_pretrained(load_plain(case.model), out / "hf"))
    assert abs(adapted - reported) < 1e-4 < abs(adapted - plain)


@pytest.mark.parametrize("model_type", list_families("qwen3_vl"))
def test_a_run_exports_what_transformers_loads(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, model_type: str
) -> None:
    case, out = build_case(root, tmp_path, model_type, "pp2"), tmp_path / "out"
    overrides = (
        *case.overrides, f"output_dir={out}", f"eval_file={root}/train.jsonl", "max_steps=2", "eval_on_start=false",
        "save_steps=1",
    )  # fmt: skip
    case = replace(case, overrides=overrides)
    workers(2).run(train_run, replace(case, overrides=(*overrides, "stop_after_steps=1")))
    workers(1).run(train_run, replace(case, num_stages=1, world_size=1, overrides=(*overrides, "resume=latest")))
    before, after = (load_file(folder / "model.safetensors") for folder in (case.model, out / "hf"))
    assert before.keys() == after.keys()
    towers = [name for name, tensor in before.items() if tensor.dtype == torch.bfloat16]
    assert towers and all(torch.equal(after[name], before[name]) for name in towers)
    assert abs(measure_plain(case, load_plain(out / "hf")) - read_metrics(out)[-1]["eval_loss"]) < 1e-4


def test_a_plan_says_what_it_does_not_count(root: Path, tmp_path: Path) -> None:
    overrides = (
        "data=image_chat", f"model_name_or_path={root}/mistral3", "plan=true", "world_size=2", "hardware=a100_80g",
        f"output_dir={tmp_path}", "num_stages=2", "precision=bf16",
    )  # fmt: skip
    planned = next(plan_run(to_typed(compose_config("base", *overrides), ("train_file",))))
    tower = load_file(root / "mistral3" / "model.safetensors")
    count = sum(tensor.numel() for name, tensor in tower.items() if tensor.dtype == torch.bfloat16)
    assert planned == (
        "text only: the plan of the 'mistral' in Mistral3ForConditionalGeneration; the rest, "
        f"{render_bytes(2 * count)} and its activations, is on the first stage too, and not counted"
    )


@pytest.mark.parametrize("online", [pytest.param("true", marks=full), "false"])
def test_a_teacher_sees_the_images(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, online: str
) -> None:
    """The student's own model as its teacher finds every token as probable as the student does."""
    case, out = build_case(root, tmp_path, "qwen3_vl", "pp2"), tmp_path / "out"
    teacher = (f"distill.teacher={case.model}", f"distill.online={online}", f"output_dir={out}", "max_steps=1")
    workers(2).run(train_run, replace(case, overrides=(*case.overrides, *teacher)))
    assert read_metrics(out)[-1]["distill_loss"] < 1e-6


@pytest.mark.parametrize("world_size", [pytest.param(4, marks=full), 1])
def test_vectors_of_later_layers_stay_in_the_first_chunk(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, world_size: int
) -> None:
    """Qwen 3-VL's model adds to the output of its first layer; a first chunk that has none of them is refused."""
    case = build_case(root, tmp_path, "qwen3_vl", "pp1")
    if world_size == 4:
        method = "partition_method=[1,2,2,2]"
        case = replace(case, num_stages=4, world_size=4, overrides=(*case.overrides, method))
        with pytest.raises(WorkerError, match=r"the first 1 layers of this model take vectors of images"):
            workers(4).run(train_case, case)
    else:
        compare(workers, case)
