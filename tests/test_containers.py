"""docs/containers.md and the Dockerfile: what they start is a command that would run, and nothing runs as root."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes import find_mistakes
from test_docs import BLOCKS, ROOT, Reader
from test_scripts import list_calls

PAGE = ROOT / "docs" / "containers.md"
FILES = {block.words["writes"]: yaml.safe_load(block.body) for block in BLOCKS[PAGE] if "writes" in block.words}
ENTRY = ["python", "scripts/supervise.py"]


def read_dockerfile() -> list[tuple[str, str]]:
    """Returns (instruction, arguments) of the Dockerfile, in order."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [tuple(line.split(maxsplit=1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def list_commands(name: str) -> Iterator[tuple[list[str], str]]:
    """Yields (words, output_dir of the run) that a file of the page starts."""
    content = FILES[name]
    if name == "sky.yaml":
        text = content["run"].replace("\\\n", " ")
        yield shlex.split(next(line for line in text.splitlines() if line.startswith("python"))), "/shared/llama_65b"
        return
    job = content if name == "job.yaml" else content["spec"]["replicatedJobs"][0]["template"]
    for container in job["spec"]["template"]["spec"]["containers"]:
        output_dir = container["args"][0].removeprefix("--output_dir=")
        yield [*ENTRY, *container["args"]], output_dir


def test_the_image_is_pinned_keeps_no_caches_and_does_not_run_as_root() -> None:
    lines = read_dockerfile()
    given = dict(lines)
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-\S+", given["FROM"])
    assert json.loads(given["ENTRYPOINT"]) == ENTRY and (ROOT / ENTRY[1]).is_file()
    names = [name for name, _ in lines]
    assert names.index("USER") < names.index("ENTRYPOINT") and given["USER"] not in ("0", "root")
    runs = [arguments for name, arguments in lines if name == "RUN"]
    assert all("rm -rf /var/lib/apt/lists" in run for run in runs if "apt-get" in run)
    environment = " ".join(arguments for name, arguments in lines if name == "ENV")
    assert "PIP_NO_CACHE_DIR=1" in environment and f"useradd --uid {given['USER']}" in runs[-1]
    torch = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))
    assert given["ARG"] == f'TORCH="{torch}"'
    sources = [word for name, words in lines if name == "COPY" for word in words.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml", "sky.yaml"])
def test_what_a_file_starts_composes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, output_dir in list_commands(name):
        reader = Reader(tmp_path, monkeypatch)
        reader.take(command, checks_files=False)
        assert reader.made == {"outputs/demo", output_dir} | ({output_dir} if "--output_dir" in command else set())


def test_pods_may_write_and_are_not_root_and_have_time_to_save() -> None:
    for name in ("job.yaml", "jobset.yaml"):
        job = FILES[name] if name == "job.yaml" else FILES[name]["spec"]["replicatedJobs"][0]["template"]
        pod = job["spec"]["template"]["spec"]
        user = dict(read_dockerfile())["USER"]
        assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(user)}
        assert pod["terminationGracePeriodSeconds"] > 60  # grace_seconds
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} and "command" not in container


def test_hosts_of_a_jobset_find_the_first() -> None:
    spec, name = FILES["jobset.yaml"]["spec"], FILES["jobset.yaml"]["metadata"]["name"]
    (job,) = spec["replicatedJobs"]
    (arguments,) = (container["args"] for container in job["template"]["spec"]["template"]["spec"]["containers"])
    assert f"--master_addr={name}-{job['name']}-0-0.{name}" in arguments
    assert f"--nnodes={job['template']['spec']['completions']}" in arguments
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_a_job_is_one_of_the_published_schema(name: str) -> None:
    """A JobSet's own fields are not in it; those of its Job are."""
    job: dict[str, Any] = FILES[name]
    if name == "jobset.yaml":
        template = job["spec"]["replicatedJobs"][0]["template"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job") and find_mistakes(job) == []


def test_the_schema_finds_what_is_wrong() -> None:
    job = copy.deepcopy(FILES["job.yaml"])
    job["kind"], job["spec"]["backoffLimits"], job["spec"]["backoffLimit"] = "Jobs", 3, "3"
    pod = job["spec"]["template"]["spec"]
    pod["securityContext"]["runAsNonRoot"], pod["restartPolicy"] = "true", None
    del pod["containers"][0]["name"]
    assert find_mistakes(job) == [
        "job.kind is none of ['Job']",
        "job.spec.backoffLimit is not ['integer', 'null']",
        "job.spec.template.spec.securityContext.runAsNonRoot is not ['boolean', 'null']",
        "job.spec.template.spec.containers[0] lacks name",
        "job.spec has no backoffLimits",
    ]


def test_slurm_starts_the_command_in_the_container(tmp_path: Path) -> None:
    (call,) = list_calls(
        tmp_path, "slurm.sh", "srun", "scontrol", words=["-cn", "x"], SLURM_JOB_NODELIST="node-1",
        SLURM_SUBMIT_DIR=str(tmp_path), IN_CONTAINER="apptainer exec --nv image.sif",
    )[1:]  # fmt: skip
    assert call.endswith("--label apptainer exec --nv image.sif python trainer_base_ds_mp.py -cn x")
