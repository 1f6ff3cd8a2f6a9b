"""Packed rows through real pipeline stages: the loss, gradient and weights of each document run alone.

A step takes the whole data set, so a packed run, one that is not, and the plain Hugging Face model (a row for each
document) train on the same samples in each step, whatever the order. SGD, as in `test_parity.py`.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import (
    CHECKPOINTED,
    SELECTIVE,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.packed_kernels import play_flash
from support.tiny import save_llama, save_records, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.order import GlobalOrder
from data.storage.rows import Rows
from data.storage.tokenized import TokenizedDataset
from training.inputs.datasets import build_row_plan, prepare_file

BOUND = 1e-5
NUM_SAMPLES = 22
STEPS = 3
LAYOUTS = {
    "pp1": (1, 1),
    "pp2": (2, 2),
    "pp3": (3, 3),
    "pp4": (4, 4),
    "pp1xdp2": (1, 2),
    "pp2xdp2": (2, 4),
}  # num_stages, world size
PACKED = "data.packing=true"
TOGETHER = ("micro_batch_size=2",)  # rows of a micro-batch


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
        ("pp2xdp2", ("activation_checkpoint_interval=1",)),
        *(pytest.param(layout, (), marks=pytest.mark.full) for layout in ("pp1", "pp2", "pp3", "pp4", "pp1xdp2")),
        pytest.param("pp2", ("attn_implementation=eager", "data.pad_to=max_seq_length"), marks=pytest.mark.full),
        *(
            pytest.param(layout, (*rows, "attn_implementation=varlen", CHECKPOINTED), marks=pytest.mark.full)
            for layout, rows in (("pp2", TOGETHER), ("pp2xdp2", ()))
        ),
        pytest.param("pp1", (*TOGETHER, "attn_implementation=varlen", *SELECTIVE), marks=pytest.mark.full),
        pytest.param("pp2", ("attn_implementation=varlen", "schedule=interleaved"), marks=pytest.mark.full),
        pytest.param("pp2", TOGETHER, marks=pytest.mark.full),
    ],
)
def test_packed_rows_train_as_each_document_alone(
    workers, root: Path, rows: Rows, layout: str, overrides: tuple[str, ...]
) -> None:
    packed = build_case(root, layout, PACKED, *overrides, rows=len(rows))
    result = merge(workers(packed.world_size).run(train_case, packed))
    expected = train_oracle(build_case(root, layout, *overrides))
    assert worst_difference(result["weights"], expected["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], expected["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], expected["norms"], rtol=BOUND, atol=0)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("pp2", ("activation_checkpoint_interval=1",)),
        pytest.param("pp1", ("activation_checkpoint_interval=2",), marks=pytest.mark.full),
    ],
)
def test_flash_attention_keeps_the_documents_of_several_rows_apart(
    workers, root: Path, rows: Rows, layout: str, overrides: tuple[str, ...]
) -> None:
    """transformers' own attention function around kernels that are played on the CPU."""
    packed = build_case(
        root, layout, PACKED, *TOGETHER, "attn_implementation=flash_attention_2", *overrides, rows=len(rows)
    )
    results = workers(packed.world_size).run(train_with_flash, packed)
    assert all(called == {"flash_attn_varlen_func"} for _, called in results)
    result = merge([trained for trained, _ in results])
    expected = train_oracle(build_case(root, layout))
    assert worst_difference(result["weights"], expected["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], expected["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], expected["norms"], rtol=BOUND, atol=0)


def train_with_flash(case: Case) -> tuple[dict[str, Any], set[str]]:
    """`train_case`, and which of flash-attention's functions were called. Nothing refuses the kernel for its machine or
    the precision."""
    from training.resolution import resolve

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(resolve, "check_together", lambda run: None)
        called = play_flash(monkeypatch)
        return train_case(case), set(called)


def test_packed_rows_are_evaluated_as_each_document_alone(workers, root: Path, rows: Rows) -> None:
    """The last micro-batch runs short: its rows of padding count as documents too."""
    assert len(rows) % 3
    case = build_case(
        root, "pp2", PACKED, "attn_implementation=varlen", "evaluate_only=true", f"eval_file={root}/train.jsonl",
        "micro_batch_size=3", rows=9,
    )  # fmt: skip
    workers(case.world_size).run(train_run, case)
    evaluated = json.loads((root / "out" / "evaluation.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    (folder,) = (path for path in (root / "cache").iterdir() if path.is_dir())
    loss, num_targets = mean_loss(model, TokenizedDataset(folder, True, True))
    assert evaluated["eval_tokens"] == num_targets and evaluated["eval_loss"] == pytest.approx(loss, rel=BOUND)


@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("pp1", "pp4", "pp2xdp2"))]
)
def test_documents_laid_end_to_end_train_as_each_piece_alone(workers, root: Path, layout: str) -> None:
    """Raw text, split where a row is full: each token but a document's first is a target once, and sees its own
    document's part in the row."""
    texts = inspect.getdoc(textwrap).split("\n\n") + [
        inspect.getdoc(f) for f in (textwrap.wrap, textwrap.dedent, textwrap.fill)
    ]
    file = root / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ("data=pretrain", f"train_file={file}", "max_seq_length=64", "activation_checkpoint_interval=1")
    config = build_case(root, "pp1", *given).config()
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rows = Rows(prepare_file(config, "train_file", tokenizer, print), build_row_plan(config, "train_file"), True, True)
    count = len(rows) - len(rows) % 2
    case = replace(build_case(root, layout, *given, rows=count), steps=1)
    result = merge(workers(case.world_size).run(train_case, case))

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    loss_sum, num_targets, num_cut = 0.0, 0, 0
    for row in GlobalOrder(len(rows), count, config.seed).sample_ids(0):
        tokens, ends = (
            torch.from_numpy(rows.input_ids(row).astype("int64")),
            [stop - start for _, start, stop in rows.pieces(row)],
        )
        for piece in tokens.split(ends):
            logits = model(piece[None]).logits[0, :-1]
            loss_sum += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum")
            num_targets += len(piece) - 1
        num_cut += sum(start > 0 for _, start, _ in rows.pieces(row))
    assert num_cut > 3 and any(len(rows.pieces(row)) > 1 for row in range(len(rows)))
    assert sum(rows.num_targets) == sum(
        len(tokenizer(text)["input_ids"]) for text in texts
    )  # the end token, less the first one
    (loss_sum / num_targets).backward()
    expected = {
        name: (parameter - config.learning_rate * parameter.grad).detach()
        for name, parameter in model.named_parameters()
    }
    torch.testing.assert_close(result["losses"], [(loss_sum / num_targets).item()], rtol=BOUND, atol=0)
    assert worst_difference(result["weights"], expected)[0] < BOUND
