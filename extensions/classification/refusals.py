"""The features that classes do not go together with."""

from __future__ import annotations

from training.config.incompatible import CONTEXT_PARALLEL, Row, has_value

ROWS: tuple[Row, ...] = (
    (CONTEXT_PARALLEL, {has_value("data.name", "token_classification"):
        "an entity may lie in the parts of two ranks; give context_parallel_size=1"}),
)  # fmt: skip
