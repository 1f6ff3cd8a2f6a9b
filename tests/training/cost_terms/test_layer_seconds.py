"""The seconds of a layer's pass on a GPU, by hand: its products, its attention, its kernels and its host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.configs import build_config

from training.config.schema import Device
from training.cost_terms.cost_term import PlannedRun
from training.cost_terms.layers import (
    ATTENTION_BACKWARD,
    ATTENTION_RATE,
    KERNEL_SECONDS,
    LAUNCH_SECONDS,
    Launch,
    stretch_products,
    time_attention,
    time_kernels,
)
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import GB, STREAM_RATE, Machine
from training.costs.traffic import Traffic
from training.distributed.topology import Layout, Topology

T = 64  # tokens of a micro-batch
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=1, usable_memory=1, peak_flops={"bf16": 1}, efficiency=1,
    memory_bandwidth=100, intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory=1, host_memory_bandwidth=1,
    host_link_bandwidth=1, device_name="round",
)  # fmt: skip


@pytest.mark.parametrize(
    ("products", "stretch"),
    [
        (((1280, 64, 256),), 1),  # 10 tiles of 256 x 128, or of 128 x 256: a wave
        (((1280, 64, 384),), 1),  # 30 tiles of 128 x 128: three waves
        (((1280, 64, 257),), 384 / 257),  # of a third column of tiles one element is needed: 30 tiles again
        (((128, 64, 128),), 1),  # one tile, whose depth ten multiprocessors share
        (((128, 64, 768),), 10 / 9),  # three tiles of 128 x 256, three multiprocessors for each: one is idle
        (((1280, 64, 256), (128, 640, 768)), (20 + 60 * 10 / 9) / (20 + 60)),  # by their FLOPs
        ((), 1),
    ],
)
def test_products_run_in_waves_of_tiles(products: tuple[tuple[int, int, int], ...], stretch: float) -> None:
    assert stretch_products(products, 10) == pytest.approx(stretch)
    assert stretch_products(products, None) == 1


def test_idle_multiprocessors_take_time_on_a_gpu_alone() -> None:
    passes = Traffic(0, 0, ((128, 64, 768),))
    gpu = replace(GPU, multiprocessors=10)
    assert time_kernels(2.0, 1.0, passes, gpu) == pytest.approx(10 / 9 * 2.0 + 1.0)
    assert time_kernels(2.0, 1.0, passes, GPU) == pytest.approx(2.0 + 1.0)
    assert time_kernels(2.0, 1.0, passes, replace(gpu, device=Device.cpu)) == 3.0


def test_a_pass_is_bound_by_the_gpu_or_by_its_host() -> None:
    moving = 1e9 / (100 * GB * STREAM_RATE) + 5 * KERNEL_SECONDS
    busy = time_kernels(2.0, 1.0, Traffic(10**9, 5), GPU)
    assert busy == pytest.approx(2.0 + 1.0 + moving)
    assert time_kernels(1e-6, 0.0, Traffic(0, 50), GPU) == 50 * LAUNCH_SECONDS[Launch.plain]


def time_fused_attention(machine: Machine, is_backward: bool = False, *, by_second: bool = False) -> float:
    """Return the seconds of a layer whose attention takes two at the rate of large products."""
    layer = LayerCost(
        name="x",
        parameters=Parameters(held=1, trained=1),
        work=Work(forward_flops=2.0, attention_flops=(1 if is_backward else 2) / T, runs_flash_attention_2=by_second),
        bytes=Bytes(saved=1, output=1),
    )
    config = build_config("precision=bf16", f"max_seq_length={T}", "micro_batch_size=1")
    return time_attention(layer, PlannedRun(config, Layout(Topology.of(1), 1, 1), 50, machine), is_backward)


def test_attention_takes_longer_than_products_of_as_many_flops_on_a_gpu() -> None:
    assert time_fused_attention(GPU) == pytest.approx(2.0 / ATTENTION_RATE)
    assert time_fused_attention(GPU, is_backward=True) == pytest.approx(2.0 * ATTENTION_BACKWARD / ATTENTION_RATE)
    assert time_fused_attention(GPU, by_second=True) == time_fused_attention(GPU)
    hopper = replace(GPU, flash_attention_2=0.5)
    assert time_fused_attention(hopper, by_second=True) == pytest.approx(2 * time_fused_attention(GPU))
    assert time_fused_attention(hopper) == time_fused_attention(GPU)
    assert time_fused_attention(replace(hopper, device=Device.cpu), by_second=True) == 2.0
