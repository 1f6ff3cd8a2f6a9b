"""Models that wrap a text model, through real pipeline stages: the text model is trained as the wrapped class would
train it, and all other tensors are exported unchanged, to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.cases import BOUND, LAYOUTS, Case, mean_loss, merge, train_case, train_oracle, train_run, worst_difference
from support.configs import compose_config
from support.model_folders import assert_same_bits, convert, export
from support.parity_table import LARGE
from support.runs import eval_dataset, read_metrics
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from support.wrapped import WRAPPED, save_wrapped
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from errors import UserError
from models.generic.wrapped_proof import add_image_outputs
from models.weights.sources import open_weights
from training.config.schema import to_typed
from training.plan_command.run import plan_run
from training.summary import describe_wrapper

SHORT = "mistral3"
# Logits multiplied, then capped; a rope in three parts of a half of each head; heads by kind of layer, clamped experts
LATER = ("muse_glimmer", "muse_spark", "glm4v", "glm4v_moe", "glm_ocr", "step3p7")
ALL = [SHORT, *(pytest.param(name, marks=pytest.mark.full) for name in sorted(WRAPPED) if name != SHORT)]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(model_type, *overrides, steps=...): at pp2, with a Hugging Face folder that is made on first use."""
    root = tmp_path_factory.mktemp("wrapped")
    records = save_records(root / "train.jsonl", 22)
    save_records(root / "eval.jsonl", 11, seed=1)
    save_tokenizer(root / "tokenizer")

    def case(model_type: str, *overrides: str, steps: int = 2) -> Case:
        folder = root / model_type
        if not folder.exists():
            save_wrapped(folder, model_type)
        return Case(folder, records, root, 2, 2, steps, (f"tokenizer_name_or_path={root}/tokenizer", *overrides))

    return case


def load_wrapped(folder: Path) -> PreTrainedModel:
    """In fp32. The class that config.json names loads all of the folder, and finds nothing else in it."""
    model, report = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    add_image_outputs(model)
    return model


def compare_gradients(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    """One step so long that the new weights are the gradients."""
    result, oracle = merge(workers(2).run(train_case, case)), train_oracle(case, load_wrapped(case.model))
    assert result["weights"].keys() < oracle["weights"].keys()
    worst, name = worst_difference(result["weights"], {name: oracle["weights"][name] for name in result["weights"]})
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)


