"""The training command around Hydra: what it answers itself, when it imports torch, and who prints.

Nothing here imports torch at its top: `--help` and a mistyped key need neither torch nor DeepSpeed.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from extension import load_extensions, load_part
from interpreter import check_interpreter
from training.checkpoint.run_folder import RunFolder
from training.cli.command_line import asks_for_completion, check_command_line, clean_arguments, find_flag
from training.cli.help import render_help
from training.config.schema import find_output_dir, is_training, register_schema
from training.distributed.host_share import set_allocator_defaults
from training.distributed.launcher import end_with_launcher
from training.distributed.meeting import tell_other_hosts
from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error, read_ranks
from training.engine.deepspeed_internals import check_internals
from training.pipeline.schedules import find_schedule

Work = Callable[[DictConfig, Collection[str]], None]
"""Takes a composed config, and the keys that the command line gives and the groups that it chooses."""


def prepare(script: Path, config_name: str) -> bool:
    """Return whether Hydra has to compose a config: this process, its environment and the command line are ready for
    it. Otherwise the command has answered, as `--help` and `--version` ask it to. What an extension runs in its place
    (`Extension.flags`) ends the process.

    script: the entry point, next to `conf/`. config_name: of the config without `-cn`.
    """
    sys.argv = clean_arguments(sys.argv)
    if "--version" in sys.argv[1:]:
        print(find_version(script))
        return False
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    set_allocator_defaults()
    # Hosts may differ in what is found up to here, so the first rank of each reports
    with exit_on_user_error(SINGLE_PROCESS, reports=os.environ.get("LOCAL_RANK", "0") == "0"):
        check_interpreter()
        check_internals(package="hydra-core")
        load_extensions()
        register_schema()
        if place := find_flag(sys.argv[1:]):
            sys.exit(load_part(place)(script, sys.argv[1:], config_name))
    with exit_on_user_error(SINGLE_PROCESS, reports=os.environ.get("SLURM_PROCID", "0") == "0"):
        ranks = read_ranks()
    end_with_launcher(ranks)
    tell_other_hosts(ranks)
    if not ranks.is_main:
        sys.stdout = open(os.devnull, "w")  # one copy of --help and --cfg job is enough
    if {"--help", "-h"} & set(sys.argv[1:]):
        with exit_on_user_error(ranks):
            print(render_help(), flush=True)
        return False
    if not asks_for_completion(sys.argv[1:]):  # for that Hydra prints, and runs nothing
        with exit_on_user_error(ranks, reports=ranks.local_rank == 0):
            composed = check_command_line(sys.argv[1:], script.parent / "conf", config_name, check_names)
            sys.argv += continue_requeued(composed)
    return True


def continue_requeued(composed: DictConfig | None) -> list[str]:
    """Return what a job that Slurm has put back in the queue adds to its command: it continues what it has begun to
    train, and nothing that was in the folder before. composed: the command's config; None where it is not known."""
    job, count = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT") or "0"
    if composed is None or not is_training(composed) or job is None or count == "0":
        return []
    output_dir = find_output_dir(composed)
    started = {} if output_dir is None else RunFolder(output_dir).read_started()
    has_begun = started.get("has_begun") and started.get("job") == job
    return ["overwrite_output_dir=false", "resume=auto"] if has_begun else []


def import_work(is_plan: bool) -> Work:
    """Import what the command does, and with it torch, and for a run DeepSpeed.

    If a name that they need at import is missing, the process ends with the line that names it.
    """
    ranks = SINGLE_PROCESS if is_plan else read_ranks()
    packages = "torch and transformers" if is_plan else "torch, transformers and DeepSpeed"
    gc.disable()  # imports leave no garbage, and searching them takes two of six seconds, one at the end
    try:
        with quiet_imports(), ranks.phase(f"importing {packages}"):
            if is_plan:
                from training.plan_command.run import run_plan  # without the engine

                atexit.register(gc.freeze)  # garbage collection would take a sixth of a plan's seconds
                return run_plan
            from training.run import run
    except (ImportError, AttributeError):
        with exit_on_user_error(ranks, reports=ranks.local_rank == 0):
            check_internals()
        raise
    gc.freeze()
    gc.enable()
    return run


@contextmanager
def quiet_imports() -> Iterator[None]:
    """DeepSpeed reports its accelerator when it is imported, and keeps the stream; what packages warn of each other is
    for their developers."""
    with redirect_stdout(open(os.devnull, "w")), warnings.catch_warnings(action="ignore"):
        yield


def find_version(script: Path) -> str:
    """Return the version of the project."""
    return str(tomllib.loads((script.parent / "pyproject.toml").read_text())["project"]["version"])


def check_names(composed: DictConfig) -> None:
    """Raise UserError for a key whose value has to be a name in a table and is not."""
    name = OmegaConf.select(composed, "schedule", throw_on_resolution_failure=False)
    if name is not None:
        find_schedule(name)
