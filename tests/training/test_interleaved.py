"""Interleaved 1F1B: no rank waits for ever, and the gradients are those of the plain Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import Case, merge, train_case, train_oracle, worst_difference
from distributed import WorkerGroup
from tiny import save_llama, save_records, save_tokenizer

BOUND = 1e-5
CLIPPED = "max_grad_norm=0.05"
CHECKPOINTED = "activation_checkpoint_interval=1"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(tied, stages, ranks, ...)"""
    root = tmp_path_factory.mktemp("interleaved")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    records = save_records(root / "train.jsonl", 40)

    def case(tied: bool, num_stages: int, world_size: int, *overrides: str) -> Case:
        return Case(root / f"tied{tied}", records, root, num_stages, world_size, overrides=("schedule=interleaved", *overrides))

    return case


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch_close(result["losses"], oracle["losses"])
    torch_close(result["norms"], oracle["norms"])


def torch_close(a: list[float], b: list[float]) -> None:
    assert a == pytest.approx(b, rel=BOUND)


def test_tied_clipped(workers, material) -> None:
    compare(workers, material(True, 2, 2, CLIPPED))