@pytest.mark.parametrize("model_type", ALL)
def test_gradients_equal_the_wrapped_class(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path, model_type: str
) -> None:
    compare_gradients(workers, replace(material(model_type, f"learning_rate={LARGE}", steps=1), workdir=tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp1", "pp2", "pp2xdp2"])
@pytest.mark.parametrize("model_type", LATER)
def test_five_sgd_steps_equal_the_wrapped_class(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path, model_type: str, layout: str
) -> None:
    num_stages, world_size = LAYOUTS[layout]
    case = material(model_type, "learning_rate=0.05", "max_grad_norm=1", steps=5)
    case = replace(case, num_stages=num_stages, world_size=world_size, workdir=tmp_path)
    result, oracle = merge(workers(world_size).run(train_case, case)), train_oracle(case, load_wrapped(case.model))
    worst, name = worst_difference(result["weights"], {name: oracle["weights"][name] for name in result["weights"]})
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize("first", ["hf", pytest.param("converted", marks=pytest.mark.full)])
def test_a_run_exports_what_the_wrapped_class_loads(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path, model_type: str, first: str
) -> None:
    case = material(model_type, "learning_rate=0.05")
    source = case.model if first == "hf" else convert(case.model, tmp_path / "converted")
    out = tmp_path / "out"
    overrides = (f"output_dir={out}", f"eval_file={case.workdir}/eval.jsonl", "save_steps=1", "keep_last=1")
    workers(2).run(train_run, replace(case, model=source, overrides=(*case.overrides, *overrides)))

    before, after = load_file(case.model / "model.safetensors"), load_file(out / "hf" / "model.safetensors")
    passthrough = load_file(out / "checkpoints" / "carried.safetensors")
    assert before.keys() == after.keys() and passthrough.keys() < before.keys()
    assert {tensor.dtype for tensor in passthrough.values()} == {torch.bfloat16}
    for name, tensor in before.items():
        same = after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
        is_buffer = name.endswith(("e_score_correction_bias", "router_bias"))
        assert same == (name in passthrough or is_buffer), name
    reported = read_metrics(out)[-1]
    loss, num_targets = mean_loss(load_wrapped(out / "hf"), eval_dataset(case.workdir))
    assert reported["eval_tokens"] == num_targets and abs(loss - reported["eval_loss"]) < 1e-4
    assert (out / "hf" / "preprocessor_config.json").read_bytes() == (
        case.model / "preprocessor_config.json"
    ).read_bytes()


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=pytest.mark.full) for name in sorted(WRAPPED)])
def test_peft_loads_a_trained_adapter_on_the_wrapped_class(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path, model_type: str
) -> None:
    case, out = material(model_type), tmp_path / "out"
    overrides = (f"output_dir={out}", f"eval_file={case.workdir}/eval.jsonl", "adapter=lora", "optimizer=adamw")
    lora = (*case.overrides, *overrides, "learning_rate=0.05", "max_steps=4", "save_steps=2")
    workers(2).run(train_run, replace(case, overrides=(*lora, "stop_after_steps=2")))
    workers(1).run(train_run, replace(case, num_stages=1, world_size=1, overrides=(*lora, "resume=latest")))

    reported = read_metrics(out)[-1]["eval_loss"]
    model = load_wrapped(case.model)
    plain = mean_loss(model, eval_dataset(case.workdir))[0]
    adapted = PeftModel.from_pretrained(model, out / "hf")
    put = {name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    saved = {name.partition(".lora_A")[0] for name in load_file(out / "hf" / "adapter_model.safetensors")}
    assert put == {name for name in saved if ".lora_B" not in name}  # none on the tower next to the text model
    loss = mean_loss(adapted, eval_dataset(case.workdir))[0]
    assert abs(loss - reported) < 1e-4 < abs(loss - plain)

    export(out / "checkpoints", tmp_path / "from_checkpoints")
    merged = export(out / "hf", tmp_path / "merged")
    assert_same_bits(*(load_file(tmp_path / name / "model.safetensors") for name in ("merged", "from_checkpoints")))
    assert abs(mean_loss(load_wrapped(merged), eval_dataset(case.workdir))[0] - reported) < 1e-4
    before, after = load_file(case.model / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if before[name].dtype == torch.bfloat16)
    assert not (out / "checkpoints" / "carried.safetensors").exists()  # an adapter is next to the model, not in it


@pytest.mark.full
def test_a_run_continues_without_the_folder_that_it_started_from(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path
) -> None:
    case, out = material("mistral3"), tmp_path / "out"
    original, moved = case.model, case.model.rename(tmp_path / "hf")
    overrides = (*case.overrides, f"output_dir={out}", "max_steps=4", "save_steps=1", "keep_last=1")
    case = replace(case, model=moved, workdir=tmp_path, overrides=(*overrides, "stop_after_steps=2"))
    workers(2).run(train_run, case)
    moved.rename(original)
    workers(2).run(train_run, replace(case, num_stages=1, overrides=(*overrides, "resume=latest")))
    before, after = load_file(original / "model.safetensors"), load_file(out / "hf" / "model.safetensors")
    passthrough = load_file(out / "checkpoints" / "carried.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in passthrough)
    load_wrapped(out / "hf")

    (out / "checkpoints" / "carried.safetensors").unlink()
    with pytest.raises(UserError, match=r"carried.safetensors is missing: the tensors that training does not change"):
        export(out / "checkpoints", tmp_path / "again")


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_two_ranks_share_each_layer(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path, model_type: str
) -> None:
    case = material(model_type, f"learning_rate={LARGE}", "tensor_parallel_size=2", steps=1)
    compare_gradients(workers, replace(case, num_stages=1, workdir=tmp_path))


def test_a_plan_and_a_run_say_that_text_is_all(material, tmp_path: Path) -> None:
    case = material(SHORT)
    source = open_weights(str(case.model))
    (description,) = describe_wrapper(source).values()
    assert describe_wrapper(source, "image_chat").keys() == {"images"}
    assert re.fullmatch(
        r"the text model of Mistral3ForConditionalGeneration; its other 24 tensors \([\d.]+ MiB\) are passed through "
        "unchanged",
        description,
    )
    overrides = (f"model_name_or_path={case.model}", "plan=true", "world_size=2", "hardware=a100_80g")
    config = to_typed(compose_config("base", *overrides, f"output_dir={tmp_path}", "num_stages=2"), ("train_file",))
    planned = next(plan_run(config))
    assert planned == "text only: the plan of the 'mistral' in Mistral3ForConditionalGeneration; the rest is on no GPU"
