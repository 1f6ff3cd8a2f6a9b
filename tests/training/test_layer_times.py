"""This machine tried out: what is timed, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.configs import build_config
from support.planned import resolve_described
from support.workers import WorkerGroup
from transformers import LlamaConfig

from data.loading.row_lengths import RowLengths
from training.costs.hardware import complete_hardware
from training.distributed.ranks import read_ranks
from training.layer_times import LayerTimes, profile_layers
from training.planner.prediction import time_layers
from training.resolution.resolve import ResolvedRun, resolve_layout
from training.resolution.target import Target

ARCHITECTURE = LlamaConfig(
    vocab_size=2000,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=4,
    tie_word_embeddings=True,
    pad_token_id=0,
)
ARCHITECTURE._attn_implementation = "sdpa"


def resolve_run(*overrides: str) -> ResolvedRun:
    """On two stages, four micro-batches of two rows."""
    config = build_config("num_stages=2", "micro_batch_size=2", "gradient_accumulation_steps=4", *overrides)
    return resolve_layout(resolve_described(config, ARCHITECTURE, 2), config, Target(2, has_accelerator=False))


def time_run_layers() -> tuple[list[LayerTimes], bool]:
    """Returns the measurements that a rank of a run gets, and whether the random state is unchanged."""
    run, ranks = resolve_run("max_seq_length=64", "precision=fp32"), read_ranks()
    before = torch.get_rng_state()
    seen = time_layers(run, RowLengths(longest=64, padded=24, filled=20.0), ranks)
    return seen, torch.equal(before, torch.get_rng_state())


def test_the_ranks_of_a_run_time_their_layers_together(workers: Callable[[int], WorkerGroup]) -> None:
    (seen, same), (other_seen, same_there) = workers(2).run(time_run_layers)
    assert same and same_there
    assert other_seen == [None, None], "the main rank alone makes a plan"
    for rank in seen:
        assert len(rank.pass_seconds) == 4, "embedding, decoder layer, norm, head"
        assert all(seconds > 0 for way in rank.pass_seconds for seconds in way) and rank.exchange_bandwidth > 0


def test_two_ranks_time_every_kind_of_layer_once() -> None:
    run = resolve_run("hardware=here", "hardware.intra_node_bandwidth=7", "max_seq_length=64", "precision=bf16")
    hardware = complete_hardware(run.config.hardware, run.config.precision, 2)
    timed, measured = profile_layers(run, hardware)
    embedding, first, second, third, norm, head = (cost.work.pass_seconds[0] for cost in timed)
    assert first == second == third and 0 < norm < first
    assert 0 < embedding < head, "a tied head makes logits, a lookup does not"
    assert all(cost.work.pass_seconds[1] > 0 for cost in timed)
    assert (
        measured.memory_bandwidth != hardware.memory_bandwidth
        and 0 < measured.inter_node_bandwidth != hardware.inter_node_bandwidth
    )
    assert measured.intra_node_bandwidth == 7, "what is stated is not measured"
    assert measured.peak_flops == pytest.approx(hardware.peak_flops)
