"""A sequence over several ranks against the plain Hugging Face model: losses, norms and weights of five SGD steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    RING,
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
from support.runs import eval_dataset, read_metrics
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoConfig, AutoModelForCausalLM

from models.architecture.lookup import ARCHITECTURES, find_sequence_obstacle, has_ring_attention

CONFIGS = {name: AutoConfig.for_model(name) for name in ARCHITECTURES}
SHARED = "context_parallel_size=2"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("context")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_records(root / "train.jsonl", 40)
    save_tokenizer(root / "tokenizer")
    return root


def build_case(root: Path, *overrides: str, world_size: int = 2, num_stages: int = 1, tied: bool = False) -> Case:
    return Case(
        root / f"tied{tied}", root / "train.jsonl", root, num_stages, world_size, overrides=(SHARED, *overrides)
    )


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND)
    assert result["norms"] == pytest.approx(oracle["norms"], rel=BOUND)


def test_five_sgd_steps_equal_hugging_face(workers: Callable[[int], WorkerGroup], root: Path) -> None:
    compare(workers, build_case(root, CLIPPED))


def test_a_ring_where_heads_do_not_suffice(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> None:
    """As `auto` chooses it: two ranks could not exchange three heads."""
    save_llama(tmp_path / "model", num_attention_heads=3, num_key_value_heads=1)
    save_tokenizer(tmp_path / "model")
    compare(workers, Case(tmp_path / "model", root / "train.jsonl", tmp_path, 1, 2, overrides=(SHARED, CLIPPED)))


PACKED = ("data.packing=true", "micro_batch_size=1", "global_batch_size=4")


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("world_size", "num_stages", "overrides"),
    [
        pytest.param(4, 1, ("context_parallel_size=4",), id="cp4"),  # two heads of keys and values for four ranks
        pytest.param(4, 2, (), id="cp2-pp2"),
        pytest.param(4, 1, ("tensor_parallel_size=2",), id="cp2-tp2"),
        pytest.param(4, 1, (), id="cp2-dp2"),
        pytest.param(4, 2, ("schedule=interleaved",), id="cp2-pp2-interleaved"),
        pytest.param(4, 2, ("schedule=zero_bubble", CHECKPOINTED), id="cp2-pp2-zero_bubble"),
        pytest.param(2, 1, (CHECKPOINTED,), id="cp2-grouped"),
        pytest.param(2, 1, SELECTIVE, id="cp2-selective"),
        pytest.param(2, 1, EVERY_SECOND, id="cp2-every"),
        pytest.param(2, 1, ("attn_implementation=eager",), id="cp2-eager"),
        pytest.param(2, 1, ("attn_implementation=varlen",), id="cp2-varlen"),
        pytest.param(2, 1, ("data.pad_to=max_seq_length",), id="cp2-padded"),
        pytest.param(2, 1, ("offload_optimizer=cpu",), id="cp2-offloaded"),
        pytest.param(4, 1, ("zero_stage=2",), id="cp2-dp2-stage2"),
        pytest.param(4, 1, ("zero_stage=3", CHECKPOINTED), id="cp2-dp2-stage3"),
        pytest.param(2, 1, (RING,), id="ring-cp2"),
        pytest.param(4, 1, (RING, "context_parallel_size=4"), id="ring-cp4"),
        pytest.param(4, 2, (RING,), id="ring-cp2-pp2"),
        pytest.param(4, 1, (RING, "tensor_parallel_size=2"), id="ring-cp2-tp2"),
        pytest.param(4, 1, (RING,), id="ring-cp2-dp2"),
        pytest.param(4, 2, (RING, "schedule=interleaved", CHECKPOINTED), id="ring-cp2-pp2-interleaved"),
        pytest.param(4, 2, (RING, "schedule=zero_bubble", CHECKPOINTED), id="ring-cp2-pp2-zero_bubble"),
        pytest.param(2, 1, (RING, CHECKPOINTED), id="ring-cp2-grouped"),
        pytest.param(2, 1, (RING, *SELECTIVE), id="ring-cp2-selective"),
        pytest.param(2, 1, (RING, "data.pad_to=max_seq_length"), id="ring-cp2-padded"),
        pytest.param(4, 1, (RING, "zero_stage=3", CHECKPOINTED), id="ring-cp2-dp2-stage3"),
    ],
)
def test_every_layout_equals_hugging_face(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    world_size: int,
    num_stages: int,
    overrides: tuple[str, ...],
    tied: bool,
) -> None:
    keys = (*overrides, "micro_batch_size=1") if "zero_bubble" in str(overrides) else overrides
    compare(workers, build_case(root, CLIPPED, *keys, world_size=world_size, num_stages=num_stages, tied=tied))


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name, config in CONFIGS.items() if find_sequence_obstacle(config) is None])
def test_every_family_equals_hugging_face(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    compare(workers, build_family_case(root, tmp_path, family, "context_parallel_mode=ulysses"))


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name, config in CONFIGS.items() if has_ring_attention(config)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_family_of_a_ring_equals_hugging_face(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str, size: int
) -> None:
    compare(workers, build_family_case(root, tmp_path, family, RING, size=size))


def build_family_case(root: Path, folder: Path, family: str, mode: str, size: int = 2) -> Case:
    save_family(folder / "model", family, tied=False)
    tokenizer = f"tokenizer_name_or_path={root}/tokenizer"
    keys = (f"context_parallel_size={size}", mode, tokenizer, "learning_rate=0.05", CLIPPED)
    return Case(folder / "model", root / "train.jsonl", folder, 1, size, overrides=keys)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        PACKED,
        (*PACKED, "attn_implementation=varlen", CHECKPOINTED),
        (*PACKED, "attn_implementation=eager"),
        ("adapter=lora", CHECKPOINTED),
        ("label_smoothing=0.1",),
        ("freeze=[embed_tokens]",),
        (RING, *PACKED),
        (RING, *PACKED, "attn_implementation=eager"),
        (RING, *PACKED, "attn_implementation=varlen", CHECKPOINTED),
        (RING, "adapter=lora", CHECKPOINTED),
    ],
    ids=lambda keys: "-".join(keys),
)
def test_two_ranks_do_what_one_does(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """Other tests compare these with the oracle: documents of packed rows, peft's adapters."""
    shared = replace(build_case(root, CLIPPED, *keys), workdir=tmp_path)
    alone = replace(shared, world_size=1, overrides=tuple(k for k in shared.overrides if k not in (SHARED, RING)))
    found, expected = (merge(workers(case.world_size).run(train_case, case)) for case in (shared, alone))
    worst, name = worst_difference(found["weights"], expected["weights"])
    assert worst < BOUND, name
    assert found["losses"] == pytest.approx(expected["losses"], rel=BOUND)
    assert found["norms"] == pytest.approx(expected["norms"], rel=BOUND)


@pytest.mark.full
def test_a_run_in_a_ring_evaluates_what_it_exports_and_continues_by_heads(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    save_records(tmp_path / "eval.jsonl", 11, seed=1)
    keys = (*PACKED, f"eval_file={tmp_path}/eval.jsonl", "max_steps=4", "save_steps=2", "logging_steps=1")
    case = replace(build_case(root, *keys, RING), workdir=tmp_path)
    workers(2).run(train_run, replace(case, overrides=(*case.overrides, "stop_after_steps=2")))
    workers(2).run(train_run, replace(case, overrides=(SHARED, *keys, "resume=latest")))
    evaluation = (*case.overrides, "evaluate_only=true", "resume=latest")
    workers(2).run(train_run, replace(case, overrides=evaluation))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf", dtype=torch.float32)
    loss, num_targets = mean_loss(model, eval_dataset(tmp_path))
    evaluated = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert evaluated["eval_tokens"] == num_targets and evaluated["eval_loss"] == pytest.approx(loss, rel=BOUND)
    (by_heads,) = (line for line in read_metrics(tmp_path / "out") if line["step"] == 4 and "eval_loss" in line)
    assert by_heads["eval_loss"] == pytest.approx(loss, rel=BOUND)
