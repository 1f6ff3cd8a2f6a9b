"""LoRA on mixtures whose frozen projections and experts are in 4 bits, or whose experts are as they are published,
against peft on the plain Hugging Face model with the dequantized values; and the files that such runs leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    SELECTIVE,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import save_family
from support.model_folders import convert, export
from support.quantized import save_fp8, save_int4, save_mxfp4, save_rounded
from support.runs import eval_dataset, read_metrics
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoConfig, AutoModelForCausalLM

from convert2ckpt import main as convert2ckpt

pytest.importorskip("bitsandbytes")
IN_4_BITS = ("adapter=lora", "adapter.load_in_4bit=true")
KEPT = ("adapter=lora", "adapter.keep_quantized=true")
EP2 = "expert_parallel_size=2"
ATTENTION = ("q_proj", "v_proj")  # adapters on these alone
LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "pp2xdp2": (2, 4), "ep2": (1, 2), "ep2xpp2": (2, 4)}
FAST = [("qwen3_moe", "pp2", ()), ("mixtral", "ep2", ())]
FULL = [
    ("mixtral", "pp1", ()),
    ("mixtral", "pp2", ("zero_stage=2", "micro_batch_size=1", CHECKPOINTED)),
    ("qwen3_moe", "pp1", (CHECKPOINTED,)),
    ("qwen3_moe", "ep2", SELECTIVE),
    ("qwen3_moe", "pp2", ("schedule=zero_bubble", "data.packing=true")),
    ("qwen3_moe", "pp2xdp2", ("schedule=interleaved",)),
    ("deepseek_v3", "pp2", ("data.packing=true", CHECKPOINTED)),
    ("deepseek_v3", "ep2xpp2", ("schedule=zero_bubble", CHECKPOINTED)),
    ("gpt_oss", "pp2", ()),
    ("gpt_oss", "ep2xpp2", ("data.packing=true",)),
    ("glm4_moe", "ep2", (CHECKPOINTED,)),
    ("llama4_text", "pp2", SELECTIVE),
]


def prepare(tmp_path: Path, family: str, form: str, **fields: int) -> tuple[Path, Path]:
    """The folder of a model, and one with the dequantized values of its frozen weights in the form. fields: of the
    config, for nf4."""
    model, rounded = tmp_path / "model", tmp_path / "rounded"
    if form == "nf4":
        save_family(model, family, **fields)
        save_rounded(rounded, model)
    else:
        saves: dict[str, Callable[[], object]] = {
            "fp8": lambda: save_fp8(model, "float32"),
            "int4": lambda: save_int4(model, "float32"),
            "mxfp4": lambda: save_mxfp4(model),
        }
        saves[form]()
        export(convert(model, tmp_path / "converted"), rounded)
    save_tokenizer(tmp_path / "tokenizer")
    return model, rounded


def compare(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str, layout: str, *keys: str, form: str = "nf4",
    **fields: int,
) -> None:  # fmt: skip
    """Five SGD steps: losses, norms and adapters, of all projections and experts, or of ATTENTION alone. Packed rows
    are compared with the same run on the rounded model, others with peft on that model in one process. fields: of the
    model's config."""
    model_folder, rounded_folder = prepare(tmp_path, family, form, **fields)
    targets = {"target_modules": list(ATTENTION), "target_parameters": []} if "attention" in keys else {}
    make_adapter(tmp_path / "adapter", rounded_folder, **targets)
    num_stages, world_size = LAYOUTS[layout]
    given = (f"tokenizer_name_or_path={tmp_path}/tokenizer", f"adapter.name_or_path={tmp_path}/adapter", CLIPPED)
    given += (EP2,) if "ep2" in layout else ()
    given += tuple(key for key in keys if key != "attention")
    held = IN_4_BITS if form == "nf4" else KEPT
    records = save_records(tmp_path / "train.jsonl", 40)
    case = Case(model_folder, records, tmp_path, num_stages, world_size, overrides=(*held, *given))
    rounded = replace(case, model=rounded_folder, overrides=("adapter=lora", *given))
    result = merge(workers(world_size).run(train_case, case))
    if "data.packing=true" in keys:
        oracle = merge(workers(world_size).run(train_case, rounded))
        found, expected = ({n: t for n, t in each["weights"].items() if "lora_" in n} for each in (result, oracle))
    else:
        model = AutoModelForCausalLM.from_pretrained(rounded_folder, dtype=torch.float32)
        oracle = train_oracle(rounded, PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True))
        found, expected = to_peft_weights(result, oracle, AutoConfig.from_pretrained(rounded_folder))
    worst, name = worst_difference(found, expected)
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.parametrize(
    ("family", "form", "layout", "keys"),
    [
        ("deepseek_v3", "fp8", "pp2", ()),
        ("deepseek_v3", "int4", "pp1", ()),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("deepseek_v3", "fp8", "ep2", SELECTIVE),
                ("deepseek_v3", "fp8", "ep2xpp2", ("schedule=zero_bubble", "data.packing=true")),
                ("deepseek_v3", "int4", "pp2", ()),
                ("deepseek_v3", "int4", "ep2", ()),
                ("deepseek_v3", "int4", "ep2xpp2", ("data.packing=true", CHECKPOINTED)),
                ("gpt_oss", "mxfp4", "pp1", ()),
                ("gpt_oss", "mxfp4", "pp2", (CHECKPOINTED,)),
                ("gpt_oss", "mxfp4", "ep2xpp2", ("data.packing=true",)),
            )
        ),
    ],
)
def test_published_experts_are_those_of_a_run_that_dequantizes_them(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str, form: str, layout: str, keys: tuple[str, ...]
) -> None:
    compare(workers, tmp_path, family, layout, *keys, form=form)


