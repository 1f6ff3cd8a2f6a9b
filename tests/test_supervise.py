"""scripts/supervise.py around commands that fail in each way a run can."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.supervise import build_restart, build_start

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "supervise.py"

# Notes its arguments and behaves as the words of its first argument say, one word a start.
RUN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[1])
words, arguments = sys.argv[2].split(","), sys.argv[3:]
starts = out / "starts.jsonl"
count = len(starts.read_text().splitlines()) if starts.exists() else 0
with open(starts, "a") as file:
    file.write(json.dumps(arguments) + chr(10))
word = words[min(count, len(words) - 1)]
if word == "fail":
    sys.exit(3)
if word == "save":
    (out / "checkpoints").mkdir(exist_ok=True)
    (out / "checkpoints" / "latest").write_text("global_step1")
    os.kill(os.getpid(), signal.SIGKILL)
if word == "orphan":
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", code])
    (out / "orphan").write_text(str(child.pid))
    time.sleep(0.5)
    sys.exit(1)
if word == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
if word == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (out / "waiting").touch()
    time.sleep(300)
if word == "confirm":  # as a run that finds that it has finished before
    (out / "completed.json").touch()
if word == "finish":
    (out / "completed.json").write_text("{}")
    sys.exit(1)  # as launchers do
"""


def command(out: Path, words: str, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from scripts import supervise; supervise.SECONDS_TO_LEAVE = "
        "0.5; supervise.main()",
        str(SCRIPT.parents[1]),
        "--output_dir",
        str(out),
        *options,
        "--",
        sys.executable,
        "-c",
        RUN,
        str(out),
        words,
        *arguments,
    ]


def run(out: Path, words: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, list[list[str]]]:
    """Exit code, what it said, and the arguments of each start."""
    ended = subprocess.run(
        command(out, words, *options, arguments=arguments), capture_output=True, text=True, timeout=60
    )
    return (
        ended.returncode,
        ended.stderr,
        [json.loads(line) for line in (out / "starts.jsonl").read_text().splitlines()],
    )


def test_a_finished_run_is_known_by_its_record(tmp_path: Path) -> None:
    assert run(tmp_path, "finish") == (0, "", [[]])


def test_a_failed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    code, said, starts = run(tmp_path, "fail,save,finish", arguments=("seed=1", "overwrite_output_dir=true"))
    assert code == 0 and "start 3 of 4" in said and "ended with code -9" in said
    # nothing to resume after the first start; after the second nothing may be deleted
    assert starts == [["seed=1", "overwrite_output_dir=true"]] * 2 + [["seed=1", "resume=latest"]]


def test_the_number_of_starts_is_bounded_and_an_old_record_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "completed.json").write_text("{}")
    code, said, starts = run(tmp_path, "fail", "--max_restarts", "2")
    assert code == 3 and len(starts) == 3 and "has not finished after 3 starts" in said


def test_what_a_launcher_leaves_behind_is_ended(tmp_path: Path) -> None:
    code, _, starts = run(tmp_path, "orphan,finish")
    assert code == 0 and len(starts) == 2
    state = Path("/proc", (tmp_path / "orphan").read_text(), "stat")
    assert not state.exists() or " Z " in state.read_text()  # a zombie if its parent has not waited for it


def test_a_stuck_run_is_ended_and_started_again(tmp_path: Path) -> None:
    code, said, starts = run(tmp_path, "hang,finish", "--stuck_minutes", "0.02")
    assert code == 0 and len(starts) == 2 and "has changed for 0.02 minutes: ending the run" in said


def test_a_signal_is_passed_on_and_nothing_started_again(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "wait"))
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1


def test_a_supervisor_that_is_started_again_continues_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").touch()
    assert run(tmp_path, "confirm", arguments=("x=1",)) == (0, "", [["x=1", "resume=latest"]])
    for given in ("resume=elsewhere", "overwrite_output_dir=true"):
        assert build_start(["run", given], tmp_path) == ["run", given]


def test_resume_is_never_said_twice(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").touch()
    assert build_restart(["run", "resume=elsewhere", "x=1"], tmp_path) == ["run", "x=1", "resume=latest"]
