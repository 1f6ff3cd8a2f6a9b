"""The training command.

    deepspeed --num_gpus 2 trainer_base_ds_mp.py -cn llama_tiny_pp2 [key=value ...]

Hydra composes `conf/`, every mistake that can be found early is reported at once, and `training/run.py` does the rest;
with `plan=true`, `training/plan_command/run.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from training.cli.command_line import list_given
from training.entry import import_work, prepare

SCRIPT = Path(__file__).resolve()
CONFIG_NAME = "base"


@hydra.main(config_path=str(SCRIPT.parent / "conf"), config_name=CONFIG_NAME, version_base="1.3")
def main(config: DictConfig) -> None:
    work = import_work(is_plan=config.plan is not False)
    work(config, list_given(sys.argv[1:]))


if __name__ == "__main__" and prepare(SCRIPT, CONFIG_NAME):
    main()
