"""The suite does not depend on the shell that it is started from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.environment import clean, hostile_environment
from support.workers import GPU_WATCH, WorkerGroup

PRINT = """
import json, locale, os, sys
import conftest
print(json.dumps([dict(os.environ), os.umask(0), locale.getpreferredencoding(False), "torch" in sys.modules]))
"""


@pytest.mark.parametrize("chosen", [{}, {"DS_ACCELERATOR": ""}, {"DS_ACCELERATOR": "cpu"}])
def test_the_tests_run_on_the_cpu_of_a_machine_with_gpus(chosen: dict[str, str]) -> None:
    cleaned = clean({"CUDA_VISIBLE_DEVICES": "0,1", **chosen})
    assert (cleaned["DS_ACCELERATOR"], cleaned["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")


@pytest.mark.parametrize("gpus", [{}, {"CUDA_VISIBLE_DEVICES": "1"}])
def test_who_asks_for_the_gpus_gets_them(gpus: dict[str, str]) -> None:
    cleaned = clean({"DS_ACCELERATOR": "cuda", **gpus})
    assert cleaned == {"DS_ACCELERATOR": "cuda", **gpus, "LC_ALL": "C.UTF-8"}


def find_inherited() -> tuple[bool, list[str], bool]:
    import torch
    from deepspeed.accelerator import get_accelerator

    gpu_watch = sys.modules[GPU_WATCH]  # the forkserver's
    inherited = [name for process_id, name in gpu_watch.calls if process_id == gpu_watch.process_id]
    return torch.cuda.is_initialized(), inherited, get_accelerator().device_name() == os.environ["DS_ACCELERATOR"]


def test_workers_are_forked_from_a_process_that_has_not_started_cuda(workers: Callable[[int], WorkerGroup]) -> None:
    assert workers(1).run(find_inherited) == [(False, [], True)]


def test_what_a_shell_has_set_does_not_reach_a_test(tmp_path: Path) -> None:
    hostile = hostile_environment(tmp_path)
    started = os.umask(0o077)
    try:
        printed = subprocess.check_output(
            [sys.executable, "-c", PRINT],
            env={"PATH": os.environ["PATH"], **hostile},
            cwd=Path(__file__).parent,
            text=True,
        )
    finally:
        os.umask(started)
    environ, umask, encoding, imported = json.loads(printed)
    assert Path(environ.pop("HOME")).is_dir()
    expected = {"LC_ALL": "C.UTF-8", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert environ == {"PATH": os.environ["PATH"], **expected}
    assert umask == 0o022 and encoding.upper() == "UTF-8" and not imported
