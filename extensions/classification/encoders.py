"""Documents with a label: a text, two texts, or a conversation, and one class, any number of classes, or numbers.

Text:      `tokenizer(text)` or `tokenizer(text, text_pair)`: the tokens that the text-classification pipeline of
           `transformers` gives the trained model.
Messages:  the conversation in the tokenizer's chat template, without a generation prompt.

No token is a target: the document is, as a whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.chat import open_renderer
from data.encoders.control_tokens import Guard
from data.encoders.labels import name_classes
from data.encoders.messages import TURN_FLAGS, check_messages, parse_json, refuse_media
from data.encoders.segments import CountingEncoder, Piece, Pieces, check_filled, get_fields, tokenize_sample
from data.encoders.texts import tokenize_texts
from data.options import ControlTokens, ProblemType
from data.sample import Sample
from errors import UserError


@dataclass(frozen=True)
class ClassificationEncoder(CountingEncoder):
    """Records with a text, or with messages, and a label. labels: their names; None before they are known, when nothing
    can be encoded. A field `tools` goes to the chat template."""

    text_field: str = "text"
    text_pair_field: str | None = None
    messages_field: str = "messages"
    label_field: str = "label"
    problem_type: ProblemType = ProblemType.single_label_classification
    labels: Sequence[str] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: ControlTokens | None = None
    chat_template: str | None = field(default=None, repr=False)  # as named; the tokenizer has its text

    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> Sample:
        """Return the sample of one record. counts: what was found is added to it. Raises `UserError` naming `location`
        for a field that is missing or empty, and a label that cannot be read.
        """
        refuse_media(record, location)
        (value,) = get_fields(record, {"data.label_field": self.label_field}, location)
        where = f"{location}: field '{self.label_field}'"
        if self.problem_type is ProblemType.regression:
            label: list[int] | list[float] = _read_numbers(value, len(self.labels or ()) or 1, where)
        else:
            label = read_classes(value, self.labels or (), self.problem_type, where)
        found = counts or ContentCounts()
        if self.messages_field in record and self.text_field not in record:
            pieces = self._split_messages(record, location, tokenizer, found)
            sample = tokenize_sample(pieces, location, tokenizer)
        else:
            sample = self._tokenize_texts(record, location, tokenizer, found)
        sample["label"] = label
        return sample

    def _tokenize_texts(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> Sample:
        named = {"data.text_field": self.text_field}
        if self.text_pair_field is not None:
            named["data.text_pair_field"] = self.text_pair_field
        guard = Guard(tokenizer, self.control_tokens, counts)
        texts = []
        for name, value in zip(named.values(), get_fields(record, named, location)):
            where = f"{location}: field '{name}'"
            texts.append(guard.protect_text(check_filled(value, where), where))
        return tokenize_texts(texts, location, guard)

    def _split_messages(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> Pieces:
        if tokenizer.chat_template is None:
            raise UserError(
                f"{location}: the record holds messages, but the tokenizer has no chat template; name one with "
                "data.chat_template (such as chatml), or use records with a text"
            )
        checked = check_messages(record[self.messages_field], location, needs_answer=False)
        guard = Guard(tokenizer, self.control_tokens, counts)
        renderer = open_renderer(record, location, guard, self.template_kwargs)
        turns = [
            guard.protect_turn(
                {name: value for name, value in turn.items() if name not in TURN_FLAGS},
                f"{location}: message {number}",
            )
            for turn, number in zip(checked, count(1))
        ]
        text = renderer.render(renderer.fit_calls(turns))
        counts.num_default_dates += renderer.calendar.was_needed
        return guard.release([Piece(text, False)])


def read_classes(value: object, labels: Sequence[str], problem_type: ProblemType, where: str) -> list[int]:
    """Return the index of the class, or of each class whether the record has it, 1 or 0. A number counts the labels
    from 0, unless a name is a number too. Raises `UserError` naming `where` for a label that is not among `labels`."""
    indices = [find_class(name, labels, where) for name in name_classes(value, problem_type, where)]
    if problem_type is ProblemType.single_label_classification:
        return indices
    return [int(index in indices) for index in range(len(labels))]


def find_class(name: str, labels: Sequence[str], where: str) -> int:
    """Return the index of a class by its name or, where no name is a number, by its number, from 0. Raises `UserError`
    as `read_classes` does."""
    if name in labels:
        return list(labels).index(name)
    if name.isdecimal() and int(name) < len(labels) and not any(label.isdecimal() for label in labels):
        return int(name)
    raise UserError(
        f"{where} is '{name}', which is not among the labels ({', '.join(labels[:10])}{', ...' * (len(labels) > 10)}); "
        "fix or remove the record, or name all labels in data.labels"
    )


def _read_numbers(value: object, length: int, where: str) -> list[float]:
    read = parse_json(value)  # the cells of a table are texts
    given = read if isinstance(read, list) else [read]
    try:
        numbers = [float(each) for each in given if isinstance(each, int | float | str) and not isinstance(each, bool)]
    except (OverflowError, ValueError):  # an integer beyond the largest float, or a text that is no number
        numbers = []
    if len(numbers) != len(given) or len(numbers) != length or not all(map(math.isfinite, numbers)):
        form = "a number" if length == 1 else f"a list of {length} numbers"
        raise UserError(
            f"{where} must be {form} (data.problem_type=regression), not {value!r}; fix or remove the record"
        )
    return numbers
