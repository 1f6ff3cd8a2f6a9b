"""Classes: of documents, of words, and of the steps of an answer."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    keys={
        "classification": "extensions.classification.keys:ClassificationConfig",
        "data": "extensions.classification.keys:LabelKeys",
    },
    refusals="extensions.classification.refusals:ROWS",
    data_kinds="extensions.classification.kinds:KINDS",
    objectives="extensions.classification.objectives:OBJECTIVES",
    heads="extensions.classification.token_head:HEADS",
    aliases={
        "data.encoders.classification": "extensions.classification.encoders",
        "data.encoders.token_classification": "extensions.classification.token_encoders",
        "models.heads.token_classification": "extensions.classification.token_head",
        "training.objectives.classification": "extensions.classification.documents",
        "training.objectives.process_reward": "extensions.classification.steps",
        "training.objectives.token_classification": "extensions.classification.tokens",
    },
)
