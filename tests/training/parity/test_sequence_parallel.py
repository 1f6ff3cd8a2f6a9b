"""Parts of sequences between the blocks that tensor parallelism cuts, against the plain Hugging Face model: losses,
norms and weights of five SGD steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_oracle,
    worst_difference,
)
from support.families import FAMILIES, has_sharding_plan, save_family
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup

SPLIT = ("tensor_parallel_size=2", "sequence_parallel=true")
CUT = sorted(filter(has_sharding_plan, FAMILIES))
PACKED = ("data.packing=true", "micro_batch_size=1", "global_batch_size=4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sequence")
    save_records(root / "train.jsonl", 40)
    save_tokenizer(root / "tokenizer")
    return root


def build_case(
    root: Path, *overrides: str, family: str = "llama", world_size: int = 2, num_stages: int = 1, tied: bool = False
) -> Case:
    folder = root / f"{family}-{tied}"
    if not folder.exists():
        save_family(folder, family, tied=tied)
    given = (*SPLIT, f"tokenizer_name_or_path={root}/tokenizer", "learning_rate=0.5", CLIPPED, *overrides)
    return Case(folder, root / "train.jsonl", root, num_stages, world_size, overrides=given)


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND)
    assert result["norms"] == pytest.approx(oracle["norms"], rel=BOUND)


def test_five_sgd_steps_equal_hugging_face(workers: Callable[[int], WorkerGroup], root: Path) -> None:
    compare(workers, build_case(root, tied=True))


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("world_size", "num_stages", "overrides"),
    [
        pytest.param(2, 1, (), id="tp2"),
        pytest.param(4, 2, (), id="tp2-pp2"),
        pytest.param(4, 1, (), id="tp2-dp2"),
        pytest.param(4, 1, ("context_parallel_size=2",), id="tp2-cp2"),
        pytest.param(4, 1, ("context_parallel_size=2", "context_parallel_mode=ring"), id="tp2-ring2"),
        pytest.param(4, 2, ("schedule=interleaved",), id="tp2-pp2-interleaved"),
        pytest.param(4, 2, ("schedule=zero_bubble", "micro_batch_size=1", CHECKPOINTED), id="tp2-pp2-zero_bubble"),
        pytest.param(2, 1, (CHECKPOINTED,), id="tp2-grouped"),
        pytest.param(2, 1, SELECTIVE, id="tp2-selective"),
        pytest.param(2, 1, EVERY_SECOND, id="tp2-every"),
        pytest.param(2, 1, ("attn_implementation=eager",), id="tp2-eager"),
        pytest.param(2, 1, ("attn_implementation=varlen",), id="tp2-varlen"),
        pytest.param(2, 1, ("data.pad_to=max_seq_length",), id="tp2-padded"),
        pytest.param(4, 1, ("zero_stage=2",), id="tp2-dp2-stage2"),
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
    compare(workers, build_case(root, *overrides, world_size=world_size, num_stages=num_stages, tied=tied))


@pytest.mark.full
@pytest.mark.parametrize("family", CUT)
def test_every_family_equals_hugging_face(workers: Callable[[int], WorkerGroup], root: Path, family: str) -> None:
    compare(workers, build_case(root, CHECKPOINTED, "learning_rate=0.05", family=family))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_biases_after_a_sum_equal_hugging_face(
    workers: Callable[[int], WorkerGroup], root: Path, schedule: str
) -> None:
    keys = (f"schedule={schedule}", "micro_batch_size=1", "learning_rate=0.05")
    compare(workers, build_case(root, *keys, family="gpt2", world_size=4, num_stages=2))


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt2", "glm4_moe", "mixtral"])
def test_lora_equals_peft(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str) -> None:
    case = build_case(root, "adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", family=family)
    model = make_adapter(tmp_path / "adapter", case.model)
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case, model)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    assert result["norms"] == pytest.approx(oracle["norms"], rel=BOUND)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        PACKED,
        (*PACKED, "attn_implementation=varlen", CHECKPOINTED),
        ("label_smoothing=0.1",),
        ("freeze=[embed_tokens]",),
        ("neftune_noise_alpha=5",),
    ],
    ids=lambda keys: "-".join(keys),
)
def test_parts_give_what_whole_sequences_give(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """Other tests compare these with the oracle."""
    split = replace(build_case(root, *keys), workdir=tmp_path)
    alone = replace(split, world_size=1, overrides=split.overrides[2:])
    found, expected = (merge(workers(case.world_size).run(train_case, case)) for case in (split, alone))
    worst, name = worst_difference(found["weights"], expected["weights"])
    assert worst < BOUND, name
    assert found["losses"] == pytest.approx(expected["losses"], rel=BOUND)
    assert found["norms"] == pytest.approx(expected["norms"], rel=BOUND)
