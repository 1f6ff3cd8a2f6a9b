"""Pretraining: next-token cross entropy of all tokens of documents, which fill their rows
(`data/encoders/kinds.py`)."""

from __future__ import annotations

from training.objectives.next_token import NextToken


class Pretraining(NextToken):
    name = "pretrain"
