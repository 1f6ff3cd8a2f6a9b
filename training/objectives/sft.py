"""Supervised fine-tuning: next-token cross entropy of completions, a mean over their tokens."""

from __future__ import annotations

from training.objectives.next_token import NextToken


class SFT(NextToken):
    name = "sft"
