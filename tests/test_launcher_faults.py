"""Faults through the real launcher, at random moments: after each the run continues, and ends with the losses of one
that nothing befell."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.damage import damage
from support.families import save_family
from support.launching import ROOT, Ended, Launch, run_deepspeed, run_torchrun
from support.small_disk import small_disk
from support.tiny import save_records, save_tokenizer
from test_launcher import arguments, read_metrics, root  # noqa: F401  (fixture)

from models.storage.steps import TEMPORARY_PREFIX, list_checkpoints, step_of
from training.checkpoint.resume import find_damage, find_resume
from training.checkpoint.run_folder import RunFolder

pytestmark = pytest.mark.full
STEPS = 60
TIMES = 3
BOUND = 1e-5


@pytest.fixture(scope="module")
def train(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:  # noqa: F811
    """train(out, *overrides, while_running=None, num_gpus=2): a run of STEPS steps, each saved."""

    def start(
        out: Path, *overrides: str, while_running: Callable[[Launch], None] | None = None, num_gpus: int = 2
    ) -> Ended:
        options = (
            "optimizer=adamw",
            f"max_steps={STEPS}",
            "save_steps=1",
            "keep_last=3",
            "learning_rate=1e-3",
            *overrides,
        )
        return run_deepspeed(arguments(root, out, *options), tmp_path_factory.mktemp("launch"), num_gpus, while_running)

    return start


@pytest.fixture(scope="module")
def expected(train: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert train(out).code == 0
    return read_steps(out)


def read_steps(out: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(out) if "loss" in line]


def check_whole(out: Path) -> int:
    """The newest step, and that nothing that looks like a checkpoint is broken."""
    resumable = find_resume("latest", out / "checkpoints", trust=False)
    assert resumable.damages == [] and all(
        find_damage(step_dir, 0, 1) is None for step_dir in list_checkpoints(out / "checkpoints")
    )
    return step_of(resumable.candidates[0])


def finish(train: Callable[..., Ended], out: Path, expected: list[tuple[float, float]]) -> Ended:
    ended = train(out, "resume=latest")
    assert (ended.code, ended.left_alive) == (0, []), ended.output
    assert json.loads((out / "completed.json").read_text())["step"] == STEPS and not (out / "ended.json").exists()
    found = read_steps(out)
    assert len(found) == STEPS and all(a == pytest.approx(b, rel=BOUND) for a, b in zip(found, expected, strict=True))
    return ended


def wait_for_step(launch: Launch, step: int, rng: random.Random) -> None:
    launch.wait_for(f"step {step}/")
    time.sleep(0.3 * rng.random())


def kill_one(launch: Launch, rng: random.Random, num_ranks: int = 2) -> None:
    os.kill(launch.rank(rng.randrange(num_ranks)), signal.SIGKILL)


def kill_all(launch: Launch, rng: random.Random) -> None:
    for pid in launch.processes():
        os.kill(pid, signal.SIGKILL)


def terminate_launchers(launch: Launch, rng: random.Random) -> None:
    ranks = {launch.rank(0), launch.rank(1)}
    for pid in launch.processes().keys() - ranks:
        os.kill(pid, signal.SIGTERM)
    while ranks & launch.processes().keys():  # the outer launcher does not wait for them
        time.sleep(0.1)


@pytest.mark.parametrize("strike", [kill_one, kill_all, terminate_launchers])
def test_a_signal_loses_nothing(
    train, expected, tmp_path: Path, strike: Callable[[Launch, random.Random], None]
) -> None:
    rng, out, step = random.Random(strike.__name__), tmp_path / "out", 0
    for attempt in range(TIMES):
        seen = step + rng.randrange(2, 12)

        def befall(launch: Launch) -> None:
            wait_for_step(launch, seen, rng)
            strike(launch, rng)

        ended = train(out, *(["resume=latest"] if attempt else []), while_running=befall)
        assert not (out / "completed.json").exists() and ended.left_alive == [], ended.output
        if strike is kill_one:
            assert any("has ended without a message" in line for line in ended.errors()), ended.output
            record = RunFolder(out).read_ended()
            assert (record["reason"], record["code"]) == ("lost_rank", 75), record
        assert (step := check_whole(out)) >= seen - 2  # the save of the one before may be under way
    finish(train, out, expected)


def test_kills_while_data_are_streamed_lose_no_row(train, tmp_path: Path) -> None:
    """Each at another layout than the one before."""
    rng, out, step = random.Random(7), tmp_path / "out", 0

    def stream(out: Path, *overrides: str, **how: Any) -> Ended:
        return train(out, "data.streaming=true", "data.shuffle_block=5", "num_workers=1", *overrides, **how)

    assert stream(tmp_path / "whole").code == 0
    for num_stages in (2, 1):
        seen = step + rng.randrange(4, 12)

        def befall(launch: Launch) -> None:
            wait_for_step(launch, seen, rng)
            kill_all(launch, rng)

        begun = ["resume=latest"] if step else []
        assert stream(out, f"num_stages={num_stages}", *begun, while_running=befall).left_alive == []
        assert (step := check_whole(out)) >= seen - 2
    finish(stream, out, read_steps(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("key", "num_stages", "num_ranks"),
    [("zero_stage=2", 1, 2), ("zero_stage=3", 1, 2), ("zero_stage=2", 2, 4), ("expert_parallel_size=2", 2, 4)],
    ids=["stage2", "stage3", "stage2-pp2xdp2", "ep2xpp2"],
)
def test_kills_where_replicas_share_lose_nothing(
    train, tmp_path: Path, key: str, num_stages: int, num_ranks: int
) -> None:
    """A rank in the middle of a step, then one while its checkpoint is being written."""
    rng, out = random.Random(key), tmp_path / "out"
    model: tuple[str, ...] = ()
    if key.startswith("expert"):
        save_tokenizer(save_family(tmp_path / "mixture", "qwen3_moe"))
        model = ("model=from_checkpoint", f"model_name_or_path={tmp_path}/mixture")

    def sharded(out: Path, *overrides: str, **how: Any) -> Ended:
        return train(out, key, f"num_stages={num_stages}", *model, *overrides, num_gpus=num_ranks, **how)

    assert sharded(tmp_path / "whole").code == 0

    def strike_step(launch: Launch) -> None:
        wait_for_step(launch, 20, rng)
        kill_one(launch, rng, num_ranks)

    def strike_save(launch: Launch) -> None:
        launch.wait_for("step 40/")
        while not list((out / "checkpoints").glob(f"{TEMPORARY_PREFIX}*")):
            time.sleep(0.001)
        kill_one(launch, rng, num_ranks)

    for strike, step, overrides in ((strike_step, 20, ()), (strike_save, 40, ("resume=latest",))):
        ended = sharded(out, *overrides, while_running=strike)
        assert ended.code != 0 and ended.left_alive == [], ended.output
        assert any("has ended without a message" in line for line in ended.errors()), ended.output
        assert check_whole(out) >= step - 2
    finish(sharded, out, read_steps(tmp_path / "whole"))


@pytest.mark.parametrize("launcher", [run_deepspeed, run_torchrun])
@pytest.mark.parametrize(
    "how, slow, message",
    [
        ("raise", "write_share", "error (rank 1): OutOfMemoryError: CUDA out of memory."),
        ("kill", "publish", "error: rank 1 has ended without a message: it was killed"),
    ],
    ids=["raise", "kill"],
)
def test_a_save_that_is_under_way_ends_before_the_ranks_do(
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: Callable[..., Ended],
    how: str,
    slow: str,
    message: str,
) -> None:
    """The other rank is in a call that never returns."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    dies = f"callbacks=[{{_target_: support.dying.DieInStep, rank: 1, how: {how}, after: 2, slow: {slow}}}]"
    keys = ("max_steps=100", "save_steps=2", "async_save=true", "optimizer=adamw")
    out = tmp_path / "out"
    ended = launcher(arguments(root, out, dies, *keys), tmp_path)
    assert ended.code != 0 and ended.left_alive == [], ended.output
    assert any(line.startswith(message) for line in ended.errors()), ended.output
    assert check_whole(out) == 2 and ended.seconds_after_error < 60


