"""Which records of the files are taken: those that a user's filter keeps, and of these the part to train on or the part
that is held out for evaluation.

A record's part depends on its hash alone, so on neither its place, its file, its neighbours nor the run. The hash is
that of its fields and values, whatever their order. A share is a bound on the hash. A number of records is the N
smallest hashes (bottom-k sampling): records that are added may take the place of held out ones, but what was trained on
is never held out later.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from data.components import TARGET, describe_code, find_component
from errors import UserError

HASH_BITS = 64
NUM_HASHES = 2**HASH_BITS


def hash_record(record: dict) -> int:
    """Return the hash of a record, from 0 to below `NUM_HASHES`; copies have the same one."""
    return xxhash.xxh3_64_intdigest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class RecordFilter:
    """A user's function, called with a record and `fields`, that returns whether the record is taken."""

    name: str
    function: Callable[..., object]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def keeps(self, record: dict, location: str) -> bool:
        """Return what the function returns. Raises `UserError` naming `location` where it raises, or returns something
        else than true or false."""
        try:
            kept = self.function(record, **self.fields)
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{location}: data.filter {self.name} raised {reason}; fix the function or the record"
            ) from error
        if not isinstance(kept, bool | np.bool_):
            raise UserError(
                f"{location}: data.filter {self.name} returned {kept!r:.40} ({type(kept).__name__}); it must return "
                "true or false"
            )
        return bool(kept)

    def describe(self) -> list:
        """Return what the choice of records depends on."""
        return [self.name, dict(self.fields), describe_code(self.function, self.fields, self.name)]


def build_filter(spec: Any) -> RecordFilter:
    """Return the filter that `data.filter` names: `_target_` and the fields that it is called with after the record.

    Raises `UserError` where there is no such function, or it cannot be called so.
    """
    if not isinstance(spec, dict):
        raise UserError(f"data.filter={spec}: give a mapping, such as {{_target_: my_data.keep, field: value}}")
    fields = {name: value for name, value in spec.items() if name != TARGET}
    function = find_component(spec.get(TARGET), "data.filter")
    try:
        inspect.signature(function).bind({}, **fields)
    except TypeError as error:
        raise UserError(
            f"data.filter: {spec[TARGET]} does not take a record and the fields {sorted(fields)}: {error}"
        ) from None
    return RecordFilter(spec[TARGET], function, fields)


@dataclass(frozen=True)
class HoldOut:
    """The records that are held out for evaluation: a share of all, or a number of different ones."""

    fraction: float | None = None
    count: int | None = None

    @property
    def key(self) -> str:
        """The config key that a message names."""
        return "data.eval_samples" if self.fraction is None else "data.eval_fraction"

    def estimate(self, num_records: float) -> float:
        """Return how many of the records are held out."""
        if self.fraction is not None:
            return num_records * self.fraction
        assert self.count is not None
        return min(num_records, self.count)

    def compute_bound(self, list_smallest: Callable[[int], np.ndarray]) -> int:
        """Return the number that the hashes of these records are below.

        list_smallest: returns up to that many of the smallest different hashes, ascending; called for a number only.
        """
        if self.fraction is not None:
            return int(self.fraction * NUM_HASHES)
        assert self.count is not None
        smallest = list_smallest(self.count)
        return int(smallest[-1]) + 1 if len(smallest) else 0


@dataclass(frozen=True)
class Selection:
    """The records that are taken. max_records: of each entry the first ones alone are read. takes_held_out: the part
    that is held out, instead of the others. bound: held out are those with a hash below it; see `resolve`."""

    filter: RecordFilter | None = None
    max_records: int | None = None
    hold_out: HoldOut | None = None
    takes_held_out: bool = False
    bound: int = 0

    def resolve(self, list_smallest: Callable[[int], np.ndarray]) -> "Selection":
        """Return the selection with its bound. list_smallest: see `HoldOut.compute_bound`."""
        return self if self.hold_out is None else replace(self, bound=self.hold_out.compute_bound(list_smallest))

    def estimate_taken(self, num_records: float) -> float:
        """Return how many of the records are in this part."""
        if self.hold_out is None:
            return num_records
        held_out = self.hold_out.estimate(num_records)
        return held_out if self.takes_held_out else num_records - held_out

    def list_keys(self) -> list[str]:
        """Return the config keys that were given."""
        given = {"data.filter": self.filter, "data.max_samples": self.max_records}
        keys = [key for key, value in given.items() if value is not None]
        return keys if self.hold_out is None else [*keys, self.hold_out.key]

    def describe(self) -> list:
        """Return what the choice of records depends on; part of the key of the tokenized cache."""
        code = None if self.filter is None else self.filter.describe()
        return [code, self.max_records, repr(self.hold_out), self.takes_held_out]

    def keeps(self, record: dict, location: str) -> bool:
        """Return whether the filter keeps the record. Raises `UserError` naming `location`, see `RecordFilter`."""
        return self.filter is None or self.filter.keeps(record, location)

    def takes(self, record_hash: int) -> bool:
        """Return whether a record is in this part."""
        return self.hold_out is None or (record_hash < self.bound) == self.takes_held_out


TAKE_ALL = Selection()
