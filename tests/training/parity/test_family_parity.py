"""Every family through real pipeline stages against the plain Hugging Face model: losses, norms and weights of five SGD
steps.

What `make parity` prints as a table (docs/parity.md) is this, layout by layer and with gradients alone; `make test`
runs a subset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    LAYOUTS,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import FAMILIES, save_family
from support.runs import eval_dataset, read_metrics
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

OVERRIDES = ("learning_rate=0.05", CHECKPOINTED, CLIPPED)
# llama: test_parity.py. What crosses between the stages of these is the same; their layers: tests/models/families
LIKE_LLAMA = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
FAST = [(family, "pp2", index % 2 == 0) for index, family in enumerate(sorted(FAMILIES)) if family not in LIKE_LLAMA]
REST = [
    (family, layout, tied)
    for family in sorted(FAMILIES)
    for layout in ("pp1", "pp2", "pp4")
    for tied in (False, True)
    if (family, layout, tied) not in FAST
] + [
    (family, "pp2xdp2", False) for family in ("deepseek_v32", "gemma2", "glm_moe_dsa")
]  # what sums over replicas knows no family: test_parity.py


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, tied): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("families")
    records = save_records(root / "train.jsonl", 40)
    save_records(root / "eval.jsonl", 11, seed=1)
    save_tokenizer(root / "tokenizer")  # not next to the models: transformers adds tokens of its own to a qwen2's

    def case(family: str, layout: str, tied: bool) -> Case:
        folder = root / f"{family}-{tied}"
        if not folder.exists():
            save_family(folder, family, tied=tied)
        num_stages, world_size = LAYOUTS[layout]
        return Case(
            folder,
            records,
            root,
            num_stages,
            world_size,
            overrides=(f"tokenizer_name_or_path={root}/tokenizer", *OVERRIDES),
        )

    return case


@pytest.mark.parametrize(
    ("family", "layout", "tied"),
    [pytest.param(*case) for case in FAST] + [pytest.param(*case, marks=pytest.mark.full) for case in REST],
)
def test_five_sgd_steps_equal_hugging_face(
    workers: Callable[[int], WorkerGroup], material, family: str, layout: str, tied: bool
) -> None:
    compare(workers, material(family, layout, tied))


@pytest.mark.full
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_a_bubble_too(workers: Callable[[int], WorkerGroup], material, family: str, recomputes: bool) -> None:
    case = material(family, "pp2", tied=recomputes)
    kept = tuple(key for key in case.overrides if recomputes or key != CHECKPOINTED)
    compare(workers, replace(case, overrides=(*kept, "schedule=zero_bubble")))


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = merge(workers(case.world_size).run(train_case, case))
    oracle = train_oracle(case)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family == "deepseek_v3" else pytest.mark.full) for family in sorted(FAMILIES)],
)
def test_a_trained_export_gives_the_trainers_loss(
    workers: Callable[[int], WorkerGroup], material, tmp_path: Path, family: str
) -> None:
    case = material(family, "pp2", False)
    # a cache of its own: `train_oracle` takes the one data set that it finds in the other
    own = (
        f"eval_file={case.workdir}/eval.jsonl",
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        "max_steps=2",
    )
    case = replace(case, overrides=(*case.overrides, *own))
    workers(2).run(train_run, case)
    reported = read_metrics(tmp_path / "out")[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    loss, num_targets = mean_loss(model, eval_dataset(tmp_path))
    assert reported["eval_tokens"] == num_targets and abs(loss - reported["eval_loss"]) < 1e-4
