"""A step of a real run whose loss or gradient is not finite: it is named, and neither weights nor checkpoints include
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import Case, train_run
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from data.loading import loader
from data.order import GlobalOrder
from training.checkpoint import writer as checkpoint_writer
from training.checkpoint.writer import ShareFile

BAD_STEP = 2  # from 0
SAMPLES = 24
MICRO_BATCHES = 4  # of a step


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("nonfinite")
    save_llama(root / "hf", num_hidden_layers=2)
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", SAMPLES)
    return Case(
        root / "hf",
        root / "train.jsonl",
        root,
        2,
        2,
        4,
        ("optimizer=adamw", "learning_rate=1e-3", "save_steps=1", "logging_steps=1"),
    )


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], case: Case, tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """run(*overrides, world_size=2): its output_dir, and its error or ''."""

    def start(*overrides: str, world_size: int = 2) -> tuple[Path, str]:
        out = tmp_path / "out"
        changed = replace(case, world_size=world_size, overrides=(*case.overrides, f"output_dir={out}", *overrides))
        errors = workers(world_size).run(train_on_bad_data, changed)
        return out, max(errors)

    return start


def train_on_bad_data(case: Case, bad_step: int | None = BAD_STEP) -> str:
    """On a rank: a run in which the loss of one step is divided by zero. Ranks without a message return ''."""
    from training import loop
    from training.distributed import ranks

    build = loader.TrainLoader._build_batch

    def build_bad(self: loader.TrainLoader, index: int) -> loader.Batch:
        batch = build(self, index)
        if batch.targets is None or index // self._gradient_accumulation_steps != bad_step:
            return batch
        zero = torch.zeros((), dtype=torch.float64)
        return replace(batch, targets=replace(batch.targets, denominator=zero))

    def raise_together(error: Any) -> None:
        with patch.object(ranks.time, "sleep"):
            ranks.raise_together(error)

    with (
        patch.object(loader.TrainLoader, "_build_batch", build_bad),
        patch.object(loop, "raise_together", raise_together),
    ):
        try:
            train_run(case)
        except ValueError as error:
            return str(error)
        except SystemExit:
            pass
        return ""


def train_with_a_bad_stage(case: Case, stage: int, backward: bool, chunk: int = 0) -> str:
    """On a rank: a run in which one micro-batch of a step becomes infinite, in what a stage computes or in the gradient
    that it computes. chunk: of the stage, counted from 0."""
    from training import loop

    build = loop.NonfiniteProbe

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + float("inf")  # all of it: the loss does not look at each position

    def build_late(module: Any, device: torch.device) -> Any:  # the hooks of a module run in the order of registration
        calls = iter(range(1000))

        def interfere(_: Any, inputs: Any, outputs: Any) -> Any:
            if (module.stage_id, module.active_chunk) != (stage, chunk) or next(calls) != MICRO_BATCHES * BAD_STEP + 1:
                return None
            if backward:
                inputs[0][0].register_hook(spoil)
                return None
            return (spoil(outputs[0]), *outputs[1:])

        module.register_forward_hook(interfere)
        return build(module, device)

    with patch.object(loop, "NonfiniteProbe", build_late):
        return train_on_bad_data(case, bad_step=None)


@pytest.mark.parametrize(
    "stage, backward, world_size, place",
    [
        (1, False, 4, "in the output of stage 1"),
        (2, True, 4, "in the backward pass of stage 2"),
        *(
            pytest.param(stage, False, 4, f"in the output of stage {stage}", marks=pytest.mark.full)
            for stage in (0, 2, 3)
        ),
        *(
            pytest.param(stage, True, 4, f"in the backward pass of stage {stage}", marks=pytest.mark.full)
            for stage in (1, 3)
        ),
    ],
)
def test_the_first_stage_that_saw_it_is_named(
    workers, case: Case, tmp_path: Path, stage: int, backward: bool, world_size: int, place: str
) -> None:
    changed = replace(
        case, world_size=world_size, num_stages=4, overrides=(*case.overrides, f"output_dir={tmp_path}/out")
    )
    error = max(workers(world_size).run(train_with_a_bad_stage, changed, stage, backward))
    assert error.startswith("step 3: ") and f"; first seen {place}. Neither" in error


@pytest.mark.parametrize(
    "schedule, backward, chunk",
    [
        ("interleaved", False, 0),
        pytest.param("interleaved", True, 0, marks=pytest.mark.full),
        ("zero_bubble", False, 1),
        ("zero_bubble", True, 1),
    ],
)
def test_the_first_chunk_that_saw_it_is_named(
    workers, case: Case, tmp_path: Path, schedule: str, backward: bool, chunk: int
) -> None:
    """A chunk of stage 0 sees it too. Under zero bubble chunk 1 of stage 0 comes after chunk 1 of stage 1."""
    changed = replace(
        case, num_stages=2, overrides=(*case.overrides, f"schedule={schedule}", f"output_dir={tmp_path}/out")
    )
    error = max(workers(2).run(train_with_a_bad_stage, changed, 1, backward, chunk))
    place = f"in the {'backward pass' if backward else 'output'} of stage 1, chunk {chunk}"
    assert error.startswith("step 3: ") and f"first seen {place}. Neither" in error


def read(out: Path) -> tuple[list[int], list[str]]:
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return steps, sorted(path.name for path in (out / "checkpoints").glob("global_step*"))


def layers_of(out: Path, step: int) -> list[dict[str, torch.Tensor]]:
    return [
        torch.load(file, weights_only=True)
        for file in sorted((out / "checkpoints" / f"global_step{step}").glob("layer_*"))
    ]


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        pytest.param(2, ("precision=fp32",), id="pp2-fp32"),
        pytest.param(4, ("precision=bf16",), id="pp2xdp2-bf16", marks=pytest.mark.full),
        *(
            pytest.param(2, ("num_stages=1", f"zero_stage={stage}"), id=f"stage{stage}", marks=pytest.mark.full)
            for stage in (2, 3)
        ),
        pytest.param(4, ("zero_stage=2",), id="stage2-pp2xdp2", marks=pytest.mark.full),
    ],
)
def test_stop_names_the_step_and_its_samples(run, case: Case, world_size: int, overrides: tuple[str, ...]) -> None:
    out, error = run(*overrides, world_size=world_size)
    samples = sorted(GlobalOrder(SAMPLES, 8, case.config().seed).sample_ids(BAD_STEP))
    lines = ", ".join(str(sample + 1) for sample in samples)
    named = f"samples of train_file: {case.train_file}, lines or records {lines}; first seen in the loss. Neither"
    assert error.startswith(tuple(f"step 3: loss {loss}, gradient norm inf; {named}" for loss in ("nan", "inf")))
    assert "on_nonfinite=skip" in error and "resume=auto" in error
    assert read(out) == ([1, 2], ["global_step1", "global_step2"]) and not (out / "completed.json").exists()


@pytest.mark.parametrize(
    "overrides, world_size",
    [
        pytest.param(("precision=fp32",), 2, id="fp32"),
        pytest.param(("precision=bf16",), 4, id="pp2xdp2-bf16"),
        pytest.param(("precision=bf16", "offload_optimizer=cpu"), 2, id="offloaded", marks=pytest.mark.full),
        *(
            pytest.param(
                ("num_stages=1", f"zero_stage={stage}", f"precision={dtype}"),
                2,
                id=f"stage{stage}-{dtype}",
                marks=pytest.mark.full,
            )
            for stage in (2, 3)
            for dtype in ("fp32", "bf16")
        ),
    ],
)
def test_skip_keeps_the_weights_and_continues(run, overrides: tuple[str, ...], world_size: int) -> None:
    out, error = run("on_nonfinite=skip", *overrides, world_size=world_size)
    assert error == ""
    steps, saved = read(out)
    assert steps == [1, 2, 4] and len(saved) == 4
    before, skipped, after = (layers_of(out, step) for step in (2, 3, 4))
    for a, b, c in zip(before, skipped, after, strict=True):
        assert all(torch.equal(a[name], b[name]) and c[name].isfinite().all() for name in a)
    assert not torch.equal(skipped[1]["self_attn.q_proj.weight"], after[1]["self_attn.q_proj.weight"])
    assert "NaN" not in (out / "metrics.jsonl").read_text() and "Infinity" not in (out / "metrics.jsonl").read_text()


def test_weights_that_are_not_finite_are_not_saved() -> None:
    good, bad = torch.zeros(3), torch.tensor([0.0, float("nan"), 0.0])
    assert checkpoint_writer.find_nonfinite([ShareFile("a", {"x": good})], 7) is None
    error = checkpoint_writer.find_nonfinite([ShareFile("a", {"x": good}), ShareFile("b", {"y": bad})], 7)
    assert "saving: 'y' of b is not finite after step 7, so that step is not saved" in str(error)
