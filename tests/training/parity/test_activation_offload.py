"""Activation offload changes no gradient, under any schedule: the plain Hugging Face model in one process, five SGD
steps with clipping that bites."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    LAYOUTS,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_oracle,
    worst_difference,
)  # fmt: skip
from support.tiny import save_llama, save_records, save_tokenizer

OFFLOAD = "activation_offload=true"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offload")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_records(root / "train.jsonl", 40)
    return root


def train_counting(case: Case) -> tuple[dict[str, Any], int]:
    """The result of `train_case`, and the number of tensors that went to the host."""
    from training.pipeline import activation_offload

    copies: list[object] = []
    made = activation_offload.HostCopy.__init__

    def make(copy: Any, *arguments: Any) -> None:
        copies.append(None)
        made(copy, *arguments)

    with patch.object(activation_offload.HostCopy, "__init__", make):
        return train_case(case), len(copies)


@pytest.mark.parametrize(
    ("tied", "layout", "overrides"),
    [
        pytest.param(True, "pp2", (CHECKPOINTED,), id="1f1b"),
        *(
            pytest.param(tied, layout, overrides, id=name, marks=pytest.mark.full)
            for tied, layout, overrides, name in (
                (False, "pp2xdp2", (CHECKPOINTED,), "dp2"),
                (True, "pp2", SELECTIVE, "selective"),
                (True, "pp2", EVERY_SECOND, "every-second"),
                (True, "pp2", (CHECKPOINTED, "schedule=interleaved"), "interleaved"),
                (True, "pp2", (CHECKPOINTED, "schedule=zero_bubble"), "zero_bubble"),
                (True, "dp2", (CHECKPOINTED, "zero_stage=2"), "zero_stage=2"),
                (True, "dp2", (CHECKPOINTED, "zero_stage=3"), "zero_stage=3"),
            )
        ),
    ],
)
def test_five_sgd_steps_equal_hugging_face(
    workers, root: Path, tied: bool, layout: str, overrides: tuple[str, ...]
) -> None:
    num_stages, world_size = LAYOUTS.get(layout, (1, 2))
    keys = (*overrides, CLIPPED, OFFLOAD)
    case = Case(root / f"tied{tied}", root / "train.jsonl", root, num_stages, world_size, overrides=keys)
    results = workers(world_size).run(train_counting, case)
    assert all(count for _, count in results)
    result, oracle = merge([each for each, _ in results]), train_oracle(case)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND)
    assert result["norms"] == pytest.approx(oracle["norms"], rel=BOUND)


@pytest.mark.full
def test_packed_rows_are_the_same_to_the_bit(workers, root: Path) -> None:
    keys = (CHECKPOINTED, CLIPPED, "data.packing=true")
    moved, kept = (
        workers(2).run(train_counting, Case(root / "tiedTrue", root / "train.jsonl", root, 2, 2, overrides=each))
        for each in ((*keys, OFFLOAD), keys)
    )
    assert all(count for _, count in moved) and not any(count for _, count in kept)
    results = [merge([each for each, _ in run])["weights"] for run in (moved, kept)]
    assert all(torch.equal(results[0][name], weight) for name, weight in results[1].items())


@pytest.mark.full
def test_lora_equals_peft(workers, root: Path, tmp_path: Path) -> None:
    model = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    adapter = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", f"data.cache_dir={tmp_path}/cache")
    keys = (*adapter, CHECKPOINTED, CLIPPED, OFFLOAD)
    case = Case(root / "tiedFalse", root / "train.jsonl", tmp_path, 2, 2, overrides=keys)
    results = workers(2).run(train_counting, case)
    assert all(count for _, count in results)
    oracle = train_oracle(case, model)
    assert worst_difference(*to_peft_weights(merge([each for each, _ in results]), oracle, model.config))[0] < BOUND
