"""Distillation: a small model learns from the probabilities that a larger one gives the next token."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    keys={"distill": "extensions.distillation.keys:DistillConfig"},
    readers="extensions.distillation.refusals:READERS",
    refusals="extensions.distillation.refusals:ROWS",
    modifiers="extensions.distillation.modifier:MODIFIERS",
    aliases={
        "models.losses.distill_loss": "extensions.distillation.loss",
        "models.losses.divergence": "extensions.distillation.divergence",
        "models.losses.options": "extensions.distillation.keys",
        "training.config.teacher": "extensions.distillation.teacher_pass",
        "training.planner.teacher": "extensions.distillation.plan",
    },
)
