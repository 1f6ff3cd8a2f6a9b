"""scripts/supervise.py --elastic: a run continues, with the same global batch, on the remaining hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launching import ROOT, Ended, Launch, run, run_deepspeed
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import free_port

from errors import UserError
from extensions.elastic.starter import Elastic, read_hosts
from scripts.supervise import say

SUPERVISE = str(ROOT / "scripts" / "supervise.py")


def list_arguments(root: Path, out: Path) -> list[str]:
    return [
        *("-cn", "llama_tiny_pp2", f"model_name_or_path={root}/hf", f"train_file={root}/train.jsonl", "eval_file=null"),
        *(f"output_dir={out}", f"data.cache_dir={root}/cache", "precision=fp32", "max_steps=12", "logging_steps=1"),
        *("eval_on_start=false", "eval_steps=null", "save_steps=2", "num_stages=2", "stuck_minutes=0.5"),
        *("micro_batch_size=2", "global_batch_size=null", "data.packing=false", "max_seq_length=256"),
        *("optimizer=sgd", "learning_rate=0.05"),  # Adam would divide the rounding of another layout by itself
    ]


def read_losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 13))
    return [record["loss"] for record in records]


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_run_that_loses_a_rank_goes_on_without_it(tmp_path: Path, num_ranks: int) -> None:
    """The global batch follows from the ranks of the first start, and stays."""
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    save_records(tmp_path / "train.jsonl", 80)
    accumulated = f"gradient_accumulation_steps={8 // num_ranks}"
    assert run_deepspeed([*list_arguments(tmp_path, tmp_path / "whole"), accumulated], tmp_path, num_ranks).code == 0

    hosts, out = tmp_path / "hosts", tmp_path / "out"
    lines = [f"host-{number} slots=1\n" for number in range(num_ranks)]
    hosts.write_text("".join(lines))

    def lose_a_host(launch: Launch) -> None:
        while not (out / "checkpoints" / "latest").is_file():
            assert launch.process.poll() is None, launch.log.read_text()
            time.sleep(0.02)
        hosts.write_text("".join(lines[:-1]))
        os.kill(launch.rank(num_ranks - 1), signal.SIGKILL)

    ended = supervise(
        [
            *("deepspeed", "--num_gpus", "{num_ranks}", "--master_port", str(free_port())),
            *(str(ROOT / "trainer_base_ds_mp.py"), *list_arguments(tmp_path, out), accumulated),
        ],
        f"cat {hosts}",
        out,
        lose_a_host,
    )
    assert ended.code == 0, ended.output
    (said,) = (line for line in ended.output.splitlines() if "slots left" in line)
    assert f"slots left: {num_ranks - 1} of {num_ranks} (host-0" in said
    state = json.loads(next((out / "checkpoints").glob("global_step12/trainer_state.json")).read_text())
    size, whole = (
        state["global_batch_size"],
        json.loads((tmp_path / "whole" / "checkpoints" / "global_step12" / "trainer_state.json").read_text()),
    )
    assert size == whole["global_batch_size"] and state["num_stages"] * state["dp_size"] < num_ranks
    assert read_losses(out) == pytest.approx(read_losses(tmp_path / "whole"), rel=1e-5)
    assert len((out / "hostfile").read_text().splitlines()) == state["num_stages"] * state["dp_size"]


def supervise(command: list[str], hosts_command: str, out: Path, while_running: object = None) -> Ended:
    script = [sys.executable, SUPERVISE, "--output_dir", str(out)]
    return run([*script, "--elastic", "--hosts_command", hosts_command, "--", *command], out.parent, while_running)


def test_hosts_are_what_the_command_prints() -> None:
    assert read_hosts("printf '# all\\na slots=2\\n  b slots=1\\nc slots=0\\n'") == {"a": 2, "b": 1}
    for command in ("true", "echo a slots=2; exit 3"):
        with pytest.raises(UserError, match="prints a line 'NAME slots=N' for each host that is left"):
            read_hosts(command)


PLAN = """
import sys
ranks = int(next(word for word in sys.argv if word.startswith("world_size=")).partition("=")[2])
if ranks == 3 or ranks < FEWEST:
    sys.exit("error: nothing fits")
