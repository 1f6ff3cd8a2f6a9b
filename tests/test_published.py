"""The benchmark of published runs adds to a plan what each row declares: counted by hand, or on the layers that a plan
counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.published_parts.frameworks import (
    EAGER_MOVED,
    FUSED_MOVED,
    LOGIT_BYTES,
    LOGIT_MOVED,
    NORMS,
    adjust_costs,
    adjust_reduction,
    count_limit,
    count_loss_bytes,
    shard_weights,
)
from benchmarks.published_parts.planned import plan_run
from benchmarks.published_parts.rows import OUT_OF_MEMORY, RUNS, PublishedRun, find_obstacle, read_runs
from models.architecture.lookup import build_layers
from training.config.schema import Device
from training.cost_terms.loss import LOGIT_BYTES as LOGIT_MOVED_HERE
from training.costs.cost import LayerCost, count_layers
from training.costs.hardware import GB, Machine
from training.costs.kernels import STREAM_RATE
from training.costs.memory import Memory
from training.costs.micro_batch import MicroBatchShape
from training.costs.traffic import Traffic

DECODER = LayerCost(
    name="decoder", num_parameters=1, num_trainable=1, num_active=1, largest_trainable=1, forward_flops=1.0,
    attention_width=1, saved_bytes=10**9, output_bytes=1,
)  # fmt: skip
HEAD = replace(DECODER, name="head", attention_width=0)
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=80, usable_memory=1, peak_flops={"bf16": 1e12},
    efficiency=1, memory_bandwidth=1000, intra_node_bandwidth=100, inter_node_bandwidth=10, host_memory=1,
    host_memory_bandwidth=1, host_link_bandwidth=1, device_name="round",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[PublishedRun]:
    return [*read_runs(RUNS), *read_runs(OUT_OF_MEMORY)]


def test_what_rows_declare_is_known(rows: list[PublishedRun]) -> None:
    assert {run.loss for run in rows} == {"", "gathered", "vocabulary_parallel"}
    assert {run.loss for run in rows} - {""} <= set(LOGIT_BYTES) & set(LOGIT_MOVED)
    assert {run.reduction for run in rows} == {"", "all_reduce"}
    assert {run.qkv for run in rows} == {"", "one_result"}
    assert {run.sharding for run in rows} == {"", "fsdp"} and all(run.zero == 3 for run in rows if run.sharding)
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
        attention="flash", kernels="eager", qkv="",
    )  # fmt: skip

    def saved(run: PublishedRun) -> int:
        decoder, head = adjust_costs(replace(run, loss=""), [DECODER, HEAD], GPU)
        assert head is HEAD
        return DECODER.saved_bytes - decoder.saved_bytes

    assert saved(run) == (16 - 12) * 64 * 200
    assert saved(replace(run, kernels="fused")) == (16 - 8) * 64 * 200
    assert saved(replace(run, kernels="fused", sequence_parallel=1)) == (16 - 8) * 64 * 200 / 2
    assert saved(replace(run, attention="fused_softmax")) == ((16 - 12) * 64 + (6 - 2) * 8 * 100 / 2) * 200
    one = replace(run, qkv="one_result")
    assert saved(one) == ((16 - 12) - (4 + 2) / 2) * 64 * 200
    assert saved(replace(one, micro_batch=1)) == ((16 - 12) - 4 / 2) * 64 * 100
    assert saved(replace(one, attention="fused_softmax")) == saved(replace(run, attention="fused_softmax"))


def test_what_a_system_has_room_for() -> None:
    run = next(run for run in read_runs(RUNS) if run.gpu == "a100_80g")
    alone = count_limit(replace(run, tp=1, pp=1, cp=1, dp=1), replace(GPU, memory=80))
    assert alone == (80 - 0.5) / 1.08
    assert count_limit(replace(run, tp=2, pp=1, cp=1, dp=4), replace(GPU, memory=80)) == alone - 2 * 0.5 / 1.08


def test_fsdp_has_whole_weights_of_few_layers(rows: list[PublishedRun]) -> None:
    run = replace(next(run for run in rows if run.sharding == "fsdp"), recompute="none")
    layers = [replace(HEAD, num_parameters=4), *[replace(DECODER, num_parameters=10)] * 3]
    memory = Memory(weights=5, gradients=6, optimizer=7, activations=8, buffers=2 * 34 + 100, step=9)
    found = shard_weights(run, memory, layers)
    assert found == replace(memory, weights=0, step=0, buffers=100 + 2 * (4 + 2 * 10) + 2 * 10)


def _adjust_layer(run: PublishedRun, layer: LayerCost) -> LayerCost:
    return adjust_costs(run, [layer, HEAD], GPU)[0]


@pytest.mark.parametrize(
    ("loss", "tp", "moved"),
    [
        ("", 4, LOGIT_MOVED_HERE / 4),  # the plan's own
        ("vocabulary_parallel", 4, 52 / 4),
        ("gathered", 1, 52),
        ("gathered", 4, 52 + 8 + 4 / 4 + 2 * 3 / 4 * 1000 * STREAM_RATE / 100),  # other ranks' logits, over NVLink
    ],
)
def test_the_loss_moves_what_its_row_declares(rows: list[PublishedRun], loss: str, tp: int, moved: float) -> None:
    run = replace(rows[0], micro_batch=2, seq=100, cp=1, vocab=1000, tp=tp, loss=loss)
    decoder, head = adjust_costs(run, [DECODER, HEAD], GPU)
    assert decoder.forward_traffic == DECODER.forward_traffic
    assert head.forward_traffic.moved - HEAD.forward_traffic.moved == round((moved - LOGIT_MOVED_HERE / tp) * 200_000)


def test_sums_that_all_ranks_get_are_sent_again(rows: list[PublishedRun]) -> None:
    run = next(run for run in rows if run.reduction == "all_reduce" and run.pp == 1 and run.dp == 16 and run.tp == 4)
    plan = plan_run(replace(run, reduction="")).plan
    again = adjust_reduction(run, plan, GPU).reduce_seconds - plan.reduce_seconds
    nbytes = 4 * plan.stages[0].num_parameters * 15 / 16
    assert again == pytest.approx(nbytes / (2 * 10 * GB))  # two ranks of a group on each node
    assert adjust_reduction(replace(run, reduction=""), plan, GPU) is plan
    assert plan_run(run).plan.step_seconds > plan.step_seconds


def test_attention_takes_the_time_of_its_kernels(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], family="gpt", micro_batch=2, seq=100, cp=1, heads=8, tp=2, kernels="eager")
    moves = Traffic(10**9, 5)
    layer = replace(DECODER, forward_flops=9.0, attention_flops=2.0, forward_traffic=moves, backward_traffic=moves)
    flash1 = _adjust_layer(replace(run, attention="flash1"), layer)
    assert flash1.attention_flops == 4 and flash1.forward_flops - flash1.attention_flops == 9 - 2
    assert flash1.backward_flops - 2 * flash1.attention_flops == layer.backward_flops - 2 * layer.attention_flops
    scores = 2 * 8 * 100 * 100 // 2
    softmax = _adjust_layer(replace(run, attention="fused_softmax"), layer)
    assert moves.moved - softmax.forward_traffic.moved == (EAGER_MOVED[0] - FUSED_MOVED[0]) * scores
    assert moves.moved - softmax.backward_traffic.moved == (EAGER_MOVED[1] - FUSED_MOVED[1]) * scores
    for declared in ({"attention": "flash"}, {"attention": "fused_softmax", "kernels": "fused"}):
        assert _adjust_layer(replace(run, **declared), layer) == layer


def test_what_eager_scores_move_is_what_the_plan_counts() -> None:
    """The part that grows with the square of the sequence, of a score; without products and the mask of all heads."""
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    config._attn_implementation = "eager"

    def count(length: int) -> tuple[int, int]:
        layer = count_layers(build_layers(config), config, MicroBatchShape(1, length, torch.bfloat16))[1]
        return layer.forward_traffic.moved, layer.backward_traffic.moved

    short, middle, long = count(64), count(128), count(256)
    square = [((c - b) / 128 - (b - a) / 64) / 192 / 4 for a, b, c in zip(short, middle, long, strict=True)]
    mask, products = 2 / 4, (2 + 2, 4 * 2)
    assert square == [EAGER_MOVED[0] + products[0] + mask, EAGER_MOVED[1] + products[1]]
