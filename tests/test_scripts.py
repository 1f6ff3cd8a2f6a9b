"""The commands that the shell scripts start, recorded by stub programs of the same names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from training.checkpoint.run_folder import RunFolder
from training.entry import continue_requeued

ROOT = Path(__file__).resolve().parents[1]
STUB = """#!/bin/bash
[[ $1 == -c ]] && { echo "$GPUS"; exit; }
echo "${DS_ACCELERATOR:-} ${0##*/} $*" >> "$CALLS"
"""


def list_calls(folder: Path, script: str, *programs: str, words: Sequence[str] = (), **variables: str) -> list[str]:
    """DS_ACCELERATOR, program and arguments of each call."""
    for program in programs:
        (folder / program).write_text(STUB)
        (folder / program).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), **variables}
    subprocess.run(["bash", str(ROOT / "scripts" / script), *words], env=environment, check=True, capture_output=True)
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("gpus", "variables", "accelerator"),
    [
        ("0", {}, ""),
        ("1", {}, "cpu"),
        ("2", {}, ""),
        ("8", {}, ""),
        ("2", {"DS_ACCELERATOR": "cpu"}, "cpu"),
        ("1", {"DS_ACCELERATOR": "cuda"}, "cuda"),
    ],
)
def test_the_demo_takes_the_gpus_of_a_machine_that_has_two(
    gpus: str, variables: dict[str, str], accelerator: str, tmp_path: Path
) -> None:
    calls = list_calls(tmp_path, "quickstart.sh", "python", "deepspeed", GPUS=gpus, **variables)
    assert len(calls) == 5 and {call.partition(" ")[0] for call in calls} == {accelerator}
    assert calls[2].startswith(f"{accelerator} deepspeed --quiet --num_gpus 2 trainer_base_ds_mp.py -cn llama_tiny_pp2")


@pytest.mark.parametrize(
    ("restarts", "started", "continues"),
    [
        ("", {"has_begun": True, "job": "7"}, False),
        ("0", {"has_begun": True, "job": "7"}, False),
        ("1", {"has_begun": True, "job": "7"}, True),
        ("2", {"has_begun": True, "job": "6"}, False),
        ("1", {"has_begun": False, "resume": "/elsewhere/global_step3"}, False),
        ("1", None, False),
    ],
)
def test_a_job_that_slurm_has_put_back_continues_what_it_has_begun(
    restarts: str, started: dict[str, Any] | None, continues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted before that, its folder still has another run, or none: its command counts as it is."""
    if started is not None:
        RunFolder(tmp_path).write_started({"resume": None, "stop_after_steps": None, "last_step": 9} | started)
    monkeypatch.setattr(os, "environ", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts})
    added = continue_requeued(OmegaConf.create({"output_dir": str(tmp_path)}))
    assert added == (["overwrite_output_dir=false", "resume=auto"] if continues else [])
    assert continue_requeued(None) == []
    for key in ("evaluate_only", "plan", "inspect_data"):
        assert continue_requeued(OmegaConf.create({"output_dir": str(tmp_path), key: True})) == []


def test_a_job_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        list_calls(
            tmp_path, "slurm.sh", "srun", "scontrol", words=["-cn", "x"], SLURM_GPUS_ON_NODE="0",
            SLURM_JOB_NODELIST="node-1", SLURM_SUBMIT_DIR=str(tmp_path),
        )  # fmt: skip
    assert (ended.value.returncode, ended.value.stderr.decode()) == (
        1, "error: SLURM_GPUS_ON_NODE=0: the job has no GPUs on this host; give --gpus-per-node=N to sbatch\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "cpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "SLURM_CPUS_PER_TASK": "12"}, 12),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "30", "SLURM_CPUS_PER_GPU": "7"}, 7),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "1"}, 1),
    ],
)
def test_slurm_divides_the_cores_of_the_job(variables: dict[str, str], cpus: int, tmp_path: Path) -> None:
    (call,) = list_calls(
        tmp_path, "slurm.sh", "srun", "scontrol", SLURM_JOB_NODELIST="node-[1-2]", SLURM_SUBMIT_DIR=str(tmp_path),
        **variables,
    )[1:]  # fmt: skip
    gpus = variables["SLURM_GPUS_ON_NODE"]
    assert call.split()[:4] == [
        "srun",
        f"--ntasks-per-node={gpus}",
        f"--gpus-per-node={gpus}",
        f"--cpus-per-task={cpus}",
    ]
