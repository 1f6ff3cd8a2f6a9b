"""ZeRO-2 and ZeRO-3 on one stage: five steps of SGD against the plain Hugging Face model in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
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
from support.tiny import save_llama, save_records, save_tokenizer


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    root = tmp_path_factory.mktemp("zero")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    records = save_records(root / "train.jsonl", 40)

    def case(tied: bool, dp_size: int, *overrides: str) -> Case:
        # one micro-batch a step would sum nothing
        batch = ("micro_batch_size=1",) if dp_size == 4 else ()
        return Case(root / f"tied{tied}", records, root, 1, dp_size, overrides=(*batch, *overrides))

    return case


find_oracle = cache(train_oracle)
KINDS = {
    "plain": (),
    "clipped": (CLIPPED,),
    "recomputed-clipped": (CHECKPOINTED, CLIPPED),
    "selective": SELECTIVE,
    "every-second": EVERY_SECOND,
}
FAST = [(2, 2, True, "recomputed-clipped"), (3, 2, True, "recomputed-clipped")]
CASES = [
    pytest.param(
        stage, dp_size, tied, KINDS[kind], id=f"stage{stage}-dp{dp_size}-{'tied' if tied else 'untied'}-{kind}",
        marks=() if (stage, dp_size, tied, kind) in FAST else pytest.mark.full,
    )
    for stage in (2, 3) for dp_size in (2, 4) for tied in (False, True) for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(("stage", "dp_size", "tied", "overrides"), CASES)
def test_five_sgd_steps_equal_hugging_face(
    workers, material, stage: int, dp_size: int, tied: bool, overrides: tuple[str, ...]
) -> None:
    case = material(tied, dp_size, f"zero_stage={stage}", *overrides)
    result = merge(workers(dp_size).run(train_case, case))
    oracle = find_oracle(material(tied, 1, *({CLIPPED} & set(overrides))))
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
