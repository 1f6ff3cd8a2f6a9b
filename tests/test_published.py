"""The benchmark of published runs adds to a plan what each row declares: counted by hand, or on the layers that a plan
counts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from benchmarks.published_parts.frameworks import (
    EAGER_MOVED,
    FUSED_MOVED,
    FUSED_SCORES_PASSING,
    GRADIENT_BYTES,
    LOGIT_BYTES,
    LOGIT_MOVED,
    NORMS,
    ONE_RESULT,
    REORDERED,
    SCORES_PASSING_HERE,
    adjust_costs,
    adjust_reduction,
    adjust_states,
    count_gradients_in_pass,
    count_limit,
    count_loss_bytes,
    count_measured,
    count_memory,
    shard_weights,
)
from benchmarks.published_parts.planned import _split, plan_run
from benchmarks.published_parts.rows import OUT_OF_MEMORY, RUNS, PublishedRun, find_obstacle, read_runs
from models.architecture.lookup import build_layers
from training.config.schema import Device
from training.cost_terms.cost_term import Memory
from training.cost_terms.loss import LOGIT_BYTES as LOGIT_MOVED_HERE
from training.costs.cost import Bytes, LayerCost, MicroBatchShape, Parameters, Work, count_layers
from training.costs.hardware import GB, GIB, STREAM_RATE, Machine
from training.costs.traffic import Traffic
from training.planner.plan import StagePlan

DECODER = LayerCost(
    name="decoder",
    parameters=Parameters(held=1, trained=1, active=1, largest_trained=1, largest_made=1),
    work=Work(forward_flops=1.0, attention_width=1),
    bytes=Bytes(saved=10**9, output=1),
)
HEAD = replace(DECODER, name="head", work=replace(DECODER.work, attention_width=0))
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=80, usable_memory=1, peak_flops={"bf16": 1e12},
    efficiency=1, memory_bandwidth=1000, intra_node_bandwidth=100, inter_node_bandwidth=10, host_memory=1,
    host_memory_bandwidth=1, host_link_bandwidth=1, device_name="round",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[PublishedRun]:
    return [*read_runs(RUNS), *read_runs(OUT_OF_MEMORY)]


def test_what_rows_declare_is_known(rows: list[PublishedRun]) -> None:
    assert {run.loss for run in rows} == {"", *LOGIT_BYTES} and {run.states for run in rows} == {"", "16"}
    assert {run.loss for run in rows} - {""} <= set(LOGIT_BYTES) & set(LOGIT_MOVED)
    assert {run.reduction for run in rows} == {"", "all_reduce"}
    kept = {"projection", "gathered", "positions", "embedding", "copied"}
    assert {word for run in rows for word in run.keeps.split()} == kept
    assert {run.gradients for run in rows} == set(GRADIENT_BYTES)
    assert {run.sharding for run in rows} == {"", "fsdp"} and all(run.zero == 3 for run in rows if run.sharding)
    assert all(run.kernels in {*NORMS, "compiled"} for run in rows if run.family == "llama")
    assert sum(find_obstacle(run) is None for run in rows) > 1200


def test_logits_are_whole_on_each_rank_or_shared(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], micro_batch=2, dp=3, global_batch=12, seq=100, cp=1, vocab=1000, tp=4)
    logits = 2 * 100 * 1000
    assert count_loss_bytes(replace(run, loss="vocabulary_parallel")) == 10 * logits / 4
    assert count_loss_bytes(replace(run, loss="gathered")) == (14 + 2) * logits  # with those of the one before
    assert count_loss_bytes(replace(run, loss="gathered", global_batch=6)) == 14 * logits
    assert count_loss_bytes(replace(run, loss="gathered_16")) == 8 * logits


def test_layers_keep_what_their_kernels_keep(rows: list[PublishedRun]) -> None:
    run = replace(
        rows[0], family="llama", micro_batch=2, seq=100, cp=1, hidden=64, heads=8, tp=2, sequence_parallel=0,
        attention="flash", kernels="eager", keeps="",
    )  # fmt: skip

    def saved(run: PublishedRun) -> int:
        decoder, head = adjust_costs(replace(run, loss=""), [DECODER, HEAD], GPU)
        assert head == HEAD
        return DECODER.bytes.saved - decoder.bytes.saved

    assert saved(run) == 0
    assert saved(replace(run, kernels="fused")) == (16 - 8) * 64 * 200
    assert saved(replace(run, kernels="fused", sequence_parallel=1)) == (16 - 8) * 64 * 200 / 2
    assert saved(replace(run, attention="fused_softmax")) == (6 - 2) * 8 * 100 / 2 * 200
    one = replace(run, keeps="projection")
    assert -saved(one) == (4 + 2) / 2 * 64 * 200
    assert -saved(replace(one, micro_batch=1)) == 4 / 2 * 64 * 100
    assert saved(replace(one, attention="fused_softmax")) == saved(replace(run, attention="fused_softmax"))
    assert -saved(replace(one, attention="eager", micro_batch=1)) == 4 / 2 * 64 * 100
    assert -saved(replace(run, keeps="positions")) == 4 * 8 * 200
    assert -saved(replace(run, keeps="copied")) == 6 * 64 * 200 and saved(replace(run, keeps="copied", tp=1)) == 0
    gathered = replace(run, keeps="gathered")
    assert saved(gathered) == 0 and -saved(replace(gathered, sequence_parallel=1)) == 4 * 64 / 2 * 200
    assert -saved(replace(one, keeps="projection positions gathered")) == -saved(one) + 4 * 8 * 200


def test_what_is_gathered_is_kept_or_gathered_again(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], family="llama", micro_batch=2, seq=100, hidden=64, heads=8, tp=2, sequence_parallel=1)
    layer = replace(DECODER, work=replace(DECODER.work, regathers=2))
    assert _adjust_layer(replace(run, keeps="projection gathered"), layer).work.regathers == 0
    assert _adjust_layer(replace(run, keeps="projection"), layer).work.regathers == 2


class _Attention(torch.autograd.Function):
    """Keeps what FlashAttention keeps, but for a number a row."""

    @staticmethod
    def forward(context: Any, *taken: torch.Tensor) -> torch.Tensor:
        result = torch.empty(taken[0].shape, dtype=taken[0].dtype)
        context.save_for_backward(*taken, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return context.saved_tensors[:3]


@pytest.mark.parametrize(("batch", "is_flash"), [(1, True), (2, True), (1, False), (2, False)])
def test_a_product_stays_whole_where_values_are_a_view_of_it(batch: int, is_flash: bool) -> None:
    """Attention with the shapes of github.com/Aleph-Alpha/scaling: what of hidden states is kept, after the product of
    queries, keys and values, next to rotated queries and keys, values and the result."""
    length, heads, size = 16, 4, 8
    product = torch.zeros(batch, length, heads * 3 * size, dtype=torch.bfloat16, requires_grad=True)
    out = torch.zeros(heads * size, heads * size, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] != (length, length):  # no scores
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        by_head = (product * 1).reshape(batch, length, heads, 3 * size).permute(1, 0, 2, 3)
        query, key, value = by_head.split(size, -1)
        query, key = query + query.roll(1, -1), key + key.roll(1, -1)  # rotated: new tensors in the same order
        if is_flash:
            flat = (part.permute(1, 0, 2, 3).reshape(batch * length, heads, size) for part in (query, key, value))
            result = _Attention.apply(*flat).reshape(batch, length, heads, size).permute(0, 2, 1, 3)
        else:
            query, key, value = (part.reshape(length, batch * heads, size) for part in (query, key, value))
            scores = torch.bmm(query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2)).softmax(-1)
            result = torch.bmm(scores, value.transpose(0, 1))
        result = result.reshape(batch * heads, length, size).reshape(batch, heads, length, size)
        torch.nn.functional.linear(result.permute(0, 2, 1, 3).reshape(batch, length, heads * size), out)
    kept.pop(out.untyped_storage()._cdata)
    nbytes = sum(storage.nbytes() for storage in kept.values()) / (batch * length * heads * size)
    assert nbytes == 4 * 2 + ONE_RESULT * (is_flash or batch == 1) + REORDERED * (is_flash and batch > 1)


def test_scores_of_one_kernel_take_less_in_passing(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], family="llama", micro_batch=2, seq=100, cp=1, hidden=64, ffn=256, heads=8, tp=2)
    scores, layer = 2 * 8 * 100 * 100 // 2, replace(DECODER, bytes=replace(DECODER.bytes, widest=10**6))
    fused = _adjust_layer(replace(run, attention="fused_softmax"), layer)
    assert fused.bytes.widest == 10**6 - (6 - FUSED_SCORES_PASSING) * scores
    assert _adjust_layer(replace(run, attention="eager"), layer).bytes.widest == 10**6
    matrix = 2 * 200 * 256 // 2
    narrow = replace(layer, bytes=replace(layer.bytes, widest=matrix + 8))
    assert _adjust_layer(replace(run, attention="fused_softmax"), narrow).bytes.widest == matrix


def test_gradients_of_a_micro_batch_are_next_to_their_sums(rows: list[PublishedRun]) -> None:
    run = next(run for run in rows if run.source == "bigscience_176b" and run.gradients == "fp32_and_16")
    planned = plan_run(run)
    once = plan_run(replace(run, gradients="fp32"))
    parameters = planned.plan.stages[0].num_parameters
    assert planned.memory_gib - once.memory_gib == pytest.approx(2 * parameters / 2**30, rel=0.02)


def test_gradients_on_their_way_are_not_there_at_the_peak_of_the_loss(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], tp=2, sequence_parallel=1, precision="bf16")
    layers = [
        replace(
            DECODER,
            bytes=replace(DECODER.bytes, output=50, widest=70),
            parameters=replace(DECODER.parameters, largest_made=36),
        ),
        replace(
            HEAD,
            bytes=replace(HEAD.bytes, output=50, widest=10**9),
            parameters=replace(HEAD.parameters, largest_made=10**9),
        ),
    ]
    assert count_gradients_in_pass(run, layers) == 2 * 2 * 50 + 2 * 36  # a block works on the parts of both ranks
    assert count_gradients_in_pass(
        replace(run, sequence_parallel=0), [replace(layers[0], bytes=replace(layers[0].bytes, widest=80)), layers[1]]
    ) == (2 * 50 + 80)


def test_a_loss_counts_as_far_as_it_exceeds_the_gradients_on_their_way(rows: list[PublishedRun]) -> None:
    run = replace(rows[0], loss="vocabulary_parallel", gradients="bf16", sharding="", tp=2)
    run = replace(run, micro_batch=2, seq=100, cp=1, vocab=1000)
    layers = [
        replace(
            DECODER,
            bytes=replace(DECODER.bytes, output=50, widest=70_000),
            parameters=replace(DECODER.parameters, largest_made=30),
        )
    ] * 2
    memory = Memory(weights=8, gradients=4, activations=16, buffers=10**6)
    chunks: list[Any] = [SimpleNamespace(first_layer=first, last_layer=first + 1) for first in (0, 2)]
    first, last = ([StagePlan(0, [chunk], 1, memory, 0.0, 0.0)] for chunk in chunks)
    costs = [*layers, *layers[:1], HEAD]

    def count(stages: list[StagePlan]) -> float:
        plan: Any = SimpleNamespace(stages=stages)
        return count_memory(run, plan, costs) * GIB - (8 + 4 // 2 + 16 + 10**6)

    assert count(first) == 0
    run, memory = replace(run, precision="fp16"), replace(memory, optimizer=30)
    stage = StagePlan(0, chunks[:1], 1, replace(memory, activations=0), 0.0, 0.0)
    assert count([stage]) == 30 + 30 // 3 - 16  # at the step
    run = replace(run, precision="bf16", states="16")
    assert count([stage]) == 30 // 3 - 16
    run = replace(run, states="", gradients="fp32_whole", dp=8)
    assert count([stage]) == 30 + 8 * 4 - 2 - 16
    whole = replace(run, gradients="bf16", keeps="embedding", tp=4, hidden=4)
    costs_of_embedding = (8 + 4 // 2 + 30) * 3000 / 6000  # 3 of 4 parts of 1000 x 4 more than 6000 parameters
    embedding = replace(stage, num_parameters=6000)
    found = count_memory(whole, SimpleNamespace(stages=[embedding]), costs)  # type: ignore[arg-type]
    assert found * GIB - (8 + 4 // 2 + 30 + 10**6) == pytest.approx(costs_of_embedding)
    run = replace(run, gradients="bf16")
    assert count(last) == count_loss_bytes(run) - count_gradients_in_pass(run, costs[2:]) == 10**6 - 70_100


@pytest.mark.parametrize(
    ("split", "layers", "sizes"),
    [
        ("decoder", 8, [3, 2, 2, 4]),
        ("embedding_counts", 10, [3, 3, 3, 4]),  # 3 with the embedding; 2 with norm and head
        ("filled", 9, [4, 3, 3, 2]),
        ("uniform", 9, [3, 3, 3, 3]),
        ("uniform", 10, [4, 3, 3, 3]),
        ("by_cost", 9, [4, 2, 3, 3]),  # 9 layers of 40 and a head of 20: in shares of 95
        ("decoder", 9, "balanced"),
    ],
)
def test_layers_are_split_as_their_source_says(
    rows: list[PublishedRun], split: str, layers: int, sizes: list[int] | str
) -> None:
    run = replace(rows[0], split=split, layers=layers, pp=4, vp=1, schedule="1f1b", hidden=2, ffn=4, vocab=10)
    assert _split(run, layers + 3) == sizes


def test_what_a_system_has_room_for() -> None:
    run = next(run for run in read_runs(RUNS) if run.gpu == "a100_80g")
    alone = count_limit(replace(run, tp=1, pp=1, cp=1, dp=1), replace(GPU, memory=80))
    assert alone == (80 - 0.5) / 1.08
    for declared, counted in (("", 60), ("allocated", 60), ("reserved", 60 * 1.08), ("process", 60 * 1.08 + 0.5 + 0.5)):
        assert count_measured(replace(run, tp=2, pp=1, cp=1, dp=1, memory_is=declared), 60) == pytest.approx(counted)
    assert count_limit(replace(run, tp=1, pp=1, cp=1, dp=1, context=1.5), replace(GPU, memory=80)) == (80 - 1.5) / 1.08
    assert count_limit(replace(run, tp=2, pp=1, cp=1, dp=4), replace(GPU, memory=80)) == alone - 2 * 0.5 / 1.08


def test_fsdp_has_whole_weights_of_few_layers(rows: list[PublishedRun]) -> None:
    run = replace(next(run for run in rows if run.sharding == "fsdp"), recompute="none")
    layers = [
        replace(HEAD, parameters=replace(HEAD.parameters, held=4)),
        *[replace(DECODER, parameters=replace(DECODER.parameters, held=10))] * 3,
    ]
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
    assert decoder.work.forward_traffic == DECODER.work.forward_traffic
    assert head.work.forward_traffic.moved - HEAD.work.forward_traffic.moved == round(
        (moved - LOGIT_MOVED_HERE / tp) * 200_000
    )


def test_without_zero_each_replica_has_the_whole_state(rows: list[PublishedRun]) -> None:
    run = next(run for run in rows if run.zero == 0 and run.dp == 8 and run.pp == 1)
    sharded = plan_run(replace(run, zero=1))
    whole = plan_run(run)
    optimizer = sharded.plan.stages[0].memory.optimizer
    assert whole.plan.stages[0].memory.optimizer == 8 * optimizer
    assert whole.memory_gib - sharded.memory_gib >= 7 * optimizer / GIB  # and the step's gradients
    assert whole.plan.optimizer_seconds == 8 * sharded.plan.optimizer_seconds
    assert adjust_states(replace(run, zero=1), whole.plan) is whole.plan
    fewer = (
        plan_run(replace(run, gradients="fp16")).plan.reduce_seconds
        / plan_run(replace(run, gradients="fp32")).plan.reduce_seconds
    )
    assert run.gradients == "fp16" and fewer == pytest.approx(2 * 2 / (2 * 4), rel=0.15)  # of bytes; the rest is memory


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
    layer = replace(
        DECODER,
        work=replace(
            DECODER.work, forward_flops=9.0, attention_flops=2.0, forward_traffic=moves, backward_traffic=moves
        ),
    )
    flash1 = _adjust_layer(replace(run, attention="flash1"), layer)
    assert flash1.work.attention_flops == 4 and flash1.work.forward_flops - flash1.work.attention_flops == 9 - 2
    assert (
        flash1.work.backward_flops - 2 * flash1.work.attention_flops
        == layer.work.backward_flops - 2 * layer.work.attention_flops
    )
    scores = 2 * 8 * 100 * 100 // 2
    softmax = _adjust_layer(replace(run, attention="fused_softmax"), layer)
    assert moves.moved - softmax.work.forward_traffic.moved == (EAGER_MOVED[0] - FUSED_MOVED[0]) * scores
    assert moves.moved - softmax.work.backward_traffic.moved == (EAGER_MOVED[1] - FUSED_MOVED[1]) * scores
    for declared in ({"attention": "flash"}, {"attention": "fused_softmax", "kernels": "fused"}):
        assert _adjust_layer(replace(run, **declared), layer) == layer


def test_what_eager_scores_move_is_what_the_plan_counts() -> None:
    """The part that grows with the square of the sequence, of a score; without products and the mask of all heads."""
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    config._attn_implementation = "eager"

    def count(length: int) -> tuple[int, int]:
        layer = count_layers(build_layers(config), config, MicroBatchShape(1, length, torch.bfloat16))[1]
        return layer.work.forward_traffic.moved, layer.work.backward_traffic.moved

    short, middle, long = count(64), count(128), count(256)
    square = [((c - b) / 128 - (b - a) / 64) / 192 / 4 for a, b, c in zip(short, middle, long, strict=True)]
    mask, products = 2 / 4, (2 + 2, 4 * 2)
    assert square == [EAGER_MOVED[0] + products[0] + mask, EAGER_MOVED[1] + products[1]]


@pytest.mark.parametrize(
    ("family", "index", "config"),
    [
        ("llama", 1, LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_attention_heads=4)),
        ("gpt", 2, GPT2Config(vocab_size=8, n_embd=32, n_inner=32, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0)),
    ],
)
def test_what_eager_scores_take_in_passing_is_what_the_plan_counts(
    family: str, index: int, config: PretrainedConfig
) -> None:
    """The part that grows with the square of the sequence, of a score."""
    config._attn_implementation, config.num_hidden_layers = "eager", 1

    def count(length: int) -> int:
        shape = MicroBatchShape(1, length, torch.bfloat16)
        return count_layers(build_layers(config), config, shape)[index].bytes.widest

    short, middle, long = count(64), count(128), count(256)
    square = ((long - middle) / 128 - (middle - short) / 64) / 192 / 4
    assert square == pytest.approx(SCORES_PASSING_HERE[family], rel=0.01)
