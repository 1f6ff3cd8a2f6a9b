"""Small chunks of logits, so that few targets need several."""

from __future__ import annotations

import pytest

from models.losses import logit_chunks


def set_chunk_size(monkeypatch: pytest.MonkeyPatch, num_logits: int) -> None:
    """Make chunks of `num_logits` logits, with any number of targets."""
    monkeypatch.setattr(logit_chunks, "CHUNK_LOGITS", num_logits)
    monkeypatch.setattr(logit_chunks, "ROWS", 1)