if "resume=null" in sys.argv:
    sys.exit("error: resume_allow_changes=true: this run does not read it, only one with resume does")
given = "global_batch_size=16" in sys.argv
print(f"use: num_stages={ranks} global_batch_size={16 if given else 4 * ranks}")
"""


@pytest.mark.parametrize("fewest", [1, 3])
def test_the_largest_layout_that_fits_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture, fewest: int) -> None:
    """Two of three ranks are used; the batch stays that of the first start's four, though it follows from the ranks."""
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(PLAN.replace("FEWEST", str(fewest)))
    elastic = Elastic(f"cat {hosts}", tmp_path / "out", say)
    command = ["launch", "--hostfile", "{hostfile}", "-n", "{num_ranks}", str(script), "num_stages=4", "resume=latest"]
    hosts.write_text("a slots=2\nb slots=2\n")
    file = str(tmp_path / "out" / "hostfile")
    assert elastic.fit(command) == ["launch", "--hostfile", file, "-n", "4", *command[5:]]
    hosts.write_text("a slots=1\nb slots=2\n")
    if fewest == 3:
        with pytest.raises(UserError, match="no layout fits the slots that are left, 3 of 4: error: nothing fits"):
            elastic.fit(command)
        return
    fitted = elastic.fit(command)
    assert (
        fitted[:5] == ["launch", "--hostfile", file, "-n", "2"] and Path(file).read_text() == "a slots=1\nb slots=1\n"
    )
    batch = ["global_batch_size=16", "micro_batch_size=1", "gradient_accumulation_steps=null"]
    assert fitted[5:] == [str(script), "resume=latest", *batch, "num_stages=2"]
    assert f"slots left: 3 of 4 (a, b); used: 2, with {' '.join(batch)} num_stages=2" in capsys.readouterr().err
    # Started again itself, on as many hosts as there are then: the run's first start is still that of four
    assert Elastic(f"cat {hosts}", tmp_path / "out", say).fit(command) == fitted
    anew = [*command[:-1], "overwrite_output_dir=true"]
    assert Elastic(f"cat {hosts}", tmp_path / "out", say).fit(anew)[4:] == ["3", *anew[5:]]


def test_the_slots_of_the_first_start_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    elastic = Elastic("echo a slots=2", tmp_path, say)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            elastic.fit(["python", "run.py"])
    assert not (tmp_path / "first_slots").exists()
    (tmp_path / "first_slots").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}/first_slots does not hold the number of slots"):
        elastic.fit(["python", "run.py", "resume=latest"])


@pytest.mark.parametrize("ending", ["echo localhost slots=1", "exit 1"])  # Ctrl-C ends the command too
def test_a_signal_before_the_start_starts_nothing(tmp_path: Path, ending: str) -> None:
    """A layout is searched first, for minutes; no process is there yet to pass the signal to."""
    hosts = f"touch {tmp_path}/asked; sleep 0.5; {ending}"
    options = ["--output_dir", str(tmp_path), "--elastic", "--hosts_command", hosts]
    process = subprocess.Popen([sys.executable, SUPERVISE, *options, "--", "touch", str(tmp_path / "started")])
    while not (tmp_path / "asked").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--elastic"],
            "--elastic and --hosts_command go together: the hosts that are left are what",
        ),
        (
            ["--elastic", "--hosts_command", "exit 3"],
            "supervise: cannot start on the hosts that are left: --hosts",
        ),
    ],
)
def test_what_cannot_start_is_said(tmp_path: Path, options: list[str], message: str) -> None:
    command = ["--output_dir", str(tmp_path), *options, "--", "touch", str(tmp_path / "started")]
    ended = subprocess.run([sys.executable, SUPERVISE, *command], capture_output=True, text=True)
    assert ended.returncode and message in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "started").exists()