@pytest.mark.parametrize(
    ("family", "layout", "keys"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_five_sgd_steps_equal_peft_on_the_dequantized_values(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str, layout: str, keys: tuple[str, ...]
) -> None:
    shorter = {"num_hidden_layers": 2} if (family, layout, keys) in FAST else {}
    compare(workers, tmp_path, family, layout, *keys, **shorter)


@pytest.mark.full
def test_experts_without_adapters_are_in_4_bits_too(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    compare(workers, tmp_path, "mixtral", "pp2", "attention", "schedule=zero_bubble")


def test_a_run_resumes_at_another_layout_and_exports(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """The adapter is a plain one of the model as it was, and merges into that."""
    model_folder = save_family(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    save_tokenizer(model_folder)
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    records = save_records(tmp_path / "train.jsonl", 22)
    keys = (*IN_4_BITS, "adapter.r=4", "max_grad_norm=1", f"eval_file={tmp_path}/eval.jsonl")

    def run(name: str, num_stages: int, *overrides: str) -> Path:
        out = tmp_path / name
        given = (*keys, f"output_dir={out}", *overrides)
        workers(2).run(train_run, Case(model_folder, records, tmp_path, num_stages, 2, 4, given))
        return out

    whole = run("whole", 2)
    run("halves", 2, "stop_after_steps=2")
    with pytest.raises(AssertionError, match="adapter.load_in_4bit"):
        run("halves", 1, "resume=latest", "adapter.load_in_4bit=false")
    halves = run("halves", 1, EP2, "resume=latest")
    reported = read_metrics(whole)[-1]["eval_loss"]
    assert read_metrics(halves)[-1]["eval_loss"] == pytest.approx(reported, rel=BOUND)
    saved, found = (load_file(out / "hf" / "adapter_model.safetensors") for out in (whole, halves))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, saved[name], rtol=1e-4, atol=1e-6, msg=name)
    folders = ("--model_name_or_path", f"{whole}/hf", "--output_dir", f"{tmp_path}/merged")
    with patch("sys.argv", ["convert2ckpt.py", "--to_hf", *folders]):
        assert convert2ckpt() == 0
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "merged"))
    loss = mean_loss(merged, eval_dataset(tmp_path))[0]
    assert loss == pytest.approx(mean_loss(PeftModel.from_pretrained(base, whole / "hf"), eval_dataset(tmp_path))[0])
    assert loss != pytest.approx(reported, rel=1e-4)  # of the run's experts, which are rounded


@pytest.mark.parametrize(
    ("family", "form", "trained", "evaluated"),
    [
        ("qwen3_moe", "nf4", "pp2", "ep2"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("qwen3_moe", "nf4", "pp1", "pp2"),
                ("deepseek_v3", "fp8", "pp2", "pp1"),
                ("deepseek_v3", "fp8", "pp1", "ep2xpp2"),
                ("deepseek_v3", "int4", "ep2", "pp2"),
                ("gpt_oss", "mxfp4", "pp2", "ep2"),
                ("gpt_oss", "mxfp4", "pp1", "pp2"),
            )
        ),
    ],
)
def test_an_evaluation_has_the_weights_that_were_trained_on(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str, form: str, trained: str, evaluated: str
) -> None:
    """At another layout, from the checkpoint and from the export."""
    model_folder, rounded_folder = prepare(tmp_path, family, form)
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    records = save_records(tmp_path / "train.jsonl", 22)
    keys = (f"tokenizer_name_or_path={tmp_path}/tokenizer", f"eval_file={tmp_path}/eval.jsonl", "max_grad_norm=1")
    held = IN_4_BITS if form == "nf4" else KEPT

    def run(name: str, layout: str, *overrides: str) -> Path:
        num_stages, world_size = LAYOUTS[layout]
        given = (*keys, f"output_dir={tmp_path}/{name}", *overrides, *((EP2,) if "ep2" in layout else ()))
        workers(world_size).run(train_run, Case(model_folder, records, tmp_path, num_stages, world_size, 3, given))
        return tmp_path / name

    def evaluate(*overrides: str) -> float:
        out = run("evaluated", evaluated, "evaluate_only=true", *overrides)
        return json.loads((out / "evaluation.json").read_text())["eval_loss"]

    whole = run("whole", trained, *held)
    reported, checkpoint = read_metrics(whole)[-1]["eval_loss"], f"resume={whole}/checkpoints"
    assert evaluate(*held, checkpoint) == pytest.approx(reported, rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(rounded_folder, dtype=torch.float32)
    before = mean_loss(model, eval_dataset(tmp_path))[0]
    expected = mean_loss(PeftModel.from_pretrained(model, whole / "hf"), eval_dataset(tmp_path))[0]
    assert evaluate(*held, f"adapter.name_or_path={whole}/hf") == pytest.approx(expected, rel=BOUND)
    assert before - expected > 0.001  # the adapter does something
    if form == "nf4":
        with pytest.raises(AssertionError, match="adapter.load_in_4bit was true, is false; give the same, or evaluate"):
            evaluate("adapter=lora", checkpoint)
        merged = evaluate("adapter=none", checkpoint)
        assert evaluate("adapter=lora", checkpoint, "resume_allow_changes=true") == pytest.approx(merged, rel=BOUND)
        assert merged != pytest.approx(reported, rel=1e-4)  # its base is not rounded


@pytest.mark.full
@pytest.mark.parametrize(("save", "held"), [(save_fp8, KEPT), (save_mxfp4, KEPT), (save_fp8, IN_4_BITS)])
def test_an_evaluation_in_bf16_rounds_as_the_run_does(
    save: Callable[..., object], held: tuple[str, ...], workers: Callable[[int], WorkerGroup], tmp_path: Path
) -> None:
    """An adapter that is merged in is rounded with the weights."""
    model_folder = tmp_path / "model"
    save(model_folder)
    save_tokenizer(model_folder)
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    records = save_records(tmp_path / "train.jsonl", 22)
    keys = ("precision=bf16", f"eval_file={tmp_path}/eval.jsonl", f"output_dir={tmp_path}/whole")

    def run(*overrides: str) -> None:
        workers(2).run(train_run, Case(model_folder, records, tmp_path, 2, 2, 3, (*keys, *overrides)))

    def evaluate(*overrides: str) -> float:
        run(*overrides, "evaluate_only=true", "resume=latest")
        return json.loads((tmp_path / "whole" / "evaluation.json").read_text())["eval_loss"]

    run(*held)
    reported = read_metrics(tmp_path / "whole")[-1]["eval_loss"]
    assert evaluate(*held) == reported
    assert evaluate("adapter=none") != reported


@pytest.mark.full
@pytest.mark.parametrize("save", [save_fp8, save_int4])
def test_a_run_on_published_experts_continues_without_the_key_and_exports(
    save: Callable[..., object], workers: Callable[[int], WorkerGroup], tmp_path: Path
) -> None:
    """At another layout; and merged, the model is what the run has evaluated, dequantized."""
    model_folder = tmp_path / "model"
    save(model_folder, "float32", num_hidden_layers=2)
    save_tokenizer(model_folder)
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    records = save_records(tmp_path / "train.jsonl", 22)
    keys = (*KEPT, "adapter.r=4", "max_grad_norm=1", f"eval_file={tmp_path}/eval.jsonl")

    def run(name: str, num_stages: int, *overrides: str) -> Path:
        out = tmp_path / name
        given = (*keys, f"output_dir={out}", *overrides)
        workers(2).run(train_run, Case(model_folder, records, tmp_path, num_stages, 2, 4, given))
        return out

    whole = run("whole", 2)
    run("halves", 2, "stop_after_steps=2")
    halves = run("halves", 1, EP2, "resume=latest", "adapter.keep_quantized=false")
    reported = read_metrics(whole)[-1]["eval_loss"]
    assert read_metrics(halves)[-1]["eval_loss"] == pytest.approx(reported, rel=BOUND)
    saved, found = (load_file(out / "hf" / "adapter_model.safetensors") for out in (whole, halves))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, saved[name], rtol=1e-4, atol=1e-6, msg=name)
    folders = ("--model_name_or_path", f"{whole}/hf", "--output_dir", f"{tmp_path}/merged")
    with patch("sys.argv", ["convert2ckpt.py", "--to_hf", *folders]):
        assert convert2ckpt() == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    assert mean_loss(merged, eval_dataset(tmp_path))[0] == pytest.approx(reported, rel=1e-4)
