"""The features that preferences do not go together with."""

from __future__ import annotations

from training.config.incompatible import FROM_SCRATCH, Feature, Row, has_value

PREFERENCES = has_value("data.name", "preference", "unpaired_preference")
_SMOOTHED = Feature("dpo.label_smoothing > 0", lambda run: run.read("dpo.label_smoothing") > 0, "dpo.label_smoothing")
ROWS: tuple[Row, ...] = (
    (_SMOOTHED, {has_value("dpo.loss_type", "ipo", "hinge"):
        "it is the share of flipped labels, for which only sigmoid and robust have a term; "
        "give dpo.label_smoothing=0, or dpo.loss_type=sigmoid or robust"}),
    (FROM_SCRATCH, {PREFERENCES: "it needs pretrained weights; give one of them"}),
)  # fmt: skip
