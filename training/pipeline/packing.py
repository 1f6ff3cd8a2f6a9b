"""Whether a run may pack rows."""

from __future__ import annotations

from transformers import PretrainedConfig

from data.encoders.kinds import find_kind
from data.options import Packing
from models.architecture.lookup import check_packing
from training.config.schema import RunConfig


def check_run_packing(config: RunConfig, architecture: PretrainedConfig) -> None:
    """Raises UserError where rows may hold several documents, which a user's collator may lay out too, and the model
    cannot keep them apart."""
    packing = find_kind(config.data.name).choose_packing(config.data.packing)
    if packing is not Packing.NONE or config.data.collator is not None:
        check_packing(architecture)
