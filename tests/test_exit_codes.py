"""The exit codes of docs/environment.md, of the rank itself and through launchers, and what `ended.json` says then."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.launching import ROOT, Launch, run_alone, run_deepspeed, run_torchrun
from support.small_disk import small_disk
from test_launcher import arguments, root  # noqa: F401  (fixture)
from test_launcher_signals import signal_tree

from training.checkpoint.run_folder import RunFolder

DYING = "callbacks=[{{_target_: support.dying.{}}}]"


@dataclass(frozen=True)
class Cause:
    """A way for a run to end. record: its reason, code and rank, None for whichever was first. message: how it begins.
    is_alone: whether a run of one rank can have it. send: what is done while it runs."""

    keys: tuple[str, ...]
    record: tuple[str, int, int | None]
    message: str
    is_alone: bool = True
    needs_disk: bool = False
    send: Callable[[Launch], None] | None = None


def terminate(launch: Launch) -> None:
    launch.wait_for("step 2/")
    signal_tree(launch, signal.SIGTERM)
    launch.wait_until_gone(60)


def interrupt_tokenizing(launch: Launch) -> None:
    while not list((launch.log.parent / "cache").glob("*.lock")):
        assert launch.process.poll() is None, launch.log.read_text()
        time.sleep(0.01)
    time.sleep(1)  # its processes have started
    signal_tree(launch, signal.SIGINT)
    launch.wait_until_gone(30)


CAUSES = {
    "mistake": Cause(("num_stages=3",), ("mistake", 1, 0), "num_stages=3 does not divide the number of started ranks"),
    "mistake_in_data": Cause(("data.prompt_field=question",), ("mistake", 1, 0), "{root}/train.jsonl:1: "),
    "exception": Cause(
        (DYING.format("DieInStep, rank: {last}, how: raise"),),
        ("exception", 70, None),
        "OutOfMemoryError: CUDA out of memory.",
    ),
    "disk": Cause(
        (DYING.format("FillDisk"), "save_steps=2", "optimizer=adamw"), ("disk", 74, None), "saving: ", needs_disk=True
    ),
    "lost_rank": Cause(
        (DYING.format("DieInStep, rank: 1, how: kill"),),
        ("lost_rank", 75, 0),
        "rank 1 has ended without a message",
        is_alone=False,
    ),
    "signal": Cause(("max_steps=100000",), ("signal", 143, None), "stopped by SIGTERM, after a save", send=terminate),
    "signal_while_tokenizing": Cause(
        ("train_file={many}", "data.cache_dir=cache", "data.num_proc=2"),
        ("signal", 130, None),
        "stopped by SIGINT outside of training steps",
        send=interrupt_tokenizing,
    ),
}
STARTS = {"alone": run_alone, "deepspeed": run_deepspeed, "torchrun": run_torchrun}


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "name"),
    [(start, name) for name, cause in CAUSES.items() for start in STARTS if cause.is_alone or start != "alone"],
)
def test_a_cause_has_its_code_and_its_record(
    start: str,
    name: str,
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    cause, many = CAUSES[name], tmp_path / "many.jsonl"
    many.write_text(2000 * (root / "train.jsonl").read_text())
    disk = small_disk(tmp_path / "disk", 64 * 2**20) if cause.needs_disk else nullcontext(tmp_path)
    with disk as folder:
        last = 0 if start == "alone" else 1
        keys = [key.replace("{last}", str(last)).replace("{many}", str(many)) for key in cause.keys]
        if start == "alone" and name != "mistake":
            keys.append("num_stages=1")
        named = {key.partition("=")[0] for key in keys}
        given = [word for word in arguments(root, folder / "out") if word.partition("=")[0] not in named]
        ended = STARTS[start]([*given, *keys], tmp_path, while_running=cause.send)  # type: ignore[operator]
        record = RunFolder(folder / "out").read_ended()
    reason, code, rank = cause.record
    assert ended.left_alive == [] and (record["reason"], record["code"]) == (reason, code), (record, ended.output)
    assert record["rank"] == rank if rank is not None else record["rank"] in (0, 1)
    assert record["message"].startswith(cause.message.replace("{root}", str(root))), record
    assert not RunFolder(folder / "out").completed.exists()
    if start == "alone":
        assert ended.code == code, ended.output
    elif start == "torchrun" and cause.send is None:  # else it ends as it was signalled, and sums up nothing
        codes = re.findall(r"exitcode +: (-?\d+) ", ended.output)
        assert str(code) in codes or (name == "lost_rank" and "-9" in codes), ended.output
    else:
        assert ended.code != 0
