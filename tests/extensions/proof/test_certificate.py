"""`proof=true`: a small model at a run's layout against plain transformers, in real ranks; and that it fails where a
gradient is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.configs import build_config
from support.launching import run_deepspeed
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoConfig, LlamaConfig

from data.loading import loader
from errors import UserError
from extension import OWN_FOLDERS, collect_facts
from extensions.hub.model_card import render_card
from extensions.proof import recorded
from extensions.proof.certificate import save_certificate
from extensions.proof.material import find_material, write_material
from extensions.proof.recorded import FILE
from extensions.proof.run import build_small_run, check_run, prove_small
from extensions.proof.small_run import shrink_model
from models.generic.shrink import SmallSizes, shrink
from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig
from training.distributed.ranks import Ranks
from training.observability import environment
from training.observability.run_page import read_history
from training.plan_command.run import describe_model

BATCH = ("micro_batch_size=2", "global_batch_size=16", "max_seq_length=256")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def compose(folder: Path, cache: Path, *overrides: str) -> RunConfig:
    """A run without weights, of a model that conf/model describes."""
    keys = ("model=llama_tiny", f"model_name_or_path={folder}/none", f"train_file={folder}/none.jsonl", *BATCH)
    return build_config(*keys, f"output_dir={folder}/out", f"data.cache_dir={cache}", "proof=true", *overrides)


def prove(config: RunConfig, wrong: float = 1.0) -> dict[str, Any]:
    """Proves a run on this rank, and returns what the main one has written. wrong: the factor of its denominators."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ranks, collate = Ranks(rank, world_size, rank, world_size), loader._collate

    def collate_wrong(*arguments: Any, denominators: list[float], **options: Any) -> Any:
        return collate(*arguments, denominators=[wrong * each for each in denominators], **options)

    run = check_run(config, ranks, ())
    with patch.object(loader, "_collate", collate_wrong):
        prove_small(run.config, describe_model(config).config, shrink_model(run), ranks)
    return json.loads((Path(config.output_dir) / FILE).read_text())


PP2, DP2 = ("num_stages=2",), ("num_stages=1",)
CASES = {  # ranks, keys
    "pp2": (2, PP2),
    "pp1": (1, ("num_stages=1",)),
    "pp2xdp2": (4, (*PP2, "activation_checkpoint_interval=1", "label_smoothing=0.1")),
    "interleaved": (2, (*PP2, "schedule=interleaved")),
    "zero-bubble": (2, (*PP2, "schedule=zero_bubble")),
    "packed": (2, (*PP2, "data.packing=true")),
    "pretrain": (2, (*PP2, "data=pretrain")),
    "tp2": (2, (*DP2, "tensor_parallel_size=2", "sequence_parallel=true")),
    "cp2": (2, (*DP2, "context_parallel_size=2")),
    "zero3": (2, (*DP2, "zero_stage=3")),
    "mixtral-ep2": (2, (*DP2, "model=mixtral_8x7b", "expert_parallel_size=2")),
    "qwen3": (2, (*PP2, "model=qwen3_30b_a3b")),
    "deepseek-v3": (2, (*PP2, "model=deepseek_v3")),
    "lora": (2, (*PP2, "adapter=lora")),
    "lora-on-experts": (2, (*PP2, "model=mixtral_8x7b", "adapter=lora")),
    "frozen": (2, (*PP2, "freeze=[embed_tokens]")),
    "dpo": (2, (*PP2, "data=preference")),
    "packed-dpo-lora": (2, (*PP2, "data=preference", "data.packing=true", "adapter=lora")),
    "65b": (2, (*PP2, "model=llama_65b")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "pp2" else pytest.mark.full) for name in CASES]
)
def test_a_layout_has_the_gradients_of_transformers(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, cache: Path, name: str
) -> None:
    num_ranks, keys = CASES[name]
    config = compose(tmp_path, cache, *keys)
    found, *_ = workers(num_ranks).run(prove, config)
    assert found["passed"] and found["worst_gradient_distance"] < 1e-5 and found["tensors"] > 20, found
    hosts = ["here"] * num_ranks
    assert collect_facts(config, hosts) == {"proof": found}
    others = (replace(config, zero_stage=2), replace(config, model=config.model | {"hidden_act": "gelu"}))
    assert [collect_facts(each, hosts) for each in others] == [{}, {}] and collect_facts(config, [*hosts, "b"]) == {}
    unproven = (
        {"neftune_noise_alpha": 5.0},
        {"loss": {"_target_": "mine.Loss"}},
        {"mtp": replace(config.mtp, loss_coef=0.1)},
    )
    assert [collect_facts(replace(config, **each), hosts) for each in unproven] == [{}, {}, {}]


