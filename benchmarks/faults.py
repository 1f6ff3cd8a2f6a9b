"""A soak: random faults at random moments of a real run, which is continued each time, often under another layout.
Its losses have to be those of a run that was left alone.

    python benchmarks/faults.py --minutes 60 --seed 0

One *life* is a run from its first step to its export, through several faults. Kind and phase of a fault are drawn at
random, those that happened least first. Something is *lost* when a process is left, when the newest checkpoint is older
than before, or when a life does not end with the losses of the run left alone. Prints a table of kind x phase, and what
was lost with all that befell its life; the seed repeats it as far as timing allows. Uses helpers of the tests, and
needs root for a disk that fills up (elsewhere that kind is omitted).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.damage import damage  # noqa: E402
from support.launching import BIN, Launch  # noqa: E402
from support.small_disk import try_small_disk  # noqa: E402
from support.tiny import save_llama, save_records, save_tokenizer  # noqa: E402
from support.workers import free_port  # noqa: E402

from models.storage.steps import TEMPORARY_PREFIX, step_of  # noqa: E402
from training.checkpoint.resume import find_damage, find_resume  # noqa: E402

STEPS, SAVE_EVERY, EVAL_EVERY = 16, 2, 5
BOUND = 1e-5  # of losses and norms, relative
SECONDS_TO_END = 180  # after a fault
DISK = 96 * 2**20  # bytes
PHASES = ("start", "step", "evaluation", "save", "export")
LAYOUTS = (
    ("num_stages=2",),
    ("num_stages=2", "schedule=zero_bubble"),
    ("num_stages=1",),
    ("num_stages=1", "zero_stage=2"),
    ("num_stages=1", "zero_stage=3"),
    ("num_stages=1", "tensor_parallel_size=2"),
    ("num_stages=1", "context_parallel_size=2"),
)
LAUNCHERS = ("deepspeed", "torchrun", "supervise")


class PhaseFile:
    """A callback of the run: names its phase in output_dir/phase. A save is seen by its folder instead."""

    def on_step(self, run: Any) -> None:
        self._write(run, "evaluation" if run.step % EVAL_EVERY == 0 or run.step == STEPS else "step")

    def on_evaluate(self, run: Any, metrics: Any) -> None:
        self._write(run, "step")

    def on_end(self, run: Any) -> None:
        self._write(run, "export")

    def _write(self, run: Any, phase: str) -> None:
        if run.is_main:
            (run.output_dir / "phase").write_text(phase)


@dataclass
class Life:
    """A run, and what it has been through."""

    root: Path
    out: Path
    rng: random.Random
    launcher: str = "deepspeed"
    layout: tuple[str, ...] = LAYOUTS[0]
    num_workers: int = 0
    faults: list[str] = field(default_factory=list)

    def draw_how(self, changes_layout: bool) -> None:
        self.launcher, self.num_workers = self.rng.choice(LAUNCHERS), self.rng.choice((0, 2))
        if changes_layout:
            self.layout = self.rng.choice(LAYOUTS)

    def start(self) -> Launch:
        """Start the run, or continue it."""
        trainer = [str(ROOT / "trainer_base_ds_mp.py"), *list_arguments(self.root, self.out), *self.layout]
        trainer += [f"num_workers={self.num_workers}", "resume=auto"]
        port = str(free_port())
        deepspeed = ["deepspeed", "--num_gpus", "2", "--master_port", port, *trainer]
        supervise = [sys.executable, str(ROOT / "scripts/supervise.py"), "--max_restarts", "0", "--output_dir"]
        commands = {
            "deepspeed": deepspeed,
            "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", port, *trainer],
            "supervise": [*supervise, str(self.out), "--", *deepspeed],
        }
        (self.out / "phase").unlink(missing_ok=True)
        return Launch(commands[self.launcher], self.root)

    def read_phase(self) -> str:
        if any((self.out / "checkpoints").glob(f"{TEMPORARY_PREFIX}global_step*")):
            return "save"
        with suppress(FileNotFoundError):
            return (self.out / "phase").read_text() or "step"
        return "start"

    def find_newest(self) -> int:
        """Return the step from which the run would continue, read to the last byte; 0 for none."""
        checkpoints = self.out / "checkpoints"
        if not list(checkpoints.glob("global_step*")):
            return 0
        candidates = find_resume("latest", checkpoints, trust=False).candidates
        return next((step_of(each) for each in candidates if find_damage(each, rank=0, world_size=1) is None), 0)


def list_arguments(root: Path, out: Path) -> list[str]:
    return [
        "-cn", "llama_tiny_pp2", f"model_name_or_path={root}/hf", f"train_file={root}/train.jsonl",
        f"eval_file={root}/eval.jsonl", f"output_dir={out}", f"data.cache_dir={root}/cache", "micro_batch_size=2",
        "global_batch_size=8", f"max_steps={STEPS}", "logging_steps=1", "eval_on_start=false", "max_seq_length=256",
        f"eval_steps={EVAL_EVERY}", f"save_steps={SAVE_EVERY}", "keep_last=3", "optimizer=adamw", "optimizer.eps=1e-3",
        "learning_rate=1e-3", "stuck_minutes=0.5", "callbacks=[{_target_:benchmarks.faults.PhaseFile}]",
    ]  # fmt: skip


def find_ranks(launch: Launch) -> list[int]:
    """Return the process ids of the ranks, without their data workers and launchers."""
    return sorted(pid for pid in launch.processes() if _is_rank(pid) and not _is_rank(_find_parent(pid)))


def _is_rank(pid: int) -> bool:
    """Returns whether a process is a rank, or was started by one."""
    with suppress(psutil.Error):
        return "LOCAL_RANK" in psutil.Process(pid).environ()
    return False


def _find_parent(pid: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0


def send(pids: list[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_one(launch: Launch, life: Life) -> None:
    send(life.rng.sample(ranks, 1) if (ranks := find_ranks(launch)) else [launch.process.pid], signal.SIGKILL)


def kill_all(launch: Launch, life: Life) -> None:
    send(sorted(launch.processes()), signal.SIGKILL)


def stop_one(launch: Launch, life: Life) -> None:
    send(find_ranks(launch)[-1:], signal.SIGSTOP)


def to_launcher(signum: int) -> Callable[[Launch, Life], None]:
    return lambda launch, life: send([launch.process.pid], signum)


def to_tree(signum: int) -> Callable[[Launch, Life], None]:
    return lambda launch, life: send(sorted(launch.processes(), reverse=True), signum)


def damage_newest(launch: Launch, life: Life) -> None:
    kill_all(launch, life)
    steps = sorted((life.out / "checkpoints").glob("global_step*"), key=step_of)
    if len(steps) > 1:  # with one alone there is nothing to go back to
        file = life.rng.choice(sorted(path for path in steps[-1].iterdir() if path.stat().st_size))
        damage(file, life.rng.choice(("truncated", "flipped")), life.rng)


def remove_latest(launch: Launch, life: Life) -> None:
    kill_all(launch, life)
    (life.out / "checkpoints" / "latest").unlink(missing_ok=True)


def fill_disk(launch: Launch, life: Life) -> None:
    with open(life.out.parent / "filler", "wb") as filler:
        while (free := shutil.disk_usage(life.out.parent).free) > 2**16:
            with suppress(OSError):  # a save took some of it meanwhile
                os.posix_fallocate(filler.fileno(), 0, filler.tell() + free - life.rng.randrange(2**15))
                break


FAULTS: dict[str, Callable[[Launch, Life], None]] = {
    "SIGKILL one": kill_one,
    "SIGKILL all": kill_all,
    "SIGSTOP one": stop_one,
    "SIGTERM launcher": to_launcher(signal.SIGTERM),
    "SIGINT launcher": to_launcher(signal.SIGINT),
    "SIGTERM all": to_tree(signal.SIGTERM),
    "SIGINT all": to_tree(signal.SIGINT),
    "damaged checkpoint": damage_newest,
    "removed latest": remove_latest,
    "full disk": fill_disk,
}


def strike(life: Life, kind: str, phase: str) -> tuple[str, str | None]:
    """Start the run, let `kind` happen in `phase`, and wait for its end. Returns the phase in which it happened, and
    what was lost."""
    before = life.find_newest()
    launch = life.start()
    try:
        while life.read_phase() != phase and launch.process.poll() is None:
            time.sleep(0.002)
        time.sleep(life.rng.choice((0, 0, 0.01, 0.05)) + (5 * life.rng.random() if phase == "start" else 0))
        happened = life.read_phase()
        FAULTS[kind](launch, life)
        launch.wait_until_gone(SECONDS_TO_END)
    except AssertionError as left:
        return happened, str(left)
    finally:
        launch.kill()
    (life.out.parent / "filler").unlink(missing_ok=True)
    after = life.find_newest()
    steps_back = SAVE_EVERY * 3 if kind == "damaged checkpoint" else 0
    return happened, f"step {before} was saved, {after} is left" if after < before - steps_back else None


def finish(life: Life, expected: list[dict[str, float]]) -> str | None:
    """Let the run end by itself. Returns how it differs from `expected`."""
    launch = life.start()
    try:
        ended = launch.end()
    finally:
        launch.kill()
    if ended.code != 0 or ended.left_alive or not (life.out / "hf" / "config.json").is_file():
        return f"code {ended.code}: {ended.output[-1500:]}"
    return compare(read_losses(life.out), expected)


def read_losses(out: Path) -> list[dict[str, float]]:
    """Return the figures of each step and evaluation that decide whether two runs are the same."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in line} for line in lines]


