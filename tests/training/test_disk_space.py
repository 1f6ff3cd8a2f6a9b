"""The disk space that a plan promises is not exceeded by what a run saves, keeps and exports."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.configs import build_config

from errors import Ending, UserError
from models.storage import folders
from training.checkpoint.best import Best, update_best
from training.checkpoint.retention import Retention
from training.config.criterion import Criterion
from training.config.schema import RunConfig
from training.disk_space import SPARE_BYTES, CheckpointSize, check_room, count_disk_bytes
from training.inputs.cadence import is_due, steps_between

STEPS, STEPS_PER_EPOCH = 40, 10
SIZE = CheckpointSize(weights=10, optimizer=60, passthrough=3)
RANDOM = random.Random(0)
FALLING = [float(STEPS - step) for step in range(STEPS)]  # each evaluation is the best so far
METRICS = [FALLING, FALLING[::-1], *([RANDOM.random() for _ in range(STEPS)] for _ in range(3))]


def test_no_room_for_any_checkpoint_is_reported_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, size = build_config(), CheckpointSize(weights=4 * 10**6, optimizer=12 * 10**6)
    for free in (size.total + SPARE_BYTES, size.total + SPARE_BYTES - 1):
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        if free >= size.total + SPARE_BYTES:
            check_room(config, size, tmp_path / "checkpoints")
    with pytest.raises(
        UserError,
        match="a checkpoint of this run does not fit: .* needs 0.03 GB and its disk has 0.03 GB free; make room",
    ) as caught:
        check_room(config, size, tmp_path / "checkpoints")
    assert caught.value.ending is Ending.DISK
    check_room(build_config("save_final=false"), size, tmp_path)


def measure_run(config: RunConfig, metrics: list[float]) -> int:
    """Return the most bytes at once of a run's saves, as `TrainingLoop._finish_step` decides them. metrics: of an
    evaluation of each step."""
    retention, criterion, best, most = Retention.of(config), Criterion.of(config), None, 0
    evaluate_every = steps_between(config.eval_steps, config.eval_epochs, STEPS_PER_EPOCH)
    save_every = steps_between(config.save_steps, config.save_epochs, STEPS_PER_EPOCH)
    saved: dict[int, float | None] = {}
    exports: set[str] = set()
    for step in range(1, STEPS + 1):
        value, is_last = None, step == STEPS
        if config.eval_file and (is_due(step, evaluate_every) or is_last):
            value = metrics[step - 1]
            best = update_best(best, criterion, {criterion.metric: value}, step)
        is_best = config.load_best_model_at_end and isinstance(best, Best) and best.step == step
        is_exported = step in config.export_steps or config.hub.is_due(step)
        if not (is_due(step, save_every) or is_last or is_best or is_exported):
            continue
        saved[step] = value
        written = exports.copy()
        if step in config.export_steps:
            written.add(f"hf-step{step}")
        if config.hub.is_due(step):
            written.add("the next hf" if "hf" in exports else "hf")
        most = max(most, len(saved) * SIZE.total + len(written) * SIZE.export)
        exports = written - {"the next hf"}
        kept = {step} | ({best.step} if retention.keeps_best_step and best is not None else set())
        for pruned in retention.choose_prunable(saved, kept):
            del saved[pruned]
    at_end = len(exports) + 1
    return max(most, len(saved) * SIZE.total + at_end * SIZE.export) + SIZE.passthrough


@pytest.mark.parametrize(
    "every", [(), ("save_steps=3",), ("save_epochs=0.5",), ("hub.repo_id=me/it", "hub.every=7"), ("eval_steps=2",)]
)
@pytest.mark.parametrize("exports", [(), ("export_steps=[1,2,3,3,30]",)])
@pytest.mark.parametrize(
    "kept", [(), ("keep_last=1",), ("keep_last=2", "keep_best=2"), ("load_best_model_at_end=true",),
             ("load_best_model_at_end=true", "keep_last=1")]
)  # fmt: skip
def test_a_run_takes_at_most_what_is_promised(
    every: tuple[str, ...], exports: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    config = build_config("eval_file=eval.jsonl", *every, *exports, *kept)
    taken = max(measure_run(config, metrics) for metrics in METRICS)
    promised, bounded = count_disk_bytes(config, SIZE), count_disk_bytes(config, SIZE, STEPS)
    assert bounded is not None and taken <= bounded <= (promised or bounded)
    if promised is None:
        assert config.keep_last is None
        if every == ("save_steps=3",) and not kept:
            assert bounded <= taken + 2 * SIZE.total
    else:
        assert promised <= 1.5 * taken + SIZE.total
