"""Supervised fine-tuning: next-token cross entropy of completions, a mean over their tokens."""

from __future__ import annotations

from training.objectives.objective import Objective


class SFT(Objective):
    name = "sft"
