"""Labels of single tokens.

Words:     a text of the words with spaces between them, as `tokenizer(text)` gives its tokens. A word's label is that
           of its first token, or of all its tokens.
Steps:     `[bos] prompt_template(prompt) step separator step separator ...`. Whether a step is right is the label of
           the last token of its separator.

In a sample the label of a token stands where the loss of a language model would have the token after it, so that the
shift of the loader puts it in its place. A text whose last token has a label gets the end token after it, which no
earlier token sees.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.labels import name_classes
from data.encoders.messages import refuse_media
from data.encoders.segments import (
    CountingEncoder,
    check_text,
    get_eos,
    get_fields,
    leading_bos,
    no_token_error,
    tokenize_plain,
)
from data.encoders.sft import PROMPT_SLOT, check_template
from data.options import ProblemType
from data.sample import IGNORE_INDEX, Sample
from errors import UserError
from extensions.classification.encoders import find_class

# Prefix of a word's tag -> those of its first and its last token, where it has several.
PIECES = {"B": ("B", "I"), "I": ("I", "I"), "E": ("I", "E"), "S": ("B", "E"), "L": ("I", "L"), "U": ("B", "L")}
PIECES["M"] = PIECES["I"]
SYNONYMS = {"L": "E", "U": "S", "M": "I"}  # what BILOU and BMES call what others call E, S and I


@dataclass(frozen=True)
class TokenClassificationEncoder(CountingEncoder):
    """Records with words and a label of each. labels: the names of all labels; None before they are known, when nothing
    can be encoded. label_all_pieces: every token of a word has a label, not the first alone, see `_label_pieces`."""

    words_field: str = "words"
    label_field: str = "labels"
    labels: Sequence[str] | None = None
    label_all_pieces: bool = False

    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> Sample:
        """Return the sample of one record. Raises `UserError` naming `location` for words or labels that cannot be
        read, and for a word without a token of its own.
        """
        refuse_media(record, location)
        if not tokenizer.is_fast:
            raise UserError(
                "data=token_classification needs a tokenizer that says which letters a token stands for: a fast one, "
                "with a tokenizer.json"
            )
        named = {"data.words_field": self.words_field, "data.label_field": self.label_field}
        words, labels = get_fields(record, named, location)
        where = f"{location}: field '{self.words_field}'"
        texts = _check_words(words, where)
        names = name_classes(labels, ProblemType.multi_label_classification, f"{location}: field '{self.label_field}'")
        if len(texts) != len(names):
            raise UserError(f"{location}: words: {len(texts)}, labels: {len(names)}; fix or remove the record")
        known = list(self.labels or ())
        classes = [find_class(name, known, f"{location}: field '{self.label_field}'") for name in names]
        options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
        try:
            encoded = tokenizer(text := " ".join(texts), **options)
        except Exception:  # see `tokenize_plain`
            raise no_token_error(text, location) from None
        owners = find_words(texts, encoded["offset_mapping"])
        if missing := sorted(set(range(len(texts))) - set(owners)):
            raise UserError(
                f"{where}: text {missing[0] + 1} ('{texts[missing[0]]}') has no token of its own; join it with the "
                "word before, or remove the record"
            )
        pieces = [
            iter(_label_pieces(classes[word], count, known) if self.label_all_pieces else [classes[word]])
            for word, count in sorted(Counter(owner for owner in owners if owner is not None).items())
        ]
        token_labels = [IGNORE_INDEX if owner is None else next(pieces[owner], IGNORE_INDEX) for owner in owners]
        return _shift(encoded["input_ids"], token_labels, tokenizer)


@dataclass(frozen=True)
class ProcessRewardEncoder(CountingEncoder):
    """Records with a prompt, steps, and whether each is right, true or false."""

    prompt_field: str = "prompt"
    steps_field: str = "completions"
    label_field: str = "labels"
    prompt_template: str = "{prompt}\n"
    step_separator: str = "\n"

    def __post_init__(self) -> None:
        check_template(self.prompt_template)
        if not self.step_separator:
            raise UserError("data.step_separator is empty; give the text that ends a step, whose last token is scored")

    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> Sample:
        """Return the sample of one record. Raises `UserError` naming `location` for a field that cannot be read."""
        refuse_media(record, location)
        named = {
            "data.prompt_field": self.prompt_field,
            "data.steps_field": self.steps_field,
            "data.label_field": self.label_field,
        }
        prompt, steps, labels = get_fields(record, named, location)
        question = check_text(prompt, f"{location}: field '{self.prompt_field}'")
        texts = _check_words(steps, f"{location}: field '{self.steps_field}'")
        if not isinstance(labels, list) or not all(isinstance(label, bool) for label in labels):
            raise UserError(
                f"{location}: field '{self.label_field}' must be a list of true and false, not {labels!r}; fix or "
                "remove the record"
            )
        if len(texts) != len(labels):
            raise UserError(f"{location}: steps: {len(texts)}, labels: {len(labels)}; fix or remove the record")
        parts = [self.prompt_template.replace(PROMPT_SLOT, question), self.step_separator, *texts]
        begin, separator, *pieces = encoded = tokenize_plain(parts, tokenizer)
        for text, ids in zip(parts, encoded, strict=True):
            if text and not ids:
                raise no_token_error(text, location)
        input_ids = [*leading_bos(tokenizer), *begin]
        token_labels = [IGNORE_INDEX] * len(input_ids)
        for step, label in zip(pieces, labels, strict=True):
            input_ids += [*step, *separator]
            token_labels += [*[IGNORE_INDEX] * (len(step) + len(separator) - 1), int(label)]
        return _shift(input_ids, token_labels, tokenizer)


def _shift(input_ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the sample of tokens with a label each, or -100."""
    if labels[-1] != IGNORE_INDEX:
        input_ids, labels = [*input_ids, get_eos(tokenizer)], [*labels, IGNORE_INDEX]
    return Sample(input_ids=list(input_ids), labels=[IGNORE_INDEX, *labels[:-1]])


