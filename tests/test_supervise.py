"""scripts/supervise.py around commands that fail in each way a run can."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console import report_progress
from scripts.supervise import Supervisor, build_restart, build_start, compose_command, find_output_dir, trains
from training.checkpoint.run_folder import RunFolder

KEPT = "overwrite_output_dir=false"
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
if word == "explain":
    record = {"reason": "disk", "code": 74, "rank": 1, "message": "no room"}
    (out / "ended.json").write_text(json.dumps(record))
    sys.exit(1)  # as launchers do
if word == "save":
    (out / "checkpoints" / "global_step1").mkdir(parents=True, exist_ok=True)
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
if word == "launch":  # as launchers, which kill their ranks at a signal
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": "0", "LOCAL_RANK": "0"})
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), (out / "killed").touch()))
    time.sleep(1)
    (out / "waiting").touch()
    sys.exit(child.wait())
if word == "work":  # in steps, on a file system whose clock is ten minutes late
    for step in range(24):
        (out / "metrics.jsonl").touch()
        os.utime(out / "metrics.jsonl", (time.time() - 600, time.time() - 600))
        time.sleep(0.3)
    word = "finish"
if word == "ahead":  # nothing happens, on a file system whose clock is ten minutes fast
    (out / "metrics.jsonl").touch()
    os.utime(out / "metrics.jsonl", (time.time() + 600, time.time() + 600))
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
    given = ["seed=1", "overwrite_output_dir=true"]
    assert starts == [given, [*given, KEPT], [*given, KEPT, "resume=auto"]]


def test_old_checkpoints_are_neither_deleted_nor_resumed_by_a_restart(tmp_path: Path) -> None:
    """They are those of the run that `overwrite_output_dir` was to replace."""
    (tmp_path / "checkpoints" / "global_step9").mkdir(parents=True)
    code, said, starts = run(tmp_path, "fail,finish", arguments=("overwrite_output_dir=true",))
    assert (code, len(starts)) == (3, 1) and "before it had deleted what the run before it has left" in said


def test_the_end_of_an_old_run_is_not_that_of_one_that_was_to_replace_it(tmp_path: Path) -> None:
    (tmp_path / "completed.json").write_text("{}")
    code, said, starts = run(tmp_path, "fail,finish", arguments=("overwrite_output_dir=true",))
    assert (code, len(starts)) == (3, 1) and "before it had deleted what the run before it has left" in said


@pytest.mark.parametrize("word", ["evaluate_only=true", "plan=true", "proof=true"])
def test_what_does_not_train_is_run_once_and_continues_nothing(word: str) -> None:
    trainer = ["deepspeed", str(SCRIPT.parents[1] / "trainer_base_ds_mp.py"), "-cn", "llama_tiny_pp2"]
    assert trains(trainer) and trains(["python", "mine.py"]) and not trains([*trainer, word])


def test_a_folder_other_than_the_commands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "out").mkdir()
    trainer = ["deepspeed", str(SCRIPT.parents[1] / "trainer_base_ds_mp.py")]
    assert find_output_dir([*trainer, "-cn", "llama_tiny_pp2", "seed=1"]) == Path("outputs/demo")
    assert find_output_dir([*trainer, "-cn", "llama_tiny_pp2", "sed=1"]) is None  # the run says what is wrong
    out = tmp_path / "out"
    assert run(out, "finish", arguments=(f"output_dir={tmp_path}/link",))[0] == 0
    refused = subprocess.run(
        command(out, "finish", arguments=(f"output_dir={tmp_path}/other",)), capture_output=True, text=True
    )
    assert refused.returncode == 2 and f"is not the command's output_dir, {tmp_path}/other" in refused.stderr
    assert len((out / "starts.jsonl").read_text().splitlines()) == 1


def test_the_number_of_starts_is_bounded_and_an_old_record_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "completed.json").write_text("{}")
    code, said, starts = run(tmp_path, "fail", "--max_restarts", "2")
    assert code == 3 and len(starts) == 3 and "has not finished after 3 starts" in said


def test_the_record_of_a_start_is_repeated(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path, "explain,fail,explain", "--max_restarts", "2")
    assert code == 74
    assert "the run ended with code 74 (disk, rank 1: no room) before it had finished; start 2 of 3: " in said
    assert "the run ended with code 3 before it had finished; start 3 of 3: " in said  # which has left none
    assert "has not finished after 3 starts, the last with code 74 (disk, rank 1: no room); " in said


def test_what_a_launcher_leaves_behind_is_ended(tmp_path: Path) -> None:
    code, _, starts = run(tmp_path, "orphan,finish")
    assert code == 0 and len(starts) == 2
    state = Path("/proc", (tmp_path / "orphan").read_text(), "stat")
    assert not state.exists() or " Z " in state.read_text()  # a zombie if its parent has not waited for it


def test_a_stuck_run_is_ended_and_started_again(tmp_path: Path) -> None:
    code, said, starts = run(tmp_path, "hang,finish", "--stuck_minutes", "0.02")
    assert code == 0 and len(starts) == 2 and "has changed for 0.02 minutes: ending the run" in said


def test_the_clock_of_the_file_system_need_not_be_right(tmp_path: Path) -> None:
    """A run counts as stuck when nothing changes, whatever the times of its files."""
    code, said, starts = run(tmp_path, "ahead,work", "--stuck_minutes", "0.1")
    assert code == 0 and len(starts) == 2 and said.count("has changed for 0.1 minutes: ending the run") == 1


def test_progress_that_writes_elsewhere_is_seen_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of tokenizing, into a cache."""
    from training.distributed.process import touching

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a supervisor handles signals
    log = tmp_path / "logs" / "rank_0.log"
    log.parent.mkdir()
    log.touch()
    os.utime(log, (0, 0))
    supervisor = Supervisor(tmp_path, stuck_seconds=1)
    before = supervisor._look()
    with touching(log):
        assert supervisor._look() == before
        report_progress()
        assert supervisor._look() != before


