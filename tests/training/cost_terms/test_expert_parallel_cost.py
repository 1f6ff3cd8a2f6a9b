"""The plan of ranks that divide experts: rows sent, the wait for the most loaded rank, state and reduction by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.configs import build_config
from support.planned import plan_config

from training.config.schema import Device
from training.cost_terms.cost_term import PlannedRun, Stage
from training.cost_terms.gradients import compute_reduction
from training.cost_terms.layer_ranks import compute_exchanges
from training.cost_terms.model_states import compute_model_states
from training.cost_terms.table import sum_pass_cost
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import GB, Machine
from training.distributed.topology import DATA, EXPERTS, Layout, Topology
from training.engine.deepspeed_config import REDUCE_BUCKET

RANKS, SHARES, TOKENS, WIDTH = 8, 4, 1000, 64
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=100, usable_memory=1, peak_flops={"bf16": 1e12},
    efficiency=1, memory_bandwidth=1000, intra_node_bandwidth=100, inter_node_bandwidth=10, host_memory=100,
    host_memory_bandwidth=400, host_link_bandwidth=20, device_name="round",
)  # fmt: skip
DENSE, DIVIDED = 1000, 600  # trained elements of a rank
HIDDEN = TOKENS * WIDTH * 2  # bytes, in bf16
LAYER = LayerCost(
    name="x",
    parameters=Parameters(held=DENSE + DIVIDED, trained=DENSE + DIVIDED, active=1, largest_trained=1, divided=DIVIDED),
    work=Work(forward_flops=1e9, attention_width=0, sent_rows=2, divided_flops=4e8),
    bytes=Bytes(saved=1, output=HIDDEN),
)


def build_stage(*keys: str) -> Stage:
    plain = ("precision=bf16", f"max_seq_length={TOKENS}", "micro_batch_size=1", "activation_checkpoint_interval=1")
    layout = Layout(Topology.of(RANKS, experts=SHARES), 1, 1)
    return Stage(PlannedRun(build_config(*plain, *keys), layout, 50, GPU), 0, [LAYER, LAYER], [range(2)])


@pytest.mark.parametrize(("mode", "repeats"), [("grouped", 1), ("selective", 0)])
def test_rows_go_there_and_back_in_each_pass(mode: str, repeats: int) -> None:
    """The second layer is the head, which is not recomputed."""
    cost = compute_exchanges(build_stage(f"activation_checkpoint_mode={mode}").chunks[0])
    one_layer = 2 * 2 * HIDDEN * (SHARES - 1) / SHARES
    assert cost.sent[EXPERTS] == (2 + 2 + repeats) * one_layer
    link = 100 * GB
    assert cost.forward_seconds == pytest.approx(2 * one_layer / link)
    assert cost.backward_seconds == pytest.approx((2 + repeats) * one_layer / link)
    assert cost.sending_seconds == cost.forward_seconds + cost.backward_seconds


def test_all_wait_for_the_most_loaded_rank() -> None:
    even, uneven = (sum_pass_cost(build_stage(*keys).chunks[0]) for keys in ((), ("moe.imbalance=1.5",)))
    assert uneven.sending_seconds == pytest.approx(1.5 * even.sending_seconds)
    products, sending = (
        4e8 * TOKENS / 1e12,
        compute_exchanges(build_stage().chunks[0]),
    )  # products: of one layer forward
    # The second layer is the head, whose gradients the loss makes in the forward pass; the first is recomputed
    forward, backward = (2 + 2) * products + sending.forward_seconds, (2 + 1) * products + sending.backward_seconds
    assert uneven.forward_seconds - even.forward_seconds == pytest.approx(0.5 * forward)
    assert uneven.backward_seconds - even.backward_seconds == pytest.approx(0.5 * backward)


def test_the_load_of_the_most_loaded_rank_counts_once() -> None:
    """However much of a pass its bytes take, which grow with the rows too, it grows at most by the factor."""
    keys = ("model=mixtral_8x7b", "plan=true", "world_size=8", "hardware=h100", "model_name_or_path=none")
    keys += ("max_seq_length=1024", "micro_batch_size=1", "global_batch_size=8", "expert_parallel_size=4")
    for mode in ("interval=0", "interval=1", "mode=selective"):
        even, uneven = (
            plan_config(build_config(*keys, f"activation_checkpoint_{mode}", f"moe.imbalance={load}")).stages[0]
            for load in (1, 4)
        )
        assert 1 < uneven.cost.forward_seconds / even.cost.forward_seconds < 4
        assert 1 < uneven.cost.backward_seconds / even.cost.backward_seconds < 4


def test_experts_are_reduced_over_the_ranks_that_have_the_same_ones() -> None:
    stage, same = build_stage(), RANKS // SHARES
    assert stage.num_in_part == 2 * DENSE // RANKS + 2 * DIVIDED // same
    sent = (4 + 2) * 2 * (DENSE * (RANKS - 1) / RANKS + DIVIDED * (same - 1) / same)  # sums in fp32, weights in bf16
    assert compute_reduction(stage).reduce_sent[DATA] == pytest.approx(sent)


def test_gradients_wait_for_the_end_of_a_pass() -> None:
    """At stage 2 a pass of ranks that divide experts holds the gradients of all its layers, in bf16."""
    stage = build_stage("zero_stage=2")
    alone = replace(stage.run, layout=Layout(Topology.of(RANKS), 1, 1))
    large = replace(
        LAYER, parameters=replace(LAYER.parameters, trained=REDUCE_BUCKET, held=REDUCE_BUCKET, largest_trained=1000)
    )
    divided, whole = (
        compute_model_states(Stage(run, 0, [large, large], [range(2)])).buffers for run in (stage.run, alone)
    )
    assert divided - whole == 2 * REDUCE_BUCKET  # the second layer's
