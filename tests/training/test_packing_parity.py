"""Packed rows through real pipeline stages: the loss, gradient and weights of each document run alone.

A step takes the whole data set, so a packed run, one that is not, and the plain Hugging Face model (a row for each document) train on
the same samples in each step, whatever the order. SGD, as in `test_parity.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import Case, merge, train_case, train_oracle, worst_difference
from tiny import save_llama, save_records, save_tokenizer
from transformers import AutoTokenizer

from data.rows import Rows
from training.preparation import build_row_plan, prepare_file

BOUND = 1e-5
NUM_SAMPLES = 22
STEPS = 3
LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "pp4": (4, 4), "pp1xdp2": (1, 2), "pp2xdp2": (2, 4)}  # num_stages, world size
PACKED = "data.packing=true"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packing")
    save_llama(root / "model")
    save_tokenizer(root / "model")
    save_records(root / "train.jsonl", NUM_SAMPLES)
    return root


def build_case(root: Path, layout: str, *overrides: str, rows: int = NUM_SAMPLES) -> Case:
    num_stages, world_size = LAYOUTS[layout]
    given = (f"global_batch_size={rows}", "micro_batch_size=1", *overrides)
    return Case(root / "model", root / "train.jsonl", root, num_stages, world_size, STEPS, given)


def pack(root: Path) -> Rows:
    config = build_case(root, "pp1", PACKED).config()
    path = prepare_file(config, "train_file", AutoTokenizer.from_pretrained(root / "model"), print)
    return Rows(path, build_row_plan(config, "train_file"), True, True)


@pytest.fixture(scope="module")
def rows(root: Path) -> Rows:
    """The packed rows: several documents in most of them, and as many rows as two replicas can share."""
    rows = pack(root)
    assert len(rows) % 2 == 0 and len(rows) < NUM_SAMPLES / 2, len(rows)
    return rows


@pytest.mark.parametrize(
    "layout, overrides",
    [
        ("pp1", ()),
        ("pp2xdp2", ("activation_checkpoint_interval=1",)),
        *(pytest.param(layout, (), marks=pytest.mark.full) for layout in ("pp2", "pp4", "pp1xdp2")),
        pytest.param("pp2", ("attn_implementation=eager", "data.pad_to=max_seq_length"), marks=pytest.mark.full),
    ],
)
def test_packed_rows_train_as_each_document_alone(workers, root: Path, rows: Rows, layout: str, overrides: tuple[str, ...]) -> None:
    packed = build_case(root, layout, PACKED, *overrides, rows=len(rows))
    result = merge(workers(packed.world_size).run(train_case, packed))
    unpacked = build_case(root, layout, *overrides)
    expected = merge(workers(unpacked.world_size).run(train_case, unpacked))
    for other in (expected, train_oracle(unpacked)):
        assert worst_difference(result["weights"], other["weights"])[0] < BOUND
        torch.testing.assert_close(result["losses"], other["losses"], rtol=BOUND, atol=0)
        torch.testing.assert_close(result["norms"], other["norms"], rtol=BOUND, atol=0)
