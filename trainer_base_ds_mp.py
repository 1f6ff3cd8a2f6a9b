"""The training command.

    deepspeed --num_gpus 2 trainer_base_ds_mp.py -cn llama_tiny_pp2 [key=value ...]

Hydra composes `conf/`, every mistake that can be found early is reported at once, and `training/run.py` does the rest.
"""

from __future__ import annotations

import gc
import os
import sys
import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from interpreter import check_interpreter
from training.cli.command_line import (
    asks_for_completion,
    asks_for_sweep,
    check_command_line,
    clean_arguments,
    list_given,
)
from training.cli.help import render_help
from training.cli.sweep import build_launch, plan_sweep, run_sweep
from training.config.schema import register_schema
from training.distributed.host_share import set_allocator_defaults
from training.distributed.launcher import end_with_launcher
from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error, read_ranks
from training.engine.deepspeed_internals import check_internals
from training.pipeline.schedules import find_schedule

CONFIG_DIR = Path(__file__).resolve().parent / "conf"
DEFAULT_CONFIG = "base"


@hydra.main(config_path=str(CONFIG_DIR), config_name=DEFAULT_CONFIG, version_base="1.3")
def run_composed(config: DictConfig) -> None:
    if config.plan is not False:
        # a plan takes seconds, most of them imports, and garbage collection would take a sixth of them
        gc.disable()
        with SINGLE_PROCESS.phase("importing torch and transformers"), quiet_imports():
            from training.planner.run import run_plan  # without the engine

        run_plan(config, list_given(sys.argv[1:]))
        gc.freeze()  # nor at its end: no collection either
        return
    import_run()(config, list_given(sys.argv[1:]))


def import_run() -> Callable[[DictConfig, Collection[str]], None]:
    """Imports `run`, and with it torch and DeepSpeed; not at the top, since `--help` and a mistyped key need neither.

    If a name that they need at import is missing, the run ends with the line that names it.
    """
    gc.disable()  # imports leave no garbage, and searching them takes two of six seconds, one at the end
    ranks = read_ranks()
    with quiet_imports():
        try:
            with ranks.phase("importing torch, transformers and DeepSpeed"):
                from training.run import run
        except (ImportError, AttributeError):
            with exit_on_user_error(ranks, reports=ranks.is_main):
                check_internals()
            raise
        finally:
            gc.freeze()
            gc.enable()
    return run


@contextmanager
def quiet_imports() -> Iterator[None]:
    """DeepSpeed reports its accelerator when it is imported, and keeps the stream; what packages warn of each other is
    for their developers."""
    with redirect_stdout(open(os.devnull, "w")), warnings.catch_warnings(action="ignore"):
        yield


def main() -> None:
    sys.argv = clean_arguments(sys.argv)
    if "--version" in sys.argv[1:]:
        print(find_version())
        return
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    set_allocator_defaults()
    with exit_on_user_error(SINGLE_PROCESS, reports=os.environ.get("RANK", "0") == "0"):
        check_interpreter()
        check_internals(package="hydra-core")
    if "RANK" not in os.environ and asks_for_sweep(sys.argv[1:]):
        sys.exit(sweep())
    ranks = read_ranks()
    end_with_launcher(ranks)
    if not ranks.is_main:
        sys.stdout = open(os.devnull, "w")  # one copy of --help and --cfg job is enough
    register_schema()
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(render_help())
        return
    if asks_for_completion(sys.argv[1:]):
        run_composed()  # Hydra prints, and runs nothing
        return
    with exit_on_user_error(ranks, reports=ranks.is_main):
        check_command_line(sys.argv[1:], CONFIG_DIR, DEFAULT_CONFIG, check_names)
    run_composed()


def find_version() -> str:
    """Returns the version of the project: that of the clone, or of the installed package."""
    project = Path(__file__).resolve().parent / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return version("llm-pipeline")


def check_names(composed: DictConfig) -> None:
    """Raises UserError for a key whose value has to be a name in a table and is not."""
    name = OmegaConf.select(composed, "schedule", throw_on_resolution_failure=False)
    if name is not None:
        find_schedule(name)


def sweep() -> int:
    register_schema()
    with exit_on_user_error(SINGLE_PROCESS):
        jobs, num_gpus = plan_sweep(sys.argv[1:], CONFIG_DIR, DEFAULT_CONFIG, check_names)
    return run_sweep(jobs, num_gpus, build_launch(Path(__file__).resolve(), num_gpus, jobs[0].output_dir.parent.name))


if __name__ == "__main__":
    main()
