"""The zero-bubble schedule: no rank waits forever, the gradients are those of the plain Hugging Face model, and a run
continues under another schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import BOUND, CHECKPOINTED, CLIPPED, LAYOUTS, Case, merge, train_case, train_oracle, worst_difference
from support.instructions import play
from support.tiny import save_llama, save_records, save_tokenizer

from training.pipeline.zero_bubble import ZeroBubble

SCHEDULE = "schedule=zero_bubble"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zero_bubble")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_records(root / "train.jsonl", 40)
    return root


def build_case(root: Path, tied: bool, layout: str, *overrides: str) -> Case:
    num_stages, world_size = LAYOUTS[layout]
    return Case(
        root / f"tied{tied}", root / "train.jsonl", root, num_stages, world_size, overrides=(SCHEDULE, *overrides)
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_no_rank_waits_forever(num_stages: int) -> None:
    for micro_batches in (num_stages, num_stages + 1, 2 * num_stages, 3 * num_stages + 1):
        for limit in (1, 2, None):
            assert play(ZeroBubble(num_stages, micro_batches, memory_limit=limit)) == [0] * num_stages
    for micro_batches in range(1, 2 * num_stages + 2):
        assert play(ZeroBubble(num_stages, micro_batches), forward_only=True) == [0] * num_stages


@pytest.mark.parametrize(
    "tied, layout, overrides",
    [
        pytest.param(True, "pp2", (CLIPPED,), id="pp2-tied-clipped"),
        pytest.param(False, "pp2", (CHECKPOINTED, CLIPPED), id="pp2-checkpointed"),
    ],
)
def test_five_sgd_steps_equal_hugging_face(
    workers, root: Path, tied: bool, layout: str, overrides: tuple[str, ...]
) -> None:
    case = build_case(root, tied, layout, *overrides)
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND) and result["norms"] == pytest.approx(
        oracle["norms"], rel=BOUND
    )
