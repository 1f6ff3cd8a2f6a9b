"""The plan of ranks that share sequences: bytes sent by each mode, and the seconds that each adds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.configs import build_config, set_keys
from transformers import LlamaConfig

from models.architecture.lookup import build_layers
from models.parallel.shard import ContextParallel, LayerRanks
from training.config.schema import Device, RunConfig
from training.cost_terms.context_parallel import (
    SCORE_BYTES,
    ModeCost,
    compare_modes,
    compute_exchanges,
    compute_workspace,
)
from training.cost_terms.cost_term import PlannedRun, Stage
from training.cost_terms.layers import ATTENTION_BACKWARD, ATTENTION_RATE, time_pass
from training.costs.cost import Bytes, LayerCost, MicroBatchShape, Parameters, SharedAttention, Work, count_layers
from training.costs.hardware import GB, STREAM_RATE, Machine
from training.distributed.topology import Layout, Topology

SIZE, LENGTH = 4, 1000  # ranks, tokens of each
FLOPS = 1e8  # of a token's attention
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=100, usable_memory=1, peak_flops={"bf16": 1e12},
    efficiency=1, memory_bandwidth=1000, intra_node_bandwidth=100, inter_node_bandwidth=0.1, host_memory=100,
    host_memory_bandwidth=400, host_link_bandwidth=20, device_name="round",
)  # fmt: skip
KEYS = ("precision=bf16", "max_seq_length=4000", "activation_checkpoint_interval=0", "micro_batch_size=1")


@cache
def describe_config() -> RunConfig:
    return build_config(*KEYS)


def share(heads: int, is_ring: bool, has_window: bool = False) -> SharedAttention:
    return SharedAttention(
        is_ring=is_ring, has_ring=True, heads=heads, kv_heads=2, head_sizes=(8, 8), has_window=has_window
    )


def build_stage(shared: SharedAttention, *keys: str, flops: float = FLOPS, gpu: Machine = GPU) -> Stage:
    layer = LayerCost(
        name="x",
        shared_attention=shared,
        parameters=Parameters(held=1, trained=1, active=1, largest_trained=1),
        work=Work(forward_flops=1e9, attention_width=0, attention_flops=flops),
        bytes=Bytes(saved=1, output=1),
    )
    run = PlannedRun(set_keys(describe_config(), *keys), Layout(Topology.of(SIZE, context=SIZE), 1, 1), 50, gpu)
    return Stage(run, 0, [replace(layer, shared_attention=None), layer], [range(2)])


BLOCK = LENGTH * 2 * (8 + 8) * 2  # bytes of two heads of keys and values in bf16
TRAVELS = (SIZE - 1) * 2 * BLOCK + SIZE * 2 * BLOCK  # forward, and backward with their gradients in fp32
EXCHANGED = 2 * (SIZE - 1) / SIZE * LENGTH * (8 + 4) * (8 + 8) * 2  # two heads are repeated, for four ranks


@pytest.mark.parametrize("is_ring", [False, True])
def test_both_modes_are_compared(is_ring: bool) -> None:
    by_heads, in_ring = compare_modes(build_stage(share(8, is_ring)))
    assert [by_heads.mode, in_ring.mode] == ["ulysses", "ring"]
    assert [by_heads.is_chosen, in_ring.is_chosen] == [not is_ring, is_ring]
    assert [by_heads.sent_bytes, in_ring.sent_bytes] == pytest.approx([EXCHANGED, TRAVELS])
    assert by_heads.seconds_within == pytest.approx(EXCHANGED / (100 * GB))
    assert by_heads.seconds_between == pytest.approx(EXCHANGED / (0.1 * GB))
    # A turn of attention takes 25 ms, blocks and gradients far less: but for the last, which comes home
    assert in_ring.seconds_within == pytest.approx(2 * BLOCK / (100 * GB))


def test_a_slow_link_is_waited_for() -> None:
    (in_ring,) = compare_modes(build_stage(share(6, is_ring=True), flops=0))  # six heads: not by four ranks
    assert in_ring.mode == "ring" and in_ring.seconds_between == pytest.approx(TRAVELS / (0.1 * GB))


@pytest.mark.parametrize(("keys", "has_window"), [(("attn_implementation=eager",), False), ((), True)])
def test_scores_in_memory_take_time(keys: tuple[str, ...], has_window: bool) -> None:
    stage = build_stage(share(8, is_ring=True, has_window=has_window), *keys)
    plain = build_stage(share(8, is_ring=True))
    cost, fused = compute_exchanges(stage.chunks[0]), compute_exchanges(plain.chunks[0])
    scores = LENGTH * FLOPS / (2 * (8 + 8))
    added = cost.forward_seconds - fused.forward_seconds, cost.backward_seconds - fused.backward_seconds
    assert added == pytest.approx([scores * nbytes / (1000 * GB * STREAM_RATE) for nbytes in SCORE_BYTES])


def test_documents_of_packed_rows_take_no_scores() -> None:
    packed, plain = (build_stage(share(8, is_ring=True), *keys) for keys in (("data.packing=true",), ()))
    assert compute_exchanges(packed.chunks[0]) == compute_exchanges(plain.chunks[0])
    assert compute_workspace(packed.chunks[0]) == compute_workspace(plain.chunks[0])


def test_a_ring_has_the_kernels_of_flash_attention_2() -> None:
    """Which take twice as long on this GPU, unless FlashAttention-3 is in their place."""
    gpu = replace(GPU, flash_attention_2=0.5)
    ring = compute_exchanges(build_stage(share(8, is_ring=True), gpu=gpu).chunks[0])
    forward = FLOPS * LENGTH / 1e12 / ATTENTION_RATE
    assert ring.forward_seconds == pytest.approx(forward)  # in addition
    assert ring.backward_seconds - ring.sending_seconds == pytest.approx(2 * ATTENTION_BACKWARD * forward)
    newer = build_stage(share(8, is_ring=True), "flash_kernels=fa3", gpu=gpu)
    by_heads = build_stage(share(8, is_ring=False), gpu=gpu)
    for cost in (compute_exchanges(newer.chunks[0]), compute_exchanges(by_heads.chunks[0])):
        assert cost.forward_seconds + cost.backward_seconds == cost.sending_seconds
    packed = replace(
        by_heads,
        costs=[replace(layer, work=replace(layer.work, runs_flash_attention_2=True)) for layer in by_heads.costs],
    )
    seconds = [time_pass(each.costs[1], each.run) for each in (packed, by_heads)]
    assert seconds[0] - seconds[1] == pytest.approx(forward)
    in_ring = replace(packed, costs=[replace(layer, shared_attention=share(8, is_ring=True)) for layer in packed.costs])
    counted = compute_exchanges(in_ring.chunks[0])  # by the layers
    assert counted.forward_seconds + counted.backward_seconds == counted.sending_seconds


def test_a_rank_alone_sends_nothing() -> None:
    stage = build_stage(share(8, is_ring=False))
    costs = [replace(layer, shared_attention=None) for layer in stage.costs]
    assert compare_modes(replace(stage, costs=costs)) == list[ModeCost]()


def test_the_attention_that_ranks_share_is_that_of_the_layer() -> None:
    """By heads the outputs are kept once more, in bf16."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=32, attn_implementation="sdpa",
    )  # fmt: skip
    shape = MicroBatchShape(1, 16 * SIZE, torch.bfloat16)
    by_heads, in_ring = (
        count_layers(build_layers(config), config, shape, ranks=LayerRanks(parts=ContextParallel(0, SIZE, None, each)))
        for each in (False, True)
    )
    assert [layer.shared_attention for layer in by_heads] == [None, share(8, is_ring=False), None, None]
    assert in_ring[1].shared_attention == share(8, is_ring=True)
    assert by_heads[1].bytes.saved - in_ring[1].bytes.saved == 16 * 8 * 8 * 2
