"""Conversations about images through real pipeline stages: losses, gradients and weights are those of the plain model
of `transformers` in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import BOUND, LAYOUTS, Case, merge, train_case, worst_difference
from support.images import FAMILIES, load_plain, save_image_records, save_model, train_plain
from support.workers import WorkerGroup


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_image_records(root, 24)
    for model_type in FAMILIES:
        save_model(root / model_type, model_type)
    return root


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = merge(workers(case.world_size).run(train_case, case))
    oracle = train_plain(case, load_plain(case.model))
    assert result["weights"].keys() < oracle["weights"].keys()
    worst, name = worst_difference(result["weights"], {name: oracle["weights"][name] for name in result["weights"]})
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    assert max(result["losses"]) > 1.001 * min(result["losses"])  # it has moved


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_equal_the_plain_model(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, model_type: str, layout: str
) -> None:
    num_stages, world_size = LAYOUTS[layout]
    overrides = ("data=image_chat", "learning_rate=0.05", "global_batch_size=8")
    compare(workers, Case(root / model_type, root / "train.jsonl", tmp_path, num_stages, world_size, 5, overrides))