def compare(found: list[dict[str, float]], expected: list[dict[str, float]]) -> str | None:
    by_place = [{(line["step"], "eval_loss" in line): line for line in lines} for lines in (found, expected)]
    for place, theirs in by_place[1].items():
        mine = by_place[0].get(place)
        if mine is None:
            return f"no line for step {place[0]}"
        for key, value in theirs.items():
            if abs(mine[key] - value) > BOUND * abs(value):
                return f"{key} of step {place[0]} is {mine[key]}, was {value}"
    return None


def draw(counts: Counter[tuple[str, str]], kinds: list[str], rng: random.Random) -> tuple[str, str]:
    """Return the kind and phase that have happened least."""
    pairs = [(kind, phase) for kind in kinds for phase in PHASES]
    least = min(counts[pair] for pair in pairs)
    return rng.choice([pair for pair in pairs if counts[pair] == least])


def report(counts: Counter[tuple[str, str]], lost: list[str], lives: int) -> None:
    print(f"\n| fault | {' | '.join(PHASES)} |\n|---|{'---|' * len(PHASES)}")
    for kind in FAULTS:
        if any(counts[kind, phase] for phase in PHASES):
            print(f"| {kind} | {' | '.join(str(counts[kind, phase]) for phase in PHASES)} |")
    print(f"\n{counts.total()} faults in {lives} runs, {len(lost)} lost")
    print("\n".join(lost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=4, help="in one life (4)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # not without what ends runs and disks
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    rng, until = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    counts: Counter[tuple[str, str]] = Counter()
    lost: list[str] = []
    lives = 0
    with tempfile.TemporaryDirectory() as folder:
        root, disk = Path(folder), Path(folder) / "disk"
        save_llama(root / "hf", num_hidden_layers=4)
        save_tokenizer(root / "hf")
        save_records(root / "train.jsonl", 40)
        save_records(root / "eval.jsonl", 64, seed=1)
        with try_small_disk(disk, DISK) as fault:
            kinds = [kind for kind in FAULTS if kind != "full disk" or not fault]
            alone = Life(root, root / "alone", rng)
            assert alone.start().end().code == 0, (root / "launch.log").read_text()
            expected = read_losses(alone.out)
            while time.monotonic() < until:
                lives += 1
                life = Life(root, disk / f"life{lives}", rng)
                for number in range(arguments.faults):
                    life.draw_how(changes_layout=number % 2 == 1)
                    kind, phase = draw(counts, kinds, rng)
                    happened, mistake = strike(life, kind, phase)
                    counts[kind, happened] += 1
                    life.faults.append(f"{kind} ({happened}, {life.launcher}, {' '.join(life.layout)})")
                    print(f"{counts.total()}: {life.faults[-1]}: {mistake or 'nothing lost'}", flush=True)
                    if mistake is not None:
                        lost.append(f"life {lives}: {'; '.join(life.faults)}: {mistake}")
                life.draw_how(changes_layout=True)
                if (mistake := finish(life, expected)) is not None:
                    lost.append(f"life {lives}: {'; '.join(life.faults)}: {mistake}")
                    print(f"life {lives} lost: {mistake}", flush=True)
                shutil.rmtree(life.out, ignore_errors=True)
    report(counts, lost, lives)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
