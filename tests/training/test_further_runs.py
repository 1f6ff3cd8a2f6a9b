"""Whole runs that train the layers that predict further tokens: what they report, save, export and continue from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, train_run
from support.further import NUMBERED, PREFIXED, save_with_further
from support.model_folders import export
from support.runs import read_metrics
from support.tiny import save_records, save_tokenizer
from support.unused import load_export
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import generate

LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "pp4": (4, 4), "dp2": (1, 2), "pp2xdp2": (2, 4), "tp2": (1, 2)}
FURTHER = {"deepseek_v3": "model.layers.4.", "glm4_moe": "model.layers.4.", "qwen3_next": "mtp."}
TRAINED = {"deepseek_v3": "eh_proj.weight", "glm4_moe": "eh_proj.weight", "qwen3_next": "fc.weight"}
BOUND = 1e-5
full = pytest.mark.full


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("further_runs")
    for family in (*NUMBERED, *PREFIXED):
        save_with_further(root / family, family)
        save_tokenizer(root / family)
    save_records(root / "train.jsonl", 40)
    save_records(root / "eval.jsonl", 11, seed=1)
    return root


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(name, family, layout, *overrides): a whole run; returns its output_dir."""

    def start(name: str, family: str, layout: str, *overrides: str) -> Path:
        num_stages, world_size = LAYOUTS[layout]
        given = (
            f"output_dir={tmp_path / name}", "mtp.loss_coef=0.3", "optimizer=adamw", "learning_rate=1e-3",
            "logging_steps=1", f"tensor_parallel_size={2 if layout == 'tp2' else 1}", *overrides,
        )  # fmt: skip
        case = Case(root / family, root / "train.jsonl", root, num_stages, world_size, 4, given)
        workers(world_size).run(train_run, case)
        return tmp_path / name

    return start


