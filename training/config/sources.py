"""What `train_file` and `eval_file` may be: a path, a user's function, or a list of these, which may have shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from data.components import TARGET, find_component
from data.options import MixtureUnit
from data.sources.mixture import Mixture, ShareKind
from data.sources.records import name_component_source
from errors import UserError

SHARES = tuple(kind.value for kind in ShareKind)
EXAMPLE = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"


@dataclass(frozen=True)
class TrainFiles:
    """Sources as `data/sources/records.py` reads them, one an entry, and the shares of a mixture."""

    entries: list[str]
    mixture: Mixture | None = None


def parse_files(value: Any, key: str, unit: MixtureUnit) -> TrainFiles:
    """The value of `train_file` or `eval_file`. Entries of share 0 are omitted.

    Raises UserError for a mapping that is not a source, for shares that are not numbers, and for shares in `eval_file`.
    """
    listed = value if isinstance(value, list) else [value]
    if not any(isinstance(entry, dict) for entry in listed):
        return TrainFiles(listed)
    sources = [_check_source(entry, f"{key}: entry {number}") for number, entry in enumerate(listed, start=1)]
    kinds = {kind for source in sources for kind in SHARES if kind in source}
    if not kinds:
        return TrainFiles([source["path"] for source in sources])
    if key != "train_file":
        raise UserError(f"{key} takes no {' or '.join(sorted(kinds))}: evaluation reads every sample once; give paths")
    if len(kinds) > 1 or not all(kinds <= source.keys() for source in sources):
        raise UserError(
            f"{key}: give every entry a weight, or every entry a number of epochs, such as {key}='{EXAMPLE}'"
        )
    (kind,) = kinds
    taken = [source for source in sources if source[kind] > 0]
    if not taken:
        raise UserError(f"{key}: every entry has {kind} 0, so nothing is left to train on; give one of them more")
    shares = tuple(float(source[kind]) for source in taken)
    return TrainFiles([source["path"] for source in taken], Mixture(shares, ShareKind(kind), unit))


def _check_source(entry: Any, where: str) -> dict[str, Any]:
    source = {"path": entry} if isinstance(entry, str) else entry
    if isinstance(source, dict) and TARGET in source:
        find_component(source[TARGET], where)
        spec = {name: value for name, value in source.items() if name not in SHARES}
        source = {"path": name_component_source(spec), **{kind: source[kind] for kind in SHARES if kind in source}}
    if not isinstance(source, dict) or not isinstance(source.get("path"), str):
        raise UserError(f"{where} is {entry}; give a path, or a mapping with a path and a weight, such as {EXAMPLE}")
    if unknown := sorted(map(str, source.keys() - {"path", *SHARES})):
        raise UserError(f"{where} has an unknown key '{unknown[0]}'; known are path, {', '.join(SHARES)}")
    for kind in SHARES:
        share = source.get(kind, 0)
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < math.inf:
            raise UserError(f"{where} has {kind}={share}; give a number of 0 or more (0 leaves {source['path']} out)")
    return source
