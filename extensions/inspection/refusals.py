"""The features that `inspect_data=true` does not go together with."""

from __future__ import annotations

from training.config.incompatible import STREAMED, Row, has_value

ROWS: tuple[Row, ...] = (
    (STREAMED, {has_value("inspect_data", "true"): "it shows what is tokenized before the first step; "
        "give data.streaming=false data.max_samples=1000"}),
)  # fmt: skip
