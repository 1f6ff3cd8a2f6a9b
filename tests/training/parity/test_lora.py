"""LoRA on the stages against peft on the plain Hugging Face model, and the files that a LoRA run leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    LAYOUTS,
    ZERO_LAYOUTS,
    Case,
    mean_loss,
    merge,
    relative_difference,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import FAMILIES, MIXTURES, save_family
from support.runs import eval_dataset, read_metrics
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

from convert2ckpt import main as convert2ckpt
from errors import UserError
from models.adapters.adapter import Adapter, adapter_names
from models.adapters.folder import to_peft_name
from models.adapters.targets import build_lora_config
from models.architecture.lookup import build_layers
from models.weights.sources import open_weights

FAST = [("llama", "pp2", "use_dora"), ("gpt2", "pp2", "")]
REST = [
    (family, layout, "")
    for family in sorted(FAMILIES)
    for layout in ("pp1", "pp2", "pp4")
    if (family, layout, "") not in FAST
]
REST += [(family, "pp2", "") for family in sorted(MIXTURES)] + [("mixtral", "pp1", ""), ("glm4_moe", "pp1", "")]
REST += [("deepseek_v3", "pp2", "use_rslora")]


@pytest.mark.parametrize(
    ("family", "layout", "option"),
    [pytest.param(*case) for case in FAST] + [pytest.param(*case, marks=pytest.mark.full) for case in REST],
)
def test_five_sgd_steps_equal_peft(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str, layout: str, option: str
) -> None:
    model_folder = save_family(tmp_path / "model", family)
    save_tokenizer(tmp_path / "tokenizer")
    options = {option: True} if option else {}
    model = make_adapter(tmp_path / "adapter", model_folder, **options)
    num_stages, world_size = LAYOUTS[layout]
    overrides = (
        f"tokenizer_name_or_path={tmp_path}/tokenizer",
        "adapter=lora",
        f"adapter.name_or_path={tmp_path}/adapter",
        CHECKPOINTED,
        CLIPPED,
    )
    case = Case(
        model_folder,
        save_records(tmp_path / "train.jsonl", 40),
        tmp_path,
        num_stages,
        world_size,
        overrides=(*overrides, "learning_rate=0.5"),
    )
    result = merge(workers(world_size).run(train_case, case))
    oracle = train_oracle(case, model)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.full
def test_lora_plus_on_stages_equals_peft(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """SGD by the groups that peft makes; with DoRA, whose vectors have the higher rate too."""
    model_folder = save_family(tmp_path / "model", "llama")
    save_tokenizer(tmp_path / "model")
    model = make_adapter(tmp_path / "adapter", model_folder, use_dora=True)
    given = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", "adapter.loraplus_lr_ratio=4", CLIPPED)
    records = save_records(tmp_path / "train.jsonl", 40)
    case = Case(model_folder, records, tmp_path, 2, 2, overrides=(*given, "learning_rate=0.1"))
    result = merge(workers(2).run(train_case, case))

    def build_optimizer(adapted: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return create_loraplus_optimizer(adapted, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=4.0), None

    oracle = train_oracle(case, model, build_optimizer)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)


@pytest.mark.parametrize(
    ("family", "init", "layout", "keys"),
    [
        ("llama", "pissa", "pp2", (CHECKPOINTED,)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("llama", "olora", "pp1", ()),
                ("llama", "pissa", "pp2", ("schedule=zero_bubble",)),
                ("llama", "olora", "zero3", ("zero_stage=3",)),
                ("gpt2", "pissa", "pp2", ()),
            )
        ),
    ],
)
def test_an_adapter_that_starts_from_the_base_equals_peft(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str, init: str, layout: str, keys: tuple[str, ...]
) -> None:
    """peft takes the start out of the base weights; here they stay, and the layer subtracts it."""
    model_folder = save_family(tmp_path / "model", family)
    save_tokenizer(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    lora = build_lora_config(build_layers(model.config), "all-linear", r=4, lora_alpha=6, init_lora_weights=init)
    model = get_peft_model(model, lora)
    given = ("adapter=lora", "adapter.r=4", "adapter.lora_alpha=6", f"adapter.init_lora_weights={init}", CLIPPED)
    num_stages, world_size = (LAYOUTS | ZERO_LAYOUTS)[layout]
    records = save_records(tmp_path / "train.jsonl", 40)
    overrides = (*given, *keys, "learning_rate=0.5")
    case = Case(model_folder, records, tmp_path, num_stages, world_size, overrides=overrides)
    result = merge(workers(world_size).run(train_case, case))
    oracle = train_oracle(case, model)
    trained, expected = (multiply_pairs(each) for each in to_peft_weights(result, oracle, model.config))
    worst, name = worst_difference(trained, expected)
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def multiply_pairs(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """B A of each projection: a decomposition does not determine the signs of both."""
    return {name: weights[name.replace("lora_A", "lora_B")] @ a for name, a in weights.items() if "lora_A" in name}


@pytest.mark.full
def test_a_run_that_starts_from_the_base_resumes_and_exports_a_plain_adapter(run, root: Path) -> None:
    keys = (*SOME_ADAPTERS, "adapter.init_lora_weights=pissa")
    whole = run("whole", 2, 2, *keys)
    run("halves", 2, 2, *keys, "stop_after_steps=2")
    with pytest.raises(AssertionError, match="resume: adapter.r was 4, is 6; give the same"):
        run("halves", 1, 1, *keys, "adapter.r=6", "resume=latest")
    halves = run("halves", 1, 1, *keys, "resume=latest")
    reported = read_metrics(whole)[-1]["eval_loss"]
    assert read_metrics(halves)[-1]["eval_loss"] == pytest.approx(reported, rel=BOUND)
    fields = json.loads((whole / "hf" / "adapter_config.json").read_text())
    assert (fields["r"], fields["init_lora_weights"]) == (8, True)
    base = AutoModelForCausalLM.from_pretrained(root / "tiedFalse")
    before = mean_loss(base, eval_dataset(root))[0]
    assert abs(mean_loss(PeftModel.from_pretrained(base, whole / "hf"), eval_dataset(root))[0] - reported) < 1e-4
    assert before - reported > 0.01
    run("whole", 2, 2, *keys, "evaluate_only=true", "resume=latest")
    assert json.loads((whole / "evaluation.json").read_text())["eval_loss"] == pytest.approx(reported, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("pp2", 1), *(pytest.param(*each, marks=pytest.mark.full) for each in (("pp1", 1), ("dp2", 2), ("pp2xdp2", 2)))],
)
def test_projections_in_4_bits_train_the_adapters_of_a_model_with_their_values(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, layout: str, stage: int
) -> None:
    """The oracle is peft on a Hugging Face model whose projections are quantized to nf4 and back to fp32."""
    functional = pytest.importorskip("bitsandbytes.functional")
    model_folder = save_family(tmp_path / "model", "llama", hidden_size=64, intermediate_size=128)
    save_tokenizer(tmp_path / "model")
    model = make_adapter(tmp_path / "adapter", model_folder)
    changed = 0.0
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            rounded = functional.dequantize_4bit(
                *functional.quantize_4bit(parameter.data, quant_type="nf4", compress_statistics=True)
            )
            changed = max(changed, relative_difference(rounded, parameter.data))
            parameter.data = rounded
    assert changed > 0.01  # it does round
    num_stages, world_size = {**LAYOUTS, "dp2": (1, 2)}[layout]
    overrides = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", "adapter.load_in_4bit=true", CLIPPED)
    overrides += (f"zero_stage={stage}", "micro_batch_size=1")
    case = Case(
        model_folder, save_records(tmp_path / "train.jsonl", 40), tmp_path, num_stages, world_size, overrides=overrides
    )
    result = merge(workers(world_size).run(train_case, case))
    oracle = train_oracle(case, model)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)


SOME_ADAPTERS = ("adapter=lora", "adapter.r=4", "adapter.target_modules=[q_proj,v_proj,down_proj]")


@pytest.mark.full  # at another layout, in the short suite too: test_resume_layouts.py
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_lora_run_resumes(run, num_stages: int) -> None:
    whole = run("whole", num_stages, num_stages, *SOME_ADAPTERS)
    run("halves", num_stages, num_stages, *SOME_ADAPTERS, "stop_after_steps=2")
    halves = run("halves", num_stages, num_stages, *SOME_ADAPTERS, "resume=latest")
    assert read_metrics(whole)[-1]["eval_loss"] == read_metrics(halves)[-1]["eval_loss"]
    saved, found = (load_file(out / "hf" / "adapter_model.safetensors") for out in (whole, halves))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_lora_run_exports_and_merges(run, root: Path, tmp_path: Path, num_stages: int) -> None:
    whole = run("whole", num_stages, num_stages, *SOME_ADAPTERS)
    reported = read_metrics(whole)[-1]["eval_loss"]
    assert (whole / "hf" / "config.json").is_file()  # so the tokenizer next to it is used, not the base model's
    assert (
        sum(file.stat().st_size for file in (whole / "checkpoints/global_step4").glob("layer_*")) < 200_000
    )  # adapters alone

    base = AutoModelForCausalLM.from_pretrained(root / "tiedFalse")
    before = mean_loss(base, eval_dataset(root))[0]
    assert abs(mean_loss(PeftModel.from_pretrained(base, whole / "hf"), eval_dataset(root))[0] - reported) < 1e-4
    assert before - reported > 0.01  # the adapter does something
    for source in ("hf", "checkpoints"):
        merged = tmp_path / f"merged-{source}"
        assert (
            convert2ckpt_main("--to_hf", "--model_name_or_path", str(whole / source), "--output_dir", str(merged)) == 0
        )
        assert abs(mean_loss(AutoModelForCausalLM.from_pretrained(merged), eval_dataset(root))[0] - reported) < 1e-4


@pytest.mark.parametrize(("trained", "evaluated"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_an_adapter_is_evaluated_on_its_base_at_another_layout(run, root: Path, trained: int, evaluated: int) -> None:
    """Put on the base model or merged into it, from the checkpoint or the export; and a new one is refused."""
    whole = run("whole", trained, trained, *SOME_ADAPTERS)
    reported = read_metrics(whole)[-1]["eval_loss"]

    def evaluate(*overrides: str) -> float:
        out = run("evaluated", evaluated, evaluated, "evaluate_only=true", "micro_batch_size=4", *overrides)
        return json.loads((out / "evaluation.json").read_text())["eval_loss"]

    checkpoint, folder = f"resume={whole}/checkpoints", f"adapter.name_or_path={whole}/hf"
    assert evaluate(*SOME_ADAPTERS, checkpoint) == pytest.approx(reported, rel=1e-6)
    with pytest.raises(AssertionError, match="adapter.r was 4, is 6"):
        evaluate(*SOME_ADAPTERS, checkpoint, "adapter.r=6")
    assert evaluate("adapter=none", checkpoint) == pytest.approx(reported, rel=BOUND)
    base = AutoModelForCausalLM.from_pretrained(root / "tiedFalse")
    before = mean_loss(base, eval_dataset(root))[0]
    expected = mean_loss(PeftModel.from_pretrained(base, whole / "hf"), eval_dataset(root))[0]
    assert evaluate("adapter=lora", folder) == pytest.approx(expected, rel=BOUND)
    assert before - expected > 0.01  # the adapter does something
    with pytest.raises(AssertionError, match="a new adapter adds nothing to the model; give resume or adapter.name_"):
        evaluate("adapter=lora")
    with pytest.raises(AssertionError, match="resume=latest: there is no checkpoint at "):
        evaluate("adapter=lora", "resume=auto")


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_run_on_a_mixture_exports_adapters_that_peft_loads(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, family: str
) -> None:
    """Cut over two ranks; projections, shared experts and routed ones are in it."""
    model_folder = save_family(tmp_path / "model", family)
    save_tokenizer(model_folder)
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    records = save_records(tmp_path / "train.jsonl", 22)
    given = ("adapter=lora", "tensor_parallel_size=2", "max_grad_norm=1", f"eval_file={tmp_path}/eval.jsonl")
    workers(2).run(train_run, Case(model_folder, records, tmp_path, 1, 2, 3, given))
    reported = read_metrics(tmp_path / "out")[-1]["eval_loss"]
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    before = mean_loss(base, eval_dataset(tmp_path))[0]
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "hf")
    assert mean_loss(adapted, eval_dataset(tmp_path))[0] == pytest.approx(reported, abs=1e-4)
    assert before - reported > 0.01  # the adapter does something
    folders = ("--model_name_or_path", f"{tmp_path}/out/hf", "--output_dir", f"{tmp_path}/merged")
    assert convert2ckpt_main("--to_hf", *folders) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert mean_loss(merged, eval_dataset(tmp_path))[0] == pytest.approx(reported, abs=1e-4)


def convert2ckpt_main(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["convert2ckpt.py", *arguments])
        return convert2ckpt()


def test_adapters_start_equal_at_every_layout(workers: Callable[[int], WorkerGroup], root: Path) -> None:
    weights = []
    for num_stages in (1, 2):
        case = Case(
            root / "tiedFalse",
            root / "train.jsonl",
            root,
            num_stages,
            num_stages,
            steps=1,
            overrides=("adapter=lora", "learning_rate=0"),
        )
        weights.append(
            {
                name: t
                for name, t in merge(workers(num_stages).run(train_case, case))["weights"].items()
                if "lora_" in name
            }
        )
    assert (
        weights[0].keys() == weights[1].keys() and len(weights[0]) == 2 * 7 * 5
    )  # A and B, seven projections, five layers
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


FIRST_STAGE, LAST_STAGE = ["embed_tokens", "layers\\.[0-2]\\."], ["layers\\.[34]\\.", "norm", "lm_head"]


@pytest.mark.parametrize(
    ("freeze", "tied"),
    [
        pytest.param(FIRST_STAGE, True, id="first-stage-tied"),
        pytest.param(LAST_STAGE, False, id="last-stage-untied"),
        pytest.param(FIRST_STAGE, False, id="first-stage-untied", marks=pytest.mark.full),
        pytest.param(LAST_STAGE, True, id="last-stage-tied", marks=pytest.mark.full),
    ],
)
def test_a_stage_with_nothing_to_train(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    freeze: list[str],
    tied: bool,
) -> None:
    freeze = [pattern for pattern in freeze if not (tied and pattern == "lm_head")]  # which is the embedding then
    pattern = ",".join(f'"{p}"' for p in freeze)
    case = Case(
        root / f"tied{tied}",
        root / "train.jsonl",
        tmp_path,
        2,
        2,
        overrides=(f"freeze=[{pattern}]", "partition_method=[4,4]", CLIPPED),
    )
    result = merge(workers(2).run(train_case, case))
    model = AutoModelForCausalLM.from_pretrained(root / f"tied{tied}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(p, name) for p in freeze))
    oracle = train_oracle(case, model)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def test_a_peft_folder_has_peft_names(tmp_path: Path) -> None:
    """The tensors of a layer with an adapter, DoRA's vector included, equal those that peft writes for the whole
    model."""
    folder = save_family(tmp_path / "model", "llama")
    model = make_adapter(tmp_path / "adapter", folder, use_dora=True)
    layers = build_layers(model.config)
    names = set()
    for index, layer in enumerate(layers):
        module = layer.module_class(*layer.args)
        Adapter(build_lora_config(layers, "all-linear", use_dora=True)).attach(module, index, layer)
        names |= {to_peft_name(name, layer) for name in adapter_names(module)}
    assert names == load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_what_would_be_lost_of_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "llama")
    model = make_adapter(tmp_path / "adapter", folder, ["q_proj"])
    layers, weights, config = (
        build_layers(model.config),
        tmp_path / "adapter" / "adapter_model.safetensors",
        tmp_path / "adapter" / "adapter_config.json",
    )
    open_weights(str(tmp_path / "adapter")).check_complete(layers)
    save_file({**load_file(weights), "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(
        UserError, match=r"'base_model.model.lm_head.lora_A.weight' does not belong to a projection or an expert"
    ):
        open_weights(str(tmp_path / "adapter")).check_complete(layers)
    fields = json.loads(config.read_text())
    for key, value, message in (
        ("target_modules", ".*q_proj", "target_modules='.*q_proj'; write a list"),
        ("layers_to_transform", [1], r"layers_to_transform=\[1\], which is not supported"),
        ("bias", "all", "bias=all, which is not supported"),
    ):
        config.write_text(json.dumps(fields | {key: value}))
        with pytest.raises(UserError, match=message):
            open_weights(str(tmp_path / "adapter"))
