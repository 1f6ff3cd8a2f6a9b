"""The samples that encoders make of records: token ids, and labels aligned with them as in Hugging Face.

`labels[t]` is `input_ids[t]` where token t is a target and -100 where it is not; the loader shifts them into targets.
So the first token of a sample is never predicted, and targets are counted after the shift. A sample with a `label` is
one target, as a whole. A kind of data is a class that implements `Encoder`; its samples may have a label beside their
targets, under a key of their own (`DataKind.label_key`).
"""

from typing import NamedTuple, NotRequired, Protocol, TypedDict

from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
# A sample that is cut continues with the last token of the previous piece, from which the token after the cut is
# predicted.
OVERLAP = 1


class Attachment(NamedTuple):
    """A thing that travels with some tokens of a sample, such as the image that they stand for. The length policy never
    cuts through these tokens."""

    start: int  # the first of the tokens
    stop: int  # the one after the last
    content: str  # as the kind of data reads it


class Sample(TypedDict):
    input_ids: list[int]  # [T]
    labels: list[int]  # [T]
    num_prompt: NotRequired[int]  # tokens before the answer, which may begin with reasoning that is no target
    # of kinds that learn from whole documents; as many numbers for each, maybe none
    label: NotRequired[list[int] | list[float]]
    num_last: NotRequired[int]  # tokens at its end that stay where it is truncated; 0 by default
    num_first: NotRequired[int]  # tokens before its own text, such as those of a query; 0 by default
    attachments: NotRequired[list[Attachment]]  # in their order; none by default
    num_cut: NotRequired[int]  # tokens that the length policy has truncated; 0 by default


Group = tuple[Sample, ...]  # samples that stay together, such as two answers to a prompt


class Encoder(Protocol):
    """A frozen dataclass, whose options are part of the key of the tokenized cache (`describe_encoder`)."""

    def encode(self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase) -> Sample | list[Sample] | Group:
        """Return the whole sample, of any length, or several; a tuple of those that stay together. Raises `UserError`
        naming `location` for a record that cannot be read.
        """
        ...


def count_targets(sample: Sample) -> int:
    """Return the number of targets of a sample: of tokens that carry loss, after the shift, or 1 where it is labelled
    as a whole. Counted in C: this is called for every sample."""
    if "label" in sample:
        return 1
    labels = sample["labels"]
    return len(labels) - labels.count(IGNORE_INDEX) - (labels[0] != IGNORE_INDEX)