def test_a_wrong_denominator_is_found(workers: Callable[[int], WorkerGroup], tmp_path: Path, cache: Path) -> None:
    config = compose(tmp_path, cache, "num_stages=1")
    with pytest.raises(WorkerError, match="the step is not that of transformers: the loss differs by 1.0e-03"):
        workers(1).run(prove, config, wrong=1 / 1.001)
    found = json.loads((tmp_path / "out" / FILE).read_text())
    assert not found["passed"] and found["worst_gradient_distance"] > 9e-4
    assert collect_facts(config, ["here"]) == {}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "evaluate_only=true eval_file=x",
            "proof=true does not go together with evaluate_only=true: it compares the gradients of ",
        ),
        (
            "moe.aux_loss_coef=0.1",
            "moe.aux_loss_coef > 0: transformers has another formula for it; give moe",
        ),
        ("mtp.loss_coef=0.1", "mtp.loss_coef=0.1: transformers has no loss of further tokens; give mtp.loss_coef=0"),
        ("neftune_noise_alpha=5", "neftune_noise_alpha=5.0: the noise is drawn in each pass; give"),
        ("adapter.load_in_4bit=true", "adapter.load_in_4bit=true: the plain model is in fp32; give"),
        ("adapter.lora_dropout=0.1", "adapter.lora_dropout=0.1: what is dropped is drawn in each pass; give"),
        ("adapter.name_or_path=mine", "adapter.name_or_path: its matrices are those of the large model; give"),
        ("adapter.init_lora_weights=pissa", "pissa: the signs of a decomposition are free; give"),
        (
            "data=unpaired_preference",
            "there is no plain loss of task=kto to compare with, only of sft, pretrain, dpo; ",
        ),
        (
            "distill.teacher=teacher",
            "there is no plain loss with distill.teacher=teacher to compare with; give distill.",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(key: str, message: str, tmp_path: Path) -> None:
    lora = ("adapter=lora",) if key.startswith("adapter.") else ()
    with pytest.raises(UserError, match=re.escape(message)):
        check_run(compose(tmp_path, tmp_path, *lora, *key.split()), Ranks(0, 1, 0, 1), ())


def test_no_secret_is_in_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["trainer_base_ds_mp.py", "+logger.trackers.mine={_target_: my.T, api_key: planted-key}"]
    monkeypatch.setattr(environment, "find_command", lambda: command)
    config = compose(tmp_path, tmp_path)
    found = dict.fromkeys(("loss_distance", "gradient_norm_distance", "worst_gradient_distance"), 0.0)
    file = save_certificate(config, LlamaConfig(), ["here"], {**found, "tensors": 1, "targets": 2}, "pp1")
    assert "planted" not in file.read_text() and "api_key" in file.read_text()


def test_a_proof_is_of_the_modules_that_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = recorded._hash_source()
    assert recorded._hash_source() == before
    monkeypatch.setattr(recorded, "PACKAGES", ("models", "data", "training"))
    assert recorded._hash_source() != before


def test_a_variant_of_dpo_is_refused(tmp_path: Path) -> None:
    config = compose(tmp_path, tmp_path, "data=preference", "dpo.loss_type=ipo", "dpo.beta=0.5")
    with pytest.raises(UserError, match="with dpo.loss_type=ipo to compare with; give dpo.loss_type=sigmoid to prove"):
        check_run(config, Ranks(0, 1, 0, 1), ())


def test_a_key_that_a_small_model_cannot_have_is_named_as_its_own(tmp_path: Path, cache: Path) -> None:
    config = compose(tmp_path, cache, "model=llama_7b", r"freeze=['layers[.]31[.]']")
    run, ranks = check_run(config, Ranks(0, 1, 0, 1), ()), Ranks(0, 1, 0, 1)
    small = shrink_model(run)
    write_material(folder := find_material(config, 1, small), config, 1, small)
    with pytest.raises(UserError, match=r"^proof=true, of its small model: freeze: 'layers\[.\]31\[.\]' matches no"):
        build_small_run(run.config, folder, ranks)


def test_a_small_model_has_what_many_ranks_divide() -> None:
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
    small = shrink(AutoConfig.for_model("llama", **sizes), SmallSizes(num_layers=32, width=4))
    assert (small.num_hidden_layers, small.hidden_size, small.head_dim) == (32, 256, 16)
    assert (small.num_attention_heads, small.num_key_value_heads) == (16, 8)
    mixture = AutoConfig.for_model("qwen3_moe", num_experts=128)
    assert [shrink(mixture, SmallSizes(num_experts=each)).num_experts for each in (8, 16)] == [8, 16]


# An extension that makes the gradients of each micro-batch wrong
WRONG = {
    "extension.py": """
from pathlib import Path
from extension import Extension
EXTENSION = Extension(folder=Path(__file__).parent, modifiers="wrong.denominators:MODIFIERS")
""",
    "denominators.py": """
from data.loading import loader
MODIFIERS, collate = (), loader._collate
def collate_wrong(*arguments, denominators, **options):
    return collate(*arguments, denominators=[2 * each for each in denominators], **options)
loader._collate = collate_wrong
""",
}


@pytest.mark.full
def test_a_command_proves_itself_and_its_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    records = save_records(tmp_path / "train.jsonl", 40)
    words = [
        "-cn", "llama_tiny_pp2", f"model_name_or_path={tmp_path}/model", f"train_file={records}", "eval_file=null",
        f"output_dir={tmp_path}/out", f"data.cache_dir={tmp_path}/cache", "max_steps=2", "schedule=zero_bubble",
    ]  # fmt: skip
    (tmp_path / "wrong").mkdir()
    for name, text in WRONG.items():
        (tmp_path / "wrong" / name).write_text(text)
    with monkeypatch.context() as patched:
        patched.setenv(OWN_FOLDERS, str(tmp_path / "wrong"))
        failed = run_deepspeed([*words, "proof=true"], tmp_path)
    (line,) = failed.errors()
    assert failed.code == 1 and "the loss differs by 5.0e-01" in line and "NOT equal" in failed.output, failed.output

    proven = run_deepspeed([*words, "proof=true"], tmp_path)
    assert (proven.code, proven.errors(), proven.left_alive) == (0, [], []), proven.output
    assert re.search("result: equal, by the bound 1e-05", proven.output) and not (tmp_path / "out/checkpoints").exists()
    trained = run_deepspeed(words, tmp_path)
    assert (trained.code, trained.errors()) == (0, []), trained.output
    recorded = json.loads((tmp_path / "out/run.json").read_text())["facts"]["proof"]
    assert recorded == json.loads((tmp_path / "out" / FILE).read_text())
    run = RunFolder(tmp_path / "out")
    card = render_card(run, run.export, read_history(run), "me/mine", None)
    assert f"| proof | {recorded['summary']} |" in card and "plain transformers within" in card, card
