"""Garbage collection between steps: never in one, everything at evaluations and saves; and steps leave no garbage that
holds tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.cases import Case, build_engine
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from training.collector import EVERY, Collector


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    gc.enable()  # whatever the tests before have left
    collector = Collector()
    collector.start()
    assert not gc.isenabled()
    yield collector
    collector.close()
    assert gc.isenabled()


def is_alive_after(collect: Callable[[], None]) -> bool:
    cycle = weakref.ref(Cycle())
    for _ in range(10_000):  # several times the thresholds of `gc`
        Cycle()
    assert cycle() is not None
    collect()
    return cycle() is not None


def test_cycles_wait_for_their_step_or_for_an_evaluation(collector: Collector) -> None:
    assert is_alive_after(lambda: collector.finish_step(EVERY - 1))
    assert not is_alive_after(lambda: collector.finish_step(EVERY))
    assert not is_alive_after(collector.free)


def test_what_is_off_stays_off() -> None:
    gc.disable()
    try:
        collector = Collector()
        collector.start()
        assert is_alive_after(lambda: collector.finish_step(EVERY))
        assert is_alive_after(collector.free)
        collector.close()
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.collect()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("garbage")
    save_llama(root / "model", num_hidden_layers=4)
    save_tokenizer(root / "model")
    save_records(root / "train.jsonl", 80)
    return root


@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        (1, ()),
        (1, ("activation_checkpoint_interval=2",)),
        (1, ("activation_checkpoint_interval=1", "activation_checkpoint_mode=selective", "precision=bf16")),
        (2, ("schedule=zero_bubble", "activation_checkpoint_interval=1", "precision=bf16")),
        (2, ("schedule=interleaved", "activation_checkpoint_interval=1", "activation_offload=true")),
    ],
)  # fmt: skip
def test_steps_leave_no_garbage_that_holds_tensors(
    workers: Callable[[int], WorkerGroup], root: Path, num_stages: int, overrides: tuple[str, ...]
) -> None:
    """Between collections memory would grow with every micro-batch."""
    shape = ("micro_batch_size=1", "global_batch_size=4")
    case = Case(
        root / "model", root / "train.jsonl", root, num_stages, num_stages, steps=6, overrides=shape + overrides
    )
    for counts in workers(num_stages).run(count_tensors, case):
        assert max(counts) < counts[0] + 4, counts  # a loader's thread may hold one; each step has four micro-batches


def count_tensors(case: Case) -> list[int]:
    """The number of tensors alive after each of five steps without a collection."""
    engine, loader, *_ = build_engine(case)
    micro_batches = loader.iterate(0, 5)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for step in range(5):
            engine.train_step(micro_batches, step, 5)
            counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
        return counts
    finally:
        gc.enable()
        loader.close()
