"""A trace becomes figures: events as kineto writes them, and times computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from training.observability.trace_summary import measure_union, render_profiles, summarize_trace

STEP = "optimizer step 3"


def event(category: str, name: str, start: float, stop: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "pid": 1, "tid": tid}


def on_gpu() -> list[dict[str, Any]]:
    """A step from 100 to 200 whose last kernel ends at 220; earlier events are not part of it."""
    return [
        {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 1},
        event("kernel", "gemm", 10, 90, tid=7),
        event("cuda_runtime", "cudaDeviceSynchronize", 50, 99),
        event("user_annotation", STEP, 100, 200),
        event("cpu_op", "aten::item", 110, 160),
        event("cpu_op", "aten::_local_scalar_dense", 115, 155),
        event("cuda_runtime", "cudaMemcpyAsync", 120, 125),
        event("cuda_runtime", "cudaStreamSynchronize", 125, 150),
        event("cuda_runtime", "cudaLaunchKernel", 170, 171),
        event("kernel", "gemm", 110, 140, tid=7),
        event("kernel", "gemm", 200, 220, tid=7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 140, 150, tid=7),
        event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 130, 180, tid=20),
        event("gpu_user_annotation", STEP, 100, 220, tid=7),
        event("cuda_runtime", "cudaDeviceSynchronize", 225, 230),  # by the profiler
    ]


def test_a_gpu_step_by_hand() -> None:
    profile = summarize_trace(on_gpu(), STEP)
    assert profile.on_device
    assert profile.step == pytest.approx(120e-6)
    assert profile.computing == pytest.approx(60e-6)  # 110 to 150, 200 to 220
    assert profile.communicating == pytest.approx(30e-6)  # 150 to 180; before, other kernels run too
    assert profile.idle_share == pytest.approx(30 / 120)
    assert [(op.name[:4], op.calls) for op in profile.device_ops] == [("gemm", 2), ("nccl", 1), ("Memc", 1)]
    assert profile.waits == {
        "cudaStreamSynchronize": 1, "cudaMemcpyAsync": 1, "aten::item": 1, "aten::_local_scalar_dense": 1,
    }  # fmt: skip


def test_the_time_of_an_operator_excludes_those_within_it() -> None:
    ops = {op.name: op.seconds for op in summarize_trace(on_gpu(), STEP).host_ops}
    assert ops == {"aten::_local_scalar_dense": pytest.approx(40e-6), "aten::item": pytest.approx(10e-6)}


def test_calls_of_two_threads_are_not_nested_in_each_other() -> None:
    events = [
        event("user_annotation", STEP, 0, 100),
        event("cpu_op", "aten::linear", 0, 40),
        event("cpu_op", "aten::addmm", 10, 30),
        event("cpu_op", "MmBackward0", 10, 50, tid=2),
        event("cpu_op", "aten::mm", 20, 50, tid=2),
        event("cpu_op", "c10d::send", 60, 90),
    ]
    profile = summarize_trace(events, STEP)
    assert {op.name: round(op.seconds * 1e6) for op in profile.host_ops} == {
        "aten::linear": 20, "aten::addmm": 20, "MmBackward0": 10, "aten::mm": 30, "c10d::send": 30,
    }  # fmt: skip
    assert not profile.on_device and not profile.device_ops
    assert (round(profile.computing * 1e6), round(profile.communicating * 1e6)) == (50, 30)
    assert profile.idle_share == pytest.approx(0.2)


def test_a_union_counts_what_overlaps_once() -> None:
    assert measure_union([(5, 6), (0, 2), (1, 3), (1, 1.5)]) == 4
    assert measure_union([]) == 0


def test_ranks_are_side_by_side() -> None:
    text = render_profiles([summarize_trace(on_gpu(), STEP)] * 2, 3)
    lines = text.splitlines()
    assert lines[0].startswith("step 3,") and lines[0].endswith("shares of the device")
    assert [line.split()[:6] for line in lines[3:5]] == [
        ["0", "0.1", "ms", "50.0%", "25.0%", "25.0%"],
        ["1", "0.1", "ms", "50.0%", "25.0%", "25.0%"],
    ]
    assert "cudaStreamSynchronize 1, cudaMemcpyAsync 1" in lines[3]
    assert "rank 1: kernels by device time" in lines and "rank 1: operators by host time" in lines
