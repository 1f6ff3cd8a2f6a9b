"""Ranges of numbers: a field of the schema states its own, and `check_ranges` checks those of all fields.

A range is in the metadata of the field. OmegaConf ignores it, so it shows in no composed config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from errors import UserError

_RANGE = "range"  # the key in a field's metadata


@dataclass(frozen=True)
class Range:
    """The numbers that a field may have. words: follow "key=value: " in the message. NaN is in no range.

    checks_anything: the schema does not type the field, so whatever its value is has to be in the range. Otherwise None
    passes, and of a mapping every number is checked.
    """

    holds: Callable[[Any], bool]
    words: str
    checks_anything: bool = False


def at_least(lowest: int, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a finite number that is not below `lowest`. note: added to the message, after a semicolon."""
    return _declare(lambda value: lowest <= value < math.inf, f"at least {lowest}", note, default)


def positive(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a finite number above 0."""
    return _declare(lambda value: 0 < value < math.inf, "more than 0", note, default)


def zero_or_more(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a finite number that is not negative."""
    return _declare(lambda value: 0 <= value < math.inf, "0 or more", note, default)


def share(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number from 0 to 1, both included."""
    return _declare(lambda value: 0 <= value <= 1, "a share between 0 and 1", note, default)


def fraction(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number above 0, and of at most 1."""
    return _declare(lambda value: 0 < value <= 1, "more than 0 and at most 1", note, default)


def below(limit: float, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number that is not negative, and less than `limit`."""
    return _declare(lambda value: 0 <= value < limit, f"from 0 to below {limit:g}", note, default)


def between(low: float, high: float, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number between two others, both excluded."""
    return _declare(lambda value: low < value < high, f"more than {low:g} and less than {high:g}", note, default)


def one_of(*values: int, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of one of these numbers."""
    return _declare(lambda value: value in values, f"one of {', '.join(map(str, values))}", note, default)


def whole_or(word: str, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field, of type Any, of a whole number that is not negative, or of this word."""
    return _declare(
        lambda value: value == word or (type(value) is int and value >= 0),
        f"0 or more, or {word}",
        note,
        default,
        checks_anything=True,
    )


def count_or_counts(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field, of type Any, of null, of a whole number from 1 on, or of a list of such numbers."""

    def is_count(value: Any) -> bool:
        return type(value) is int and value >= 1

    return _declare(
        lambda value: value is None or is_count(value) or (isinstance(value, list) and all(map(is_count, value))),
        "1 or more, or a list of such numbers",
        note,
        default,
        checks_anything=True,
    )


def _declare(holds: Callable[[Any], bool], words: str, note: str, default: Any, checks_anything: bool = False) -> Any:
    allowed = Range(holds, f"{words}; {note}" if note else words, checks_anything)
    return dataclasses.field(default=default, metadata={_RANGE: allowed})


def list_ranges(config: Any) -> dict[str, Range]:
    """Return the ranges of the fields of a dataclass instance and of the instances in it, by dotted key."""
    return {key: allowed for key, _, allowed in _walk(config)}


def check_ranges(config: Any) -> None:
    """Raise UserError for a number in a dataclass instance that is out of its range."""
    for key, value, allowed in _walk(config):
        for number in [value] if allowed.checks_anything else _list_numbers(value):
            if not allowed.holds(number):
                finite = "a finite number, " if isinstance(number, float) and not math.isfinite(number) else ""
                raise UserError(f"{key}={'null' if value is None else value}: {finite}{allowed.words}")


def _list_numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return [] if value is None else [value]


def _walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Range]]:
    """Yield (dotted key, value, range) of each field that has a range."""
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if _RANGE in each.metadata:
            yield f"{prefix}{each.name}", value, each.metadata[_RANGE]
        elif dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{each.name}.")
