"""Ranges of numbers: a field of the schema states its own, and `check_ranges` checks those of all fields.

A range is in the metadata of the field. OmegaConf ignores it, so it shows in no composed config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from errors import UserError

_RANGE = "range"  # the key in a field's metadata


@dataclass(frozen=True)
class Range:
    """The numbers that a field may have. NaN is in no range."""

    holds: Callable[[Any], bool]
    words: str  # that follow "key=value: " in the message
    keywords: Mapping[str, Any]  # the same range in JSON Schema
    # The schema does not type the field, so whatever its value is has to be in the range. Otherwise None passes, and of
    # a mapping every number is checked
    checks_anything: bool = False


def at_least(lowest: int, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a finite number that is not below `lowest`. note: added to the message, after a semicolon."""
    return _declare(lambda value: lowest <= value < math.inf, f"at least {lowest}", {"minimum": lowest}, note, default)


def positive(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a finite number above 0."""
    return _declare(lambda value: 0 < value < math.inf, "more than 0", {"exclusiveMinimum": 0}, note, default)


def zero_or_more(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a finite number that is not negative."""
    return _declare(lambda value: 0 <= value < math.inf, "0 or more", {"minimum": 0}, note, default)


def share(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number from 0 to 1, both included."""
    return _declare(
        lambda value: 0 <= value <= 1, "a share between 0 and 1", {"minimum": 0, "maximum": 1}, note, default
    )


def fraction(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number above 0, and of at most 1."""
    keywords = {"exclusiveMinimum": 0, "maximum": 1}
    return _declare(lambda value: 0 < value <= 1, "more than 0 and at most 1", keywords, note, default)


def below(limit: float, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number that is not negative, and less than `limit`."""
    keywords = {"minimum": 0, "exclusiveMaximum": limit}
    return _declare(lambda value: 0 <= value < limit, f"from 0 to below {limit:g}", keywords, note, default)


def between(low: float, high: float, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of a number between two others, both excluded."""
    keywords = {"exclusiveMinimum": low, "exclusiveMaximum": high}
    words = f"more than {low:g} and less than {high:g}"
    return _declare(lambda value: low < value < high, words, keywords, note, default)


def one_of(*values: int, note: str = "", default: Any = MISSING) -> Any:
    """Return a field of one of these numbers."""
    words = f"one of {', '.join(map(str, values))}"
    return _declare(lambda value: value in values, words, {"enum": [*values]}, note, default)


def whole_or(word: str, *, note: str = "", default: Any = MISSING) -> Any:
    """Return a field, of type Any, of a whole number that is not negative, or of this word."""
    return _declare(
        lambda value: value == word or (type(value) is int and value >= 0),
        f"0 or more, or {word}",
        {"anyOf": [{"type": "integer", "minimum": 0}, {"const": word}]},
        note,
        default,
        checks_anything=True,
    )


def count_or_counts(*, note: str = "", default: Any = MISSING) -> Any:
    """Return a field, of type Any, of null, of a whole number from 1 on, or of a list of such numbers."""

    def is_count(value: Any) -> bool:
        return type(value) is int and value >= 1

    count = {"type": "integer", "minimum": 1}
    return _declare(
        lambda value: value is None or is_count(value) or (isinstance(value, list) and all(map(is_count, value))),
        "1 or more, or a list of such numbers",
        {"anyOf": [{"type": "null"}, count, {"type": "array", "items": count}]},
        note,
        default,
        checks_anything=True,
    )


def _declare(
    holds: Callable[[Any], bool],
    words: str,
    keywords: Mapping[str, Any],
    note: str,
    default: Any,
    checks_anything: bool = False,
) -> Any:
    allowed = Range(holds, f"{words}; {note}" if note else words, keywords, checks_anything)
    return dataclasses.field(default=default, metadata={_RANGE: allowed})


def find_range(field: dataclasses.Field[Any]) -> Range | None:
    """Return the range that a field states, None if it states none."""
    return field.metadata.get(_RANGE)


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
        if (allowed := find_range(each)) is not None:
            yield f"{prefix}{each.name}", value, allowed
        elif dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{each.name}.")
