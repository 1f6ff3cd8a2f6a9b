"""`inspect_data=true`, which shows what a model would be trained on."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    actions={"inspect_data": "extensions.inspection.run:inspect_data"},
    commands={"trainer_base_ds_mp.py -cn NAME inspect_data=true": "what the model will see of the data"},
    refusals="extensions.inspection.refusals:ROWS",
)