def assert_exported(out: Path, root: Path, family: str) -> None:
    """Every published name, the trained layer, and copies that are those of embedding and head."""
    before, after = load_file(root / family / "model.safetensors"), load_export(out / "hf")
    assert before.keys() == after.keys()
    prefix = FURTHER[family]
    assert not torch.equal(before[prefix + TRAINED[family]], after[prefix + TRAINED[family]])
    if family in NUMBERED:
        assert torch.equal(after[f"{prefix}embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert torch.equal(after[f"{prefix}shared_head.head.weight"], after["lm_head.weight"])
    published, exported = (json.loads((each / "config.json").read_text()) for each in (root / family, out / "hf"))
    counts = [key for key in published if "nextn" in key or "mtp" in key]
    assert (
        counts and all(exported[key] == published[key] for key in counts) and "trained_further_layers" not in exported
    )
    _, report = AutoModelForCausalLM.from_pretrained(out / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]


def test_a_run_reports_saves_and_exports_them(run, root: Path) -> None:
    out = run("run", "deepseek_v3", "pp2", f"eval_file={root}/eval.jsonl", "eval_steps=2")
    steps = [record for record in read_metrics(out) if "loss" in record]
    evaluations = [record for record in read_metrics(out) if "eval_loss" in record]
    assert len(steps) == 4 and all(record["mtp_loss_1"] > 0 for record in steps)
    assert evaluations and all(record["eval_mtp_loss_1"] > 0 for record in evaluations)
    assert not (out / "checkpoints/carried.safetensors").exists()
    assert_exported(out, root, "deepseek_v3")


@full
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_other_names_are_exported_too(run, root: Path, family: str) -> None:
    assert_exported(run("run", family, "pp2"), root, family)


@full
@pytest.mark.parametrize(
    ("family", "saved", "resumed"),
    [
        *(("deepseek_v3", *pair) for pair in (("pp1", "pp2xdp2"), ("pp4", "tp2"), ("tp2", "pp2"), ("dp2", "pp4"))),
        *(("qwen3_next", *pair) for pair in (("pp1", "pp2xdp2"), ("dp2", "pp4"))),
    ],
)
def test_a_run_continues_at_another_layout(run, family: str, saved: str, resumed: str) -> None:
    whole = run("whole", family, saved, "save_steps=2")
    begun = whole / "checkpoints/global_step2"
    continued = run("continued", family, resumed, f"resume={begun}")
    expected = [record for record in read_metrics(whole) if record["step"] > 2]
    found = read_metrics(continued)
    assert [record["step"] for record in found] == [3, 4]
    for key in ("loss", "mtp_loss_1", "grad_norm"):
        assert [each[key] for each in found] == pytest.approx([each[key] for each in expected], rel=BOUND), key


@full
def test_frozen_parts_and_groups_are_named_as_they_are_published(run, root: Path) -> None:
    groups = "parameter_groups=[{pattern: 'layers[.]4[.].*norm', learning_rate: 1e-7}]"
    out = run("run", "deepseek_v3", "pp2", "freeze=[eh_proj]", groups)
    before, after = load_file(root / "deepseek_v3/model.safetensors"), load_export(out / "hf")
    moved = {
        name.removeprefix("model.layers.4."): (after[name] - tensor).abs().max().item()
        for name, tensor in before.items()
        if name.startswith("model.layers.4.")
    }
    assert moved["eh_proj.weight"] == 0
    assert 0 < max(moved["enorm.weight"], moved["hnorm.weight"], moved["shared_head.norm.weight"]) < 1e-5
    assert moved["self_attn.o_proj.weight"] > 1e-4


@full
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_adapters_are_on_them_and_merged_into_them(run, root: Path, tmp_path: Path, family: str) -> None:
    out = run("run", family, "pp2", "adapter=lora", "adapter.r=4", "learning_rate=1e-2")
    adapter = load_file(out / "hf/adapter_model.safetensors")
    prefix = FURTHER[family]
    projection = TRAINED[family].removesuffix(".weight")
    assert f"base_model.model.{prefix}{projection}.lora_A.weight" in adapter
    before = load_file(root / family / "model.safetensors")
    for folder in ("hf", "checkpoints"):
        merged = load_export(export(out / folder, tmp_path / f"merged_{folder}"))
        assert merged.keys() == before.keys()
        changed = {name for name, tensor in before.items() if not torch.equal(merged[name], tensor)}
        assert prefix + TRAINED[family] in changed and not any(name.endswith("norm.weight") for name in changed)


def decode(folder: Path, prompts: list[str], count: int) -> tuple[list[list[int]], generate.Generator]:
    generator = generate.Generator(generate.open_weights(str(folder)), None, count, 0.0, speculative=True)
    ends = [generator.tokenizer.eos_token_id]
    texts = [generator.decoder.generate(generator.tokenizer(text).input_ids, count, ends) for text in prompts]
    return texts, generator


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_next", marks=full)])
def test_drafts_do_not_change_the_text(root: Path, family: str) -> None:
    prompts = ["def encode(self, o):", "import json"]
    written, generator = decode(root / family, prompts, 12)
    assert generator.decoder.drafted > 0
    model = AutoModelForCausalLM.from_pretrained(root / family, dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts, written, strict=True):
        ids = AutoTokenizer.from_pretrained(root / family)(prompt).input_ids
        for token in tokens:
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)
        assert len(tokens) == 12 or tokens[-1] == 2


def test_the_command_reports_the_rate(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model_name_or_path", str(root / "deepseek_v3"), "--prompt", "import json", "--max_new_tokens", "6"]
    texts = []
    for further in ((), ("--speculative",)):
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments, *further])
        generate.main()
        texts.append(capsys.readouterr().out)
    text, _, rate = texts[1].rpartition("accepted ")
    assert text == texts[0] and rate.split()[2].isdecimal() and rate.endswith("%)\n")
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments, "--speculative", "--temperature", "1"])
    with pytest.raises(SystemExit, match="--speculative decodes greedily"):
        generate.main()


@full
def test_after_200_steps_more_drafts_are_accepted(run, root: Path) -> None:
    """The model learns its text, and its layer to predict what the model writes: not because any draft would do, since
    another layer's drafts are still wrong."""
    out = run("run", "deepseek_v3", "pp1", "max_steps=200", "learning_rate=5e-3", "logging_steps=50")
    prompts = [json.loads(line)["prompt"] + "\n" for line in (root / "train.jsonl").read_text().splitlines()[:10]]
    rates = []
    for folder in (root / "deepseek_v3", out / "hf"):
        _, generator = decode(folder, prompts, 24)
        rates.append(generator.decoder.accepted / generator.decoder.drafted)
    print(f"accepted before: {rates[0]:.1%}, after: {rates[1]:.1%}")
    assert rates[1] > rates[0] + 0.2, rates
