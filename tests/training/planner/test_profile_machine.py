"""This machine tried out: what is timed, and what becomes of it."""

from __future__ import annotations

import pytest
from support.configs import build_config
from transformers import LlamaConfig

from models.architecture import build_layers
from training.distributed.topology import Layout, Topology
from training.planner.hardware import complete_hardware
from training.planner.levers.lever import PlannedRun
from training.planner.plan import count_costs
from training.planner.profile_machine import profile_layers


def test_two_ranks_time_every_kind_of_layer_once() -> None:
    architecture = LlamaConfig(
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    architecture._attn_implementation = "sdpa"
    config = build_config("hardware=here", "hardware.intra_node_bandwidth=7", "max_seq_length=64", "precision=bf16")
    layers, layout = build_layers(architecture), Layout(Topology.of(2, pipe=2), 2, 4)
    costs = count_costs(config, architecture, layers, layout)
    hardware = complete_hardware(config.hardware, config.precision, layout.world_size)
    run = PlannedRun(config, layout, architecture.vocab_size, hardware)
    timed, measured = profile_layers(run, architecture, costs)
    embedding, first, second, third, norm, head = (cost.pass_seconds[0] for cost in timed)
    assert first == second == third and 0 < norm < first
    assert 0 < embedding < head, "a tied head makes logits, a lookup does not"
    assert all(cost.pass_seconds[1] > 0 for cost in timed)
    assert (
        measured.memory_bandwidth != hardware.memory_bandwidth
        and 0 < measured.inter_node_bandwidth != hardware.inter_node_bandwidth
    )
    assert measured.intra_node_bandwidth == 7, "what is stated is not measured"
    assert measured.peak_flops == pytest.approx(hardware.peak_flops)