def find_words(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the word that each token belongs to, the first of several; None for a token of none, such as a special
    one. offsets: of each token in the words joined by spaces, first letter and the one after its last."""
    ends = list(accumulate((len(word) + 1 for word in words), initial=-1))[1:]
    owners: list[int | None] = []
    for start, stop in offsets:
        word = bisect_right(ends, start)
        is_of_word = start < stop and word < len(words) and ends[word] - len(words[word]) < stop
        owners.append(word if is_of_word else None)
    return owners


def _label_pieces(index: int, count: int, labels: Sequence[str]) -> list[int]:
    """Return the class of each token of a word: an entity begins and ends once. After a `B-` come `I-` of its kind,
    before an `E-` too, and an `S-` becomes `B-`, `I-` and `E-`; likewise with the letters of BILOU and BMES. Where
    `labels` lack the first or the last of these, the word's first token alone has a class; where they lack the `I-`
    between, those tokens have none."""
    prefix, dash, kind = labels[index].partition("-")
    is_other = prefix in SYNONYMS and f"B-{kind}" not in labels  # a class of its own, such as "M-16"
    if not dash or prefix not in PIECES or count == 1 or is_other:
        return [index] * count
    inside = f"M-{kind}" if f"M-{kind}" in labels and f"I-{kind}" not in labels else f"I-{kind}"
    first, last = (inside if tag == "I" else f"{tag}-{kind}" for tag in PIECES[prefix])
    if not {first, last} <= set(labels):
        return [index]
    tags = [first, *[inside] * (count - 2), last]
    return [labels.index(tag) if tag in labels else IGNORE_INDEX for tag in tags]


def _check_words(words: object, where: str) -> list[str]:
    if not isinstance(words, list) or not words:
        raise UserError(f"{where} must be a list of texts; fix or remove the record")
    for number, word in enumerate(words, start=1):
        if not check_text(word, f"{where}: text {number}").strip():
            raise UserError(f"{where}: text {number} is empty; fix or remove the record")
    return [str(word) for word in words]
