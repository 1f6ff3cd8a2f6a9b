"""Indexed attention on stages: packed rows, whose queries select within their document, recomputed in each way.

A row for each document, of the plain Hugging Face model, is what packed rows are compared with, as in
test_packing_parity.py. Stages alone, divided experts and LoRA: test_family_parity.py, test_expert_parallel.py,
test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    EVERY_SECOND,
    LAYOUTS,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_oracle,
    worst_difference,
)
from support.families import save_family
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.storage.rows import Rows
from training.inputs.datasets import build_row_plan, prepare_file

NUM_SAMPLES = 22
PACKED = "data.packing=true"
Build = Callable[..., Case]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """build(family, layout, *overrides, rows=...): a case whose steps take all samples, in so many rows."""
    root = tmp_path_factory.mktemp("indexed")
    records = save_records(root / "train.jsonl", NUM_SAMPLES)
    save_tokenizer(root / "tokenizer")

    def build(family: str, layout: str, *overrides: str, rows: int = NUM_SAMPLES) -> Case:
        if not (root / family).exists():
            save_family(root / family, family)
        given = (f"global_batch_size={rows}", "micro_batch_size=1", "learning_rate=0.05")
        given += (f"tokenizer_name_or_path={root}/tokenizer", *overrides)
        return Case(root / family, records, root, *LAYOUTS[layout], steps=3, overrides=given)

    return build


def count_packed(build: Build) -> int:
    config = build("deepseek_v32", "pp1", PACKED).config()
    path = prepare_file(config, "train_file", AutoTokenizer.from_pretrained(config.tokenizer_name_or_path), print)
    return len(Rows(path, build_row_plan(config, "train_file"), True, True))


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize(
    "recomputation", [(CHECKPOINTED,), SELECTIVE, EVERY_SECOND], ids=["grouped", "selective", "every"]
)
def test_recomputed_in_each_way(
    workers: Callable[[int], WorkerGroup], build: Build, family: str, recomputation: tuple[str, ...]
) -> None:
    compare(workers, build(family, "pp2", *recomputation), build(family, "pp1"))


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_weight_decay_does_not_touch_an_indexer(
    workers: Callable[[int], WorkerGroup], build: Build, family: str
) -> None:
    """All else is trained by AdamW with a large decay."""
    case = build(family, "pp2", "optimizer=adamw", "weight_decay=0.5", "learning_rate=1e-3")
    weights = merge(workers(case.world_size).run(train_case, case))["weights"]
    source = AutoModelForCausalLM.from_pretrained(case.model).state_dict()
    indexers = [name for name in weights if ".indexer." in name]
    assert indexers and all(torch.equal(weights[name], source[name]) for name in indexers)
    assert not torch.equal(weights[(name := "model.layers.0.self_attn.o_proj.weight")], source[name])


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("glm_moe_dsa", "pp2", (CHECKPOINTED,)),
        *(
            pytest.param(family, layout, overrides, marks=pytest.mark.full)
            for family in ("deepseek_v32", "glm_moe_dsa")
            for layout, overrides in (
                ("pp1", ()),
                ("pp2", ()),
                ("pp2", SELECTIVE),
                ("pp2", EVERY_SECOND),
                ("pp2", ("activation_checkpoint_interval=2", "attn_implementation=eager")),
                ("pp2", ("schedule=interleaved",)),
                ("pp2", ("schedule=zero_bubble", "attn_implementation=varlen")),
                ("pp2xdp2", (CHECKPOINTED,)),
            )
        ),
    ],
)
def test_packed_rows_train_as_each_document_alone(
    workers: Callable[[int], WorkerGroup], build: Build, family: str, layout: str, overrides: tuple[str, ...]
) -> None:
    rows = count_packed(build)
    assert rows % 2 == 0 and rows < NUM_SAMPLES / 2
    packed = build(family, layout, PACKED, *overrides, rows=rows)
    compare(workers, packed, build(family, layout))


def compare(workers: Callable[[int], WorkerGroup], case: Case, plain: Case) -> None:
    """plain: the same steps, as the plain model of Hugging Face takes them."""
    result = merge(workers(case.world_size).run(train_case, case))
    expected = train_oracle(plain)
    worst, name = worst_difference(result["weights"], expected["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], expected["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], expected["norms"], rtol=BOUND, atol=0)