def test_a_stopped_rank_is_named_and_the_run_goes_on(train, expected, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rank in (0, 1):

        def stop(launch: Launch) -> None:
            launch.wait_for(f"step {5 + 20 * rank}/")
            os.kill(launch.rank(rank), signal.SIGSTOP)

        ended = train(out, "stuck_minutes=0.15", *(["resume=latest"] if rank else []), while_running=stop)
        (error,) = ended.errors()
        assert (
            error.startswith(f"error: rank {rank} has not answered for stuck_minutes=0.15: it is stopped or stuck")
            and ended.code != 0
        ), error
        assert check_whole(out) >= 3 + 20 * rank
    finish(train, out, expected)


@pytest.mark.parametrize(
    "how, error",
    [
        ("sleep", r"rank 0 has made no progress for stuck_minutes=0.15: it is at tests/support/hanging.py:"),
        ("stop", r"rank 0 has not answered for stuck_minutes=0.15: it is stopped or stuck"),
    ],
)
def test_an_export_that_hangs_is_named(
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    error: str,
) -> None:
    """Rank 0 exports while the others wait; continued, the run only exports."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    out = tmp_path / "out"
    hangs = (f"callbacks=[{{_target_: support.hanging.HangInExport, how: {how}}}]", "stuck_minutes=0.15")
    ended = run_deepspeed(arguments(root, out, *hangs), tmp_path)
    (found,) = ended.errors()
    assert re.match(f"error: {error}", found) and ended.code != 0 and ended.left_alive == [], ended.output
    assert check_whole(out) == 3 and not (out / "hf").exists() and not (out / "completed.json").exists()
    ended = run_deepspeed(arguments(root, out, "resume=latest"), tmp_path)
    assert (ended.code, ended.left_alive) == (0, []), ended.output
    assert (out / "hf" / "config.json").is_file() and len(read_steps(out)) == 3


def test_a_rank_that_stops_while_a_checkpoint_is_evaluated_is_named(root: Path, tmp_path: Path) -> None:  # noqa: F811
    records = save_records(tmp_path / "many.jsonl", 20_000)

    def stop(launch: Launch) -> None:
        launch.wait_for("evaluating: ")
        os.kill(launch.rank(1), signal.SIGSTOP)

    given = arguments(root, tmp_path / "out", f"eval_file={records}", "evaluate_only=true", "stuck_minutes=0.15")
    ended = run_deepspeed(given, tmp_path, while_running=stop)
    (error,) = ended.errors()
    assert error.startswith("error: rank 1 has not answered for stuck_minutes=0.15: it is stopped or stuck")
    assert ended.code != 0 and ended.left_alive == [], ended.output


def test_a_full_disk_is_survived(train, expected, tmp_path: Path) -> None:
    rng, step = random.Random(2), 0
    with small_disk(tmp_path / "disk", 64 * 2**20) as disk:
        out, filler = disk / "out", disk / "filler"
        for attempt in range(TIMES):
            seen = step + rng.randrange(2, 8)

            def fill(launch: Launch) -> None:
                wait_for_step(launch, seen, rng)
                with open(filler, "wb") as stream:
                    while (free := shutil.disk_usage(disk).free) > 2**18:
                        with suppress(OSError):  # a save took some of it meanwhile
                            os.posix_fallocate(stream.fileno(), 0, free - rng.randrange(2**18))
                            break

            overrides = ["resume=latest"] if attempt else []
            ended = train(out, f"num_workers={2 * (attempt % 2)}", *overrides, while_running=fill)
            assert ended.code != 0 and any("ake room" in line for line in ended.errors()), ended.output
            filler.unlink()
            record = RunFolder(out).read_ended()
            assert (record.get("reason"), record.get("code")) in {("disk", 74), (None, None)}, record  # no room for it
            assert (step := check_whole(out)) >= seen - 2
        finish(train, out, expected)


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_damage_is_named_and_the_one_before_is_taken(train, expected, tmp_path: Path, kind: str) -> None:
    rng, out = random.Random(kind), tmp_path / "out"
    assert train(out, "stop_after_steps=10").code == 0
    for attempt in range(TIMES):
        broken = Path(shutil.copytree(out, tmp_path / str(attempt)))
        file = rng.choice(sorted((broken / "checkpoints" / "global_step10").iterdir()))
        damage(file, kind, rng)
        ended = finish(train, broken, expected)
        assert (
            f"resume: going back to {broken}/checkpoints/global_step9, the newest complete checkpoint" in ended.output
        )


def test_a_second_run_on_the_folder_is_refused(train, expected, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def start_others(launch: Launch) -> None:
        launch.wait_for("step 1/")
        for _ in range(TIMES):
            second = train(out, "resume=latest")
            assert second.code != 0 and "is in use by another run that has not ended" in second.errors()[0], (
                second.output
            )

    ended = train(
        out,
        "max_steps=100000",
        "lr_scheduler_type=constant",
        while_running=lambda launch: (start_others(launch), (out / "STOP").touch()),
    )
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    check_whole(out)


def be_odd(disk: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """disk: what support/odd_disk makes of the disks of all processes that are started. log: of the ranks that met
    it."""
    for name, value in {"PYTHONPATH": ROOT / "tests/support/odd_disk", "ODD_DISK": disk, "ODD_DISK_LOG": log}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_a_disk_that_takes_longer_than_stuck_minutes_ends_no_run(
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    async_save: str,
) -> None:
    """A flush of 30 seconds on both ranks, where 15 without progress end a run."""
    be_odd("slow:global_step2:30", tmp_path / "met", monkeypatch)
    with small_disk(tmp_path / "disk", 64 * 2**20) as disk:
        options = ("save_steps=1", "stuck_minutes=0.25", f"async_save={async_save}")
        ended = run_deepspeed(arguments(root, disk / "out", *options), tmp_path)
        assert (ended.code, ended.errors(), ended.left_alive) == (0, [], []), ended.output
        assert check_whole(disk / "out") == 3 and len((tmp_path / "met").read_text().splitlines()) == 2


def test_where_folders_cannot_be_synced_a_run_saves_and_says_so_once(
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_odd("no-folders", tmp_path / "met", monkeypatch)
    with small_disk(tmp_path / "disk", 64 * 2**20) as disk:
        out = disk / "out"
        for options in (["save_steps=1", "stop_after_steps=2"], ["save_steps=1", "resume=latest"]):
            ended = run_torchrun(arguments(root, out, *options), tmp_path)
            assert (ended.code, ended.errors(), ended.left_alive) == (0, [], []), ended.output
        assert check_whole(out) == 3 and json.loads((out / "completed.json").read_text())["step"] == 3
        lines = (out / "logs" / "rank_0.log").read_text().splitlines()
        warnings = [line for line in lines if "is on a file system that cannot sync folders" in line]
        assert 1 <= len([line for line in warnings if str(disk) in line]) <= 2  # of two runs; the cache is elsewhere
        assert (tmp_path / "met").exists()
