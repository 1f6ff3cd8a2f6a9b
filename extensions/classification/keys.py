"""The keys of classes and process rewards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ClassificationConfig:
    """The group `classification`."""

    # The weight of each label's loss, in their order; None: 1 each. extensions/classification/README.md#class-weights
    class_weights: list[float] | None = None


@dataclass
class LabelKeys:
    """Further keys of `data`. A key that ends in `_field` names a field of a record."""

    text_pair_field: str | None = None  # a second text after the first one (data=classification)
    words_field: str | None = None  # the words of a text (data=token_classification)
    label_all_pieces: bool = False  # every token of a word has a label, not the first alone (data=token_classification)
    steps_field: str | None = None  # the steps of an answer (data=process_reward)
    step_separator: str | None = None  # the text after each step, whose last token is scored (data=process_reward)
