"""Every family through real pipeline stages against the plain Hugging Face model: losses, norms and weights of five SGD steps.

What `make parity` prints as a table (docs/parity.md) is this, layout by layer and with gradients alone; `make test` runs a subset.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Case, merge, train_case, train_oracle, worst_difference
from distributed import WorkerGroup
from families import FAMILIES, save_family
from test_parity import BOUND, CHECKPOINTED, CLIPPED, LAYOUTS
from tiny import save_records, save_tokenizer

OVERRIDES = ("learning_rate=0.05", CHECKPOINTED, CLIPPED)
FAST = [(family, "pp2", index % 2 == 0) for index, family in enumerate(sorted(FAMILIES))]
REST = [
    (family, layout, tied)
    for family in sorted(FAMILIES)
    for layout in ("pp1", "pp2", "pp4")
    for tied in (False, True)
    if (family, layout, tied) not in FAST
]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, tied): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("families")
    records = save_records(root / "train.jsonl", 40)
    save_tokenizer(root / "tokenizer")  # not beside the models: transformers adds tokens of its own to a qwen2's

    def case(family: str, layout: str, tied: bool) -> Case:
        folder = root / f"{family}-{tied}"
        if not folder.exists():
            save_family(folder, family, tied=tied)
        num_stages, world_size = LAYOUTS[layout]
        return Case(folder, records, root, num_stages, world_size, overrides=(f"tokenizer_name_or_path={root}/tokenizer", *OVERRIDES))

    return case


@pytest.mark.parametrize(
    ("family", "layout", "tied"), [pytest.param(*case) for case in FAST] + [pytest.param(*case, marks=pytest.mark.full) for case in REST]
)
def test_five_sgd_steps_equal_hugging_face(workers: Callable[[int], WorkerGroup], material, family: str, layout: str, tied: bool) -> None:
    case = material(family, layout, tied)
    result = merge(workers(case.world_size).run(train_case, case))
    oracle = train_oracle(case)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
