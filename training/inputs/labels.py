"""The names of the labels of a run's records, where neither the config nor the model has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from data.encoders.kinds import find_kind
from data.encoders.labels import name_classes
from data.encoders.segments import get_fields
from data.options import OnBadRecord, ProblemType
from data.sources.formats import RawRecord
from data.sources.records import parse_record, read_records, resolve_sources
from data.sources.selection import Selection
from errors import UserError
from training.config.schema import DataConfig

MOST_LABELS = 10_000


def check_names(data: DataConfig) -> None:
    """Raises UserError where `data.labels` names a label twice, or one class alone, which leaves nothing to learn."""
    names = data.labels or ()
    least = 2 if data.problem_type is ProblemType.single_label_classification else 1
    if len(set(names)) < max(least, len(names)):
        raise UserError(f"data.labels=[{','.join(names)}]: name each label once, and at least {least}")


def find_labels(entries: Sequence[str], data: DataConfig, selection: Selection) -> list[str]:
    """Return the names of all labels in the records of `train_file`: numbers by their size, others sorted. Reads each
    record once.

    Raises UserError for a record that cannot be read, and for fewer than two labels or too many.
    """
    found: set[str] = set()
    for raw in _read_entries(entries, selection):
        try:
            found.update(_name_labels(raw, data, selection))
        except UserError:
            if data.on_bad_record is OnBadRecord.stop:
                raise
        if len(found) > MOST_LABELS:
            raise UserError(
                f"train_file: field '{data.label_field}' has more than {MOST_LABELS:,} different values; name the "
                "labels in data.labels, or give data.problem_type=regression"
            )
    if len(found) < 2:
        named = f"a single label, '{found.pop()}'" if found else "no labels"
        raise UserError(
            f"train_file: the records have {named} in field '{data.label_field}'; name all labels in data.labels"
        )
    names = sorted(found)  # "1" and "01" are one number: they stay in this order, the same on every rank
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def _read_entries(entries: Sequence[str], selection: Selection) -> Iterator[RawRecord]:
    for entry in entries:
        records = (raw for source in resolve_sources(entry, "train_file") for raw in read_records(source))
        yield from islice(records, selection.max_records)


def _name_labels(raw: RawRecord, data: DataConfig, selection: Selection) -> list[str]:
    """Return the labels of a record; none of one that is not taken. Raises UserError for one that cannot be read."""
    if raw.problem is not None:
        raise UserError(raw.problem)
    record = parse_record(raw.location, raw.text)
    if not selection.keeps(record, raw.location):
        return []
    assert data.label_field is not None
    (value,) = get_fields(record, {"data.label_field": data.label_field}, raw.location)
    kind = ProblemType.multi_label_classification if find_kind(data.name).lists_labels else data.problem_type
    return name_classes(value, kind, f"{raw.location}: field '{data.label_field}'")
