"""Small pieces of logits, so that few targets make several."""

from __future__ import annotations

import pytest

from models.losses import logit_chunks as logit_pieces


def cut_pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """piece: logits in one; any number of targets."""
    monkeypatch.setattr(logit_pieces, "PIECE", piece)
    monkeypatch.setattr(logit_pieces, "ROWS", 1)
