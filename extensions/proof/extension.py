"""`proof=true`, which compares loss and gradients of a run's own layout with those of plain transformers."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    actions={"proof": "extensions.proof.run:prove"},
    facts="extensions.proof.recorded:find_certificate",
    commands={"trainer_base_ds_mp.py -cn NAME proof=true": "gradients of this layout, proven"},
    refusals="extensions.proof.refusals:ROWS",
)
