"""The timer of a real engine: its spans and sums, and that it detects a slow stage."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.cases import Case, build_engine
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import LlamaConfig

from training.distributed.topology import Layout, Topology
from training.observability.measured_timeline import measured_timeline
from training.observability.stage_timer import MemoryPeak, RankTimes, Span
from training.observability.telemetry import combine
from training.pipeline.schedule import OneForwardOneBackward
from training.plan_command.timeline import Work

PAUSE = 0.1  # seconds added to each forward pass of stage 1: many times the duration of the pass itself
MICRO_BATCHES = 4
BLOCK = 64 * 2**20  # bytes that stage 1 allocates and frees in each forward pass


def touch_pages(num_bytes: int) -> None:
    """Allocate pages and free them. A tensor is not certain to: malloc may place it on pages that the process already
    has."""
    with mmap.mmap(-1, num_bytes) as block:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            block[start] = 1


def be_slow(*_: object) -> None:
    """A forward hook that makes a stage slow and uses much memory."""
    time.sleep(PAUSE)
    touch_pages(BLOCK)


def train_timed(case: Case) -> tuple[list[Span], list[RankTimes], list[RankTimes]]:
    """Run two steps and an evaluation with a slow second rank; return the second step, the times of all ranks, and
    those of the evaluation."""
    from training.engine.steps import evaluate
    from training.observability.stage_timer import StageTimer

    engine, loader, *_ = build_engine(case)
    if engine.rank == 1:
        engine.module.register_forward_hook(be_slow)
    clock = StageTimer(engine, MemoryPeak(engine.device))
    clock.attach()
    micro_batches = loader.iterate(0, 3)
    for step in range(2):
        clock.start_step()
        engine.train_step(micro_batches, step, 3)
        spans = clock.finish_step()
    gathered = clock.gather()
    batches = loader.iterate(2, 3)
    evaluate(engine, batches, engine.layout.gradient_accumulation_steps, 1)
    after = clock.gather()
    clock.detach()
    return spans, gathered, after


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("clock")
    save_llama(root / "hf")
    save_tokenizer(root / "hf")
    return Case(root / "hf", save_records(root / "train.jsonl", 40), root, 2, 2)


def test_a_slow_stage_is_seen(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    results = workers(2).run(train_timed, case)
    for spans, gathered, after in results:
        assert [span.stop for span in spans[:-1]] == [
            span.start for span in spans[1:]
        ]  # no time is lost between two units
        names = [span.name for span in spans]
        assert names.count("ForwardPass") == names.count("BackwardPass") == MICRO_BATCHES
        assert names[-4:] == ["ReduceTiedGrads", "ReduceGrads", "Aligned", "OptimizerStep"]
        assert gathered == results[0][1] and [times.num_steps for times in gathered] == [2, 2]
        assert [times.num_steps for times in after] == [0, 0]  # an evaluation is no step
    measured = combine(results[0][1], Layout(Topology.of(2, pipe=2), 2, MICRO_BATCHES))
    slept = PAUSE * MICRO_BATCHES
    assert measured.compute_time[1] > slept and measured.wait_time[0] > slept - measured.compute_time[0]
    assert measured.compute_time[0] < slept < measured.step_time and sum(measured.communication_time) < slept
    for parts in zip(measured.compute_time, measured.communication_time, measured.wait_time, strict=True):
        assert sum(parts) == pytest.approx(measured.step_time)
    busy = [times.forward + times.backward for times in results[0][1]]
    assert measured.imbalance == pytest.approx(max(busy) / (sum(busy) / 2) - 1) and measured.imbalance > 0.2
    assert 0 < measured.bubble < 1
    assert measured.peak_memory[1] > BLOCK / 2
    spans = measured_timeline([spans for spans, *_ in results], OneForwardOneBackward(2, MICRO_BATCHES)).spans
    assert (
        sum(span.work is Work.communication and span.stop - span.start > PAUSE / 2 for span in spans) == 0
    )  # waiting is drawn as idle
    forward = [span for span in spans if span.work is Work.forward and span.stage_id == 1]
    assert [span.micro_batch for span in forward] == [0, 1, 2, 3] and all(
        span.stop - span.start > PAUSE for span in forward
    )


DELAY = 0.003  # seconds added to each exchange


class SlowTransfer:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        time.sleep(DELAY)
        self._work.wait()


def train_on_slow_links(case: Case) -> RankTimes:
    """Run a step and an evaluation in which every exchange with the ranks that share sequences is slow."""
    from training.engine.steps import evaluate
    from training.observability.stage_timer import StageTimer

    def exchange(*given: Any, **options: Any) -> None:
        time.sleep(DELAY)
        all_to_all(*given, **options)

    def transfer(operations: list[dist.P2POp]) -> list[Any]:
        first, *others = start_transfers(operations)
        return [SlowTransfer(first), *others]

    all_to_all, start_transfers = dist.all_to_all_single, dist.batch_isend_irecv
    engine, loader, *_ = build_engine(case)
    clock = StageTimer(engine, MemoryPeak(engine.device))
    clock.attach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchange)
        patch.setattr(dist, "batch_isend_irecv", transfer)
        clock.start_step()
        engine.train_step(loader.iterate(0, 1), 0, 1)
        clock.finish_step()
        evaluate(engine, loader.iterate(1, 2), MICRO_BATCHES, 1)  # not counted: it is not a training step
    clock.detach()
    assert engine.module.ranks.sequence_part.exchanges.observer is None
    return clock.gather()[engine.rank]


@pytest.mark.parametrize("mode", ["ulysses", pytest.param("ring", marks=pytest.mark.full)])
def test_attention_that_waits_for_other_ranks_is_seen(
    workers: Callable[[int], WorkerGroup], case: Case, mode: str
) -> None:
    """With Ulysses each layer exchanges twice per pass. In a ring of two, one block arrives in each pass, and two
    gradients in the backward pass."""
    keys = ("context_parallel_size=2", f"context_parallel_mode={mode}")
    delays = 4 * LlamaConfig.from_pretrained(case.model).num_hidden_layers * MICRO_BATCHES * DELAY
    for times in workers(2).run(train_on_slow_links, replace(case, num_stages=1, overrides=keys)):
        assert delays < times.exchange < times.forward + times.backward


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "num_stages", "dp_size"), [(2, 1, 2), (3, 1, 2), (2, 2, 2)], ids=["stage2", "stage3", "stage2-pp2xdp2"]
)
def test_a_slow_replica_of_a_sharded_run_is_seen(
    workers: Callable[[int], WorkerGroup], case: Case, stage: int, num_stages: int, dp_size: int
) -> None:
    """Gradients are reduced and weights gathered inside the passes, so replicas wait for each other there."""
    sharded = replace(case, num_stages=num_stages, world_size=num_stages * dp_size, overrides=(f"zero_stage={stage}",))
    results = workers(sharded.world_size).run(train_timed, sharded)
    num_micro_batches = MICRO_BATCHES // dp_size
    for spans, gathered, after in results:
        assert all(one.stop == other.start for one, other in pairwise(spans)), "no time is lost"
        names = [span.name for span in spans]
        assert names.count("ForwardPass") == names.count("BackwardPass") == num_micro_batches
        assert names[-2:] == ["Aligned", "OptimizerStep"]
        assert gathered == results[0][1] and [times.num_steps for times in gathered] == [2] * sharded.world_size
        assert not any(times.num_steps for times in after)
    times, slept = results[0][1], PAUSE * num_micro_batches
    assert times[1].forward > 2 * slept and times[1].peak_memory > BLOCK / 2
    assert times[0].step > 2 * slept  # its replica waits for it, in whichever exchange comes next
    measured = combine(times, Layout(Topology.of(sharded.world_size, pipe=num_stages), 2, num_micro_batches))
    for parts in zip(measured.compute_time, measured.communication_time, measured.wait_time, strict=True):
        assert sum(parts) == pytest.approx(measured.step_time)
    assert measured.step_time > slept and len(measured.peak_memory) == num_stages
    assert measured.peak_memory[0] > BLOCK / 2 and 0 < measured.bubble < 1


def build_spans(*named: tuple[str, float]) -> list[Span]:
    spans, now = [], 0.0
    for name, seconds in named:
        spans.append(Span(name, now, now + seconds))
        now += seconds
    return spans


def test_a_step_by_hand() -> None:
    times = RankTimes()
    step = build_spans(
        ("RecvActivation", 5.0),
        ("ForwardPass", 1.0),
        ("BackwardPass", 2.0),
        ("SendGrad", 0.5),
        ("RecvActivation", 0.25),
        ("ForwardPass", 1.0),
        ("BackwardPass", 2.0),
        ("SendGrad", 1.0),
        ("ReduceGrads", 0.125),
        ("Aligned", 3.0),
        ("OptimizerStep", 0.5),
    )
    times.add(step, 17.0)
    assert times == RankTimes(
        num_steps=1,
        step=17.0,
        forward=2.0,
        backward=4.0,
        optimizer=0.5,
        reduce=0.125,
        pipeline=12.75,
        recv_activation=0.5,
        send_grad=1.0,
    )


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the proc file system")
def test_a_file_that_weights_were_read_from_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(BLOCK))
    seen = []
    for _ in range(5):
        peak = MemoryPeak(torch.device("cpu"))
        mapped = np.memmap(tmp_path / "weights", np.uint8, mode="r")
        assert not mapped.any()  # reads all of it
        peak.start()
        seen.append(peak.read())
        del mapped
    assert any(found < BLOCK / 4 for found in seen), seen


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the proc file system")
def test_memory_that_was_freed_counts() -> None:
    seen = []
    for _ in range(5):  # a busy system takes pages of mapped files back meanwhile
        peak = MemoryPeak(torch.device("cpu"))
        touch_pages(2 * BLOCK)  # forgotten by `start`
        peak.start()
        before = peak.read()
        touch_pages(BLOCK)
        seen.append(peak.read() - before)
    assert any(abs(grown - BLOCK) < BLOCK / 4 for grown in seen), seen
