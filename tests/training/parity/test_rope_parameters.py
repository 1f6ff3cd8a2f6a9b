"""A model that is stretched by `rope_parameters` against the plain Hugging Face model with that config: five SGD steps,
an evaluation, an export, a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import (
    BOUND,
    CLIPPED,
    RING,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import save_family
from support.runs import list_tokenized, read_metrics
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.weights.sources import open_weights

PRETRAINED = 64
TYPES: dict[str, dict[str, float]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
full = pytest.mark.full


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rope")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    save_llama(root / "llama", max_position_embeddings=PRETRAINED, rope_parameters=rope)
    save_tokenizer(root / "llama")
    save_tokenizer(root / "tokenizer")
    save_records(root / "train.jsonl", 40)
    return root


def give(rope_type: str) -> str:
    fields = ", ".join(f"{key}: {value}" for key, value in TYPES[rope_type].items())
    return f"rope_parameters={{rope_type: {rope_type}, {fields}}}"


def load_stretched(folder: Path, rope_type: str, pretrained: int = PRETRAINED) -> PreTrainedModel:
    """As `transformers` loads the weights with that config.json."""
    config = AutoModelForCausalLM.from_pretrained(folder).config
    own = {k: v for k, v in config.rope_parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
    if rope_type in ("yarn", "llama3"):
        own["original_max_position_embeddings"] = pretrained
    config.rope_parameters = {"rope_type": rope_type, **own, **TYPES[rope_type]}
    if rope_type != "dynamic":
        config.max_position_embeddings = 4 * pretrained
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def run_each_alone(model: Any) -> None:
    """Make the model's loss that of samples which `transformers` runs one by one, each without padding and with nothing
    kept of the one before: the frequencies of "dynamic" depend on a sample's length."""
    whole, rotary = model.forward, model.model.rotary_emb

    def run(input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        total = torch.zeros(())
        for row, length in enumerate(attention_mask.sum(dim=1).tolist()):
            rotary.max_seq_len_cached, rotary.inv_freq = rotary.original_max_seq_len, rotary.original_inv_freq
            logits = whole(input_ids=input_ids[row : row + 1, :length]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels[row, 1:length], reduction="sum")
        return SimpleNamespace(loss=total / (labels[:, 1:] != -100).sum())

    model.forward = run


def compare(workers: Callable[[int], WorkerGroup], case: Case, model: PreTrainedModel) -> None:
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case, model)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND)
    assert result["norms"] == pytest.approx(oracle["norms"], rel=BOUND)
    plain = train_oracle(case, AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32))
    assert worst_difference(plain["weights"], oracle["weights"])[0] > 10 * BOUND


@pytest.mark.parametrize(
    ("rope_type", "layout"),
    [
        ("yarn", "pp2"),
        *(pytest.param(rope_type, layout, marks=full) for rope_type in TYPES for layout in ("pp2", "cp2", "ring")),
    ],
)
def test_five_sgd_steps(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, rope_type: str, layout: str
) -> None:
    keys = {"pp2": (), "cp2": ("context_parallel_size=2",), "ring": ("context_parallel_size=2", RING)}[layout]
    keys += (give(rope_type), CLIPPED, "data.pad_to=max_seq_length")
    model = load_stretched(root / "llama", rope_type)
    if rope_type == "dynamic":
        run_each_alone(model)
    num_stages = 2 if layout == "pp2" else 1
    compare(workers, Case(root / "llama", root / "train.jsonl", tmp_path, num_stages, 2, overrides=keys), model)


@full
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "granite", "mistral", "phi3", "qwen3"])
def test_families(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str) -> None:
    save_family(tmp_path / "model", family, tied=False)
    config = open_weights(str(tmp_path / "model")).config
    pretrained = config.rope_parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    keys = (give("yarn"), f"tokenizer_name_or_path={root}/tokenizer", "learning_rate=0.05", CLIPPED)
    case = Case(tmp_path / "model", root / "train.jsonl", tmp_path, 2, 2, overrides=keys)
    compare(workers, case, load_stretched(tmp_path / "model", "yarn", pretrained))


@full
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_is_evaluated_exported_and_resumed(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, adapter: str
) -> None:
    file, out = root / "train.jsonl", tmp_path / "out"
    rest = ("optimizer=adamw", "learning_rate=1e-3", f"eval_file={file}", f"adapter={adapter}", "max_steps=4")

    def run(*keys: str, stages: int = 2) -> None:
        workers(stages).run(train_run, Case(root / "llama", file, tmp_path, stages, stages, overrides=(*rest, *keys)))

    run(give("yarn"), "stop_after_steps=2")
    with pytest.raises(WorkerError) as error:
        run("resume=latest", stages=1)
    assert "rope_parameters was factor=4.0, rope_type=yarn, is none" in str(error.value)
    run(give("yarn"), "resume=latest", stages=1)
    source = open_weights(str(out / "checkpoints"))
    assert source.config.max_position_embeddings == 4 * PRETRAINED
    assert source.config.rope_parameters["rope_type"] == "yarn"
    if adapter == "none":
        model: Any = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
        assert model.config.rope_parameters == source.config.rope_parameters
        loss, _ = mean_loss(model, list_tokenized(tmp_path)[0])
        assert read_metrics(out)[-1]["eval_loss"] == pytest.approx(loss, rel=BOUND)