def test_a_signal_is_passed_on_and_nothing_started_again(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "wait"))
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("own", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_signal_goes_to_the_ranks_and_not_to_their_launcher(tmp_path: Path, own: dict[str, str]) -> None:
    """Also in a container whose every process has RANK."""
    process = subprocess.Popen(command(tmp_path, "launch"), env={**os.environ, **own})
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143 and not (tmp_path / "killed").exists()


def test_a_supervisor_that_is_started_again_continues_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "global_step1").mkdir(parents=True)  # without `latest`, as after a copy
    assert run(tmp_path, "confirm", arguments=("x=1",)) == (0, "", [["x=1", KEPT, "resume=auto"]])
    for given in ("resume=elsewhere", "overwrite_output_dir=true", "++overwrite_output_dir=y"):
        assert build_start(["run", given], tmp_path) == ["run", given]


def test_a_finished_run_without_checkpoints_is_left_to_the_run_itself(tmp_path: Path) -> None:
    assert build_start(["run"], tmp_path) == ["run"]
    RunFolder(tmp_path).write_completed({"step": 4})
    assert build_start(["run"], tmp_path) == ["run", KEPT, "resume=auto"]


@pytest.mark.parametrize("where", ["other/global_step2", "out/checkpoints/global_step2"])
def test_a_named_checkpoint_is_the_start_until_the_run_has_started_from_it(tmp_path: Path, where: str) -> None:
    """Before that, `latest` may be of the steps that the run is to leave; afterwards it is of its own."""
    out, start = tmp_path / "out", tmp_path / where
    (out / "checkpoints" / "global_step9").mkdir(parents=True)
    command = ["run", f"resume={start}", "x=1"]
    assert build_start(command, out) == command and build_restart(command, out) == [*command, KEPT]
    RunFolder(out).write_started({"resume": str(start), "stop_after_steps": None, "last_step": 9})
    assert build_start(command, out) == build_restart(command, out) == [*command, KEPT, "resume=auto"]
    other = ["run", f"resume={tmp_path}/another"]
    assert build_start(other, out) == other


def test_a_screen_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    """Neither a reader that goes away nor a stderr that is closed from the start."""
    for place, redirection in (("gone", "2> >(true)"), ("closed", "2>&-")):
        out = tmp_path / place
        out.mkdir()
        words = shlex.join(command(out, "fail,fail,finish"))
        ended = subprocess.run(["bash", "-c", f"{words} {redirection}"], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (0, "")
        assert len((out / "starts.jsonl").read_text().splitlines()) == 3


def test_what_a_config_says_of_its_start_counts_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "global_step1").mkdir(parents=True)
    for key in ("overwrite_output_dir: true", "resume: elsewhere"):
        (tmp_path / "mine.yaml").write_text(f"defaults: [base, _self_]\noutput_dir: {tmp_path}\n{key}\n")
        trainer = str(SCRIPT.parents[1] / "trainer_base_ds_mp.py")
        command = ["python", trainer, "--config-dir", str(tmp_path), "-cn", "mine"]
        assert build_start(command, tmp_path) == command
        compose_command.cache_clear()
        again = compose_command(tuple(build_restart(command, tmp_path)))
        expected = "auto" if key.startswith("overwrite") else "elsewhere"  # which the run has not started from yet
        assert again is not None and (again.overwrite_output_dir, again.resume) == (False, expected)
        compose_command.cache_clear()


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--output_dir", str(tmp_path), "--", "no-such-launcher", "x=1"]
    (tmp_path / "empty").touch(mode=0o755)
    words[-2:] = [str(tmp_path / "empty")]
    assert "cannot be started: Exec format error; give" in subprocess.run(words, capture_output=True, text=True).stderr
    assert (
        "--max_restarts -1: at least 0"
        in subprocess.run([*words[:-2], "--max_restarts", "-1", *words[-2:]], capture_output=True, text=True).stderr
    )
    words[-1:] = ["no-such-launcher", "x=1"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 127
    assert ended.stderr.splitlines() == [
        "supervise: no-such-launcher cannot be started: No such file or directory; give a command that is on PATH, or "
        "its path"
    ]


def test_the_last_value_of_a_key_is_the_restarts(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "global_step1").mkdir(parents=True)
    command = ["run", "resume=latest", "x=1"]
    assert build_restart(command, tmp_path) == [*command, KEPT, "resume=auto"]
