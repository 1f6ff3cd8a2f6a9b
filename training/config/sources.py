"""The values of `train_file` and `eval_file`: a path, a user-defined function, or a list of these, maybe with
shares."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from data.components import TARGET, find_component
from data.options import MixtureUnit
from data.sources.mixture import Mixture, ShareKind
from data.sources.records import name_component_source
from errors import UserError
from training.config.schema import RunConfig

HELD_OUT = "held_out"  # the key of the records of `train_file` that are evaluated
SHARES = tuple(kind.value for kind in ShareKind)
EXAMPLE = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"


@dataclass(frozen=True)
class TrainFiles:
    """Sources as `data/sources/records.py` reads them, one per entry, and the shares of a mixture."""

    entries: list[str]
    mixture: Mixture | None = None


def parse_files(value: Any, key: str, unit: MixtureUnit) -> TrainFiles:
    """Parse the value of `train_file` or `eval_file`. Entries of share 0 are omitted.

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
        raise UserError(f"{key}: every entry has {kind} 0, so there are no training data; give one of them more")
    shares = tuple(float(source[kind]) for source in taken)
    return TrainFiles([source["path"] for source in taken], Mixture(shares, ShareKind(kind), unit))


def list_evaluations(config: RunConfig) -> dict[str, str]:
    """Return what this run evaluates: name -> key, such as "math" -> "eval_file.math" for the value of `eval_file`, or
    `HELD_OUT` for the records of `train_file` that are held out.

    A single one has an empty name. Raises UserError for a name that no metric can have.
    """
    eval_file = config.eval_file
    if eval_file is None:
        return {"": HELD_OUT} if config.data.holds_out else {}
    if not isinstance(eval_file, dict) or TARGET in eval_file:
        return {"": "eval_file"}
    for name in eval_file:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("path", *SHARES):
            raise UserError(
                f"eval_file: '{name}' cannot name an evaluation file; give a path, or names of letters and digits with "
                "a path each, such as {math: a.jsonl, code: b.jsonl}"
            )
    return {name: f"eval_file.{name}" for name in eval_file}


def list_file_keys(config: RunConfig) -> list[str]:
    """Return the keys of the files that are tokenized before the first step: `train_file` if the run trains and does
    not stream it, and those of `list_evaluations`."""
    training_keys = [] if config.evaluate_only or config.data.streaming else ["train_file"]
    return [*training_keys, *list_evaluations(config).values()]


def parse_key(config: RunConfig, key: str) -> TrainFiles:
    """Return the sources of one key of `list_file_keys`. What is held out is evaluated once, whatever its share in a
    mixture. Raises UserError as `parse_files` does."""
    if key == HELD_OUT:
        return replace(parse_key(config, "train_file"), mixture=None)
    return parse_files(read_files(config, key), key, config.data.mixture_by)


def read_files(config: RunConfig, key: str) -> Any:
    """Return the value of `train_file`, of `eval_file`, or of a named file such as `eval_file.math`. Those of
    `HELD_OUT` are the training files."""
    whole, _, name = ("train_file" if key == HELD_OUT else key).partition(".")
    return getattr(config, whole)[name] if name else getattr(config, whole)


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
            raise UserError(f"{where} has {kind}={share}; give a number of 0 or more (0 omits {source['path']})")
    return source
