"""The table of the kinds of data, the project's own and those of extensions."""

import json
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any

from data.components import describe_code, is_ours
from data.encoders.chat import ChatEncoder
from data.encoders.kind import DataKind
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.sample import Encoder
from errors import UserError
from extension import check_not_removed, load_parts, name_parts

OWN_KINDS = (
    # 2: the end of a turn, for templates that do not show the next one
    DataKind("sft", SFTEncoder, task="sft", format_version=2),
    DataKind("chat", ChatEncoder, task="sft", format_version=2),
    DataKind("pretrain", PretrainEncoder, task="pretrain", concatenates=True),
)
ADDED_KINDS: tuple[DataKind, ...] = load_parts("data_kinds")
KINDS: dict[str, DataKind] = name_parts((*OWN_KINDS, *ADDED_KINDS), "kinds of data")


def find_kind(name: str) -> DataKind:
    """Return the kind of that name. Raises UserError for a name that is not in the table."""
    if name not in KINDS:
        check_not_removed(f"data={name}", f"data.name={name}")
        raise UserError(f"data.name={name}: must be one of {', '.join(sorted(KINDS))}")
    return KINDS[name]


def find_keys(kind: DataKind) -> set[str]:
    """Return the names of the keys of `data` that the encoder of a kind reads."""
    encoder: Any = kind.encoder
    return {field.name for field in fields(encoder)}


def describe_encoder(encoder: Encoder) -> list:
    """Return what the samples depend on that an encoder makes of given records with a given tokenizer, as JSON values.

    One of ours is named by its kind, the version of its format, and the options that differ from their defaults: not by
    its source, so that moving it, or adding an option, changes no key. A user's own, that of a kind in an extension of
    theirs too, is named by its module, its fields and its source, see `describe_code`.
    """
    kind = find_own(encoder)
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
    return [] if find_own(encoder) else [describe_code(encoder, getattr(encoder, "__dict__", {}))]


def find_own(encoder: Encoder) -> DataKind | None:
    """Return the kind of data whose encoder this is; None for a user's own, that of an extension of theirs too."""
    kinds = KINDS.values() if is_ours(encoder) else ()
    return next((kind for kind in kinds if kind.encoder is type(encoder)), None)


def _find_default(option: Field) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _to_json(value: Any) -> str:
    """Return an option as a text. The order of a mapping counts: a chat template may print it."""
    return json.dumps(value, default=lambda other: other.value if isinstance(other, Enum) else dict(other))
