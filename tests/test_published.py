"""The benchmark of published runs adds to a plan what each row declares: counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_parts.frameworks import LOGIT_BYTES, NORMS, adjust_costs, count_loss_bytes
from benchmarks.published_parts.rows import OUT_OF_MEMORY, RUNS, PublishedRun, find_obstacle, read_runs
from training.costs.cost import LayerCost

DECODER = LayerCost(
    name="decoder", num_parameters=1, num_trainable=1, num_active=1, largest_trainable=1, forward_flops=1.0,
    attention_width=1, saved_bytes=10**9, output_bytes=1,
)  # fmt: skip
HEAD = replace(DECODER, name="head", attention_width=0)


@pytest.fixture(scope="module")
def rows() -> list[PublishedRun]:
    return [*read_runs(RUNS), *read_runs(OUT_OF_MEMORY)]


def test_what_rows_declare_is_known(rows: list[PublishedRun]) -> None:
    assert {run.loss for run in rows} == {"", "gathered", "vocabulary_parallel"}
    assert {run.loss for run in rows} - {""} <= set(LOGIT_BYTES)
    assert all(run.kernels in {*NORMS, "compiled"} for run in rows if run.family == "llama")
    assert sum(find_obstacle(run) is None for run in rows) > 1200


def test_logits_are_whole_on_each_rank_or_shared(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], micro_batch=2, seq=100, cp=1, vocab=1000, tp=4)
    logits = 2 * 100 * 1000
    assert count_loss_bytes(replace(run, loss="vocabulary_parallel")) == 10 * logits / 4
    assert count_loss_bytes(replace(run, loss="gathered")) == (14 + 2 + 2 / 4) * logits
    assert count_loss_bytes(replace(run, loss="gathered", tp=1)) == 14 * logits


def test_layers_keep_what_their_kernels_keep(rows: list[PublishedRun]) -> None:
    run = replace(
        rows[0], family="llama", micro_batch=2, seq=100, cp=1, hidden=64, heads=8, tp=2, sequence_parallel=0,
        attention="flash", kernels="eager",
    )  # fmt: skip

    def saved(run: PublishedRun) -> int:
        decoder, head = adjust_costs(run, [DECODER, HEAD])
        assert head is HEAD
        return DECODER.saved_bytes - decoder.saved_bytes

    assert saved(run) == (16 - 12) * 64 * 200
    assert saved(replace(run, kernels="fused")) == (16 - 8) * 64 * 200
    assert saved(replace(run, kernels="fused", sequence_parallel=1)) == (16 - 8) * 64 * 200 / 2
    assert saved(replace(run, attention="fused_softmax")) == ((16 - 12) * 64 + (6 - 2) * 8 * 100 / 2) * 200
