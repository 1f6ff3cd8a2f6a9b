"""`--multirun`, which starts one run for each combination of values."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    commands={"python trainer_base_ds_mp.py --multirun num_gpus=N -cn NAME key=a,b": "several runs"},
    flags={"--multirun": "extensions.sweep.sweep:run"},
    aliases={"training.cli.sweep": "extensions.sweep.sweep"},
)
