"""The kinds of data. A new one is an encoder in this folder, a line in `KINDS`, and keys in `conf/data/NAME.yaml`."""

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any

from data.components import describe_code
from data.encoders.chat import ChatEncoder
from data.encoders.classification import ClassificationEncoder
from data.encoders.preference import PreferenceEncoder, UnpairedEncoder
from data.encoders.pretrain import PretrainEncoder
from data.encoders.retrieval import EmbeddingEncoder, RerankEncoder
from data.encoders.sft import SFTEncoder
from data.encoders.token_classification import ProcessRewardEncoder, TokenClassificationEncoder
from data.options import Packing
from data.sample import Encoder
from errors import UserError


@dataclass(frozen=True)
class DataKind:
    """One kind of data.

    encoder: turns its records into samples; a dataclass whose fields are keys of `data`.
    task: the objective that is trained on it by default.
    together: what the samples of a record are that stay together, in their order, before any negatives; empty where a
        record is one sample or several that do not.
    concatenates: its samples are documents that are laid end to end and cut where a row is full.
    label_names: of the labels of its samples, where they are always the same.
    lists_labels: a record has a list of labels, one for each of its words.
    not_packed, not_split, not_streamed: why data.packing=true, data.length_policy=split or data.streaming=true is
        refused; empty where it is not.
    format_version: part of the names of the tokenized folders of this kind. Raise it whenever its encoder makes other
        samples of the same records and options, or a default of an option changes; what was tokenized is then
        tokenized again. `tests/data/encoders/test_encoder_formats.py` fails where it should have been raised.
    """

    name: str
    encoder: Callable[..., Encoder]
    task: str
    together: tuple[str, ...] = ()
    concatenates: bool = False
    label_names: tuple[str, ...] = ()
    lists_labels: bool = False
    not_packed: str = ""
    not_split: str = ""
    not_streamed: str = ""
    format_version: int = 1

    def count_samples(self, num_negatives: int) -> int:
        """Return the number of samples that a record becomes, which stay together."""
        return max(1, len(self.together)) + num_negatives

    def name_samples(self, count: int) -> list[str]:
        """Return what each of so many samples is that stay together; empty texts where none do."""
        if not self.together:
            return [""] * count
        negatives = [f"negative {number}" for number in range(1, count - len(self.together) + 1)]
        return [*self.together, *negatives][:count]

    def choose_packing(self, packs: bool) -> Packing:
        """Return how samples share rows. packs: whether they may."""
        if self.concatenates:
            return Packing.CONCATENATE
        return Packing.BEST_FIT if packs else Packing.NONE


_SCORED = "preferences are scored before the first step"
_LABELS = "a stream is not searched for labels, and keeps none of whole texts"
_TEXTS_TOGETHER = "the texts of a query are rows of one micro-batch"
_PART_OF_TEXT = "a part of a text is not what belongs to its query"
KINDS = {
    kind.name: kind
    for kind in (
        # 2: the end of a turn, for templates that do not show the next one
        DataKind("sft", SFTEncoder, task="sft", format_version=2),
        DataKind("chat", ChatEncoder, task="sft", format_version=2),
        DataKind("pretrain", PretrainEncoder, task="pretrain", concatenates=True),
        DataKind(
            "preference",
            PreferenceEncoder,
            task="dpo",
            together=("chosen", "rejected"),
            not_packed="the two answers of a preference are rows of one micro-batch",
            not_split="an answer that is split cannot be preferred",
            not_streamed=_SCORED,
            format_version=2,
        ),
        DataKind(
            "unpaired_preference",
            UnpairedEncoder,
            task="kto",
            label_names=("not liked", "liked"),
            not_packed="a row is one answer, with a label",
            not_split="an answer that is split cannot be judged",
            not_streamed=_SCORED,
            format_version=2,
        ),
        DataKind(
            "classification",
            ClassificationEncoder,
            task="classification",
            not_split="its label is that of the whole document",
            not_streamed=_LABELS,
        ),
        DataKind("process_reward", ProcessRewardEncoder, task="process_reward"),
        DataKind(
            "embedding",
            EmbeddingEncoder,
            task="embedding",
            together=("query", "positive"),
            not_packed=_TEXTS_TOGETHER,
            not_split=_PART_OF_TEXT,
            not_streamed=_TEXTS_TOGETHER,
        ),
        DataKind(
            "rerank",
            RerankEncoder,
            task="rerank",
            together=("positive",),
            not_packed=_TEXTS_TOGETHER,
            not_split=_PART_OF_TEXT,
            not_streamed=_TEXTS_TOGETHER,
        ),
        DataKind(
            "token_classification",
            TokenClassificationEncoder,
            task="token_classification",
            lists_labels=True,
            not_streamed=_LABELS,
            format_version=2,  # BILOU and BMES
        ),
    )
}


def find_kind(name: str) -> DataKind:
    """Return the kind of that name. Raises UserError for a name that is not in the table."""
    if name not in KINDS:
        raise UserError(f"data.name={name}: must be one of {', '.join(sorted(KINDS))}")
    return KINDS[name]


def find_keys(kind: DataKind) -> set[str]:
    """Return the names of the keys of `data` that the encoder of a kind reads."""
    encoder: Any = kind.encoder
    return {field.name for field in fields(encoder)}


def describe_encoder(encoder: Encoder) -> list:
    """Return what the samples depend on that an encoder makes of given records with a given tokenizer, as JSON values.

    One of ours is named by its kind, the version of its format, and the options that differ from their defaults: not by
    its source, so that moving it, or adding an option, changes no key. A user's own is named by its module, its fields
    and its source, see `describe_code`.
    """
    kind = _find_own(encoder)
    if kind is None:
        return [f"{type(encoder).__module__}.{encoder!r}", *describe_encoder_code(encoder)]
    given: Any = encoder
    options = {
        option.name: _to_json(value)
        for option in fields(given)
        if option.repr and (value := getattr(encoder, option.name)) != _find_default(option)
    }
    return [kind.name, kind.format_version, options]


def describe_encoder_code(encoder: Encoder) -> list:
    """Return the code of a user's own encoder and the files that it names, see `describe_code`; empty for ours."""
    return [] if _find_own(encoder) else [describe_code(encoder, getattr(encoder, "__dict__", {}))]


def _find_own(encoder: Encoder) -> DataKind | None:
    return next((kind for kind in KINDS.values() if kind.encoder is type(encoder)), None)


def _find_default(option: Field) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _to_json(value: Any) -> str:
    """Return an option as a text. The order of a mapping counts: a chat template may print it."""
    return json.dumps(value, default=lambda other: other.value if isinstance(other, Enum) else dict(other))
