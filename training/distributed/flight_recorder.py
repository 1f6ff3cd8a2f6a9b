"""Finds the operation that ranks wait in, from torch's flight recorder: gloo and NCCL keep the last operations that a
process has begun in its process groups (2,000 each by default; torch 2.13.0).

A collective is named by its group and its number in it, which all ranks of the group count alike. gloo records
collectives alone, NCCL also messages from one rank to another: an entry for each, and one named `nccl:coalesced` for
those that were launched together.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d

MISSING = "this build of torch has no flight recorder, which would name the operation"
_MOST_NAMED = 8  # ranks in a list of a message
_COALESCED = "nccl:coalesced"
_ENDED = "completed"
_MESSAGE = re.compile(r"nccl:(?P<verb>send|recv) (?P<own>\d+)(->|<-)(?P<peer>\d+)")  # ranks in the group


class Operation(NamedTuple):
    """An operation that a rank has begun and not ended."""

    group: str  # a name that all ranks give this group
    description: str  # of the group
    ranks: list[int]  # of the group
    number: int  # in the group; 0 for messages, which each rank counts by itself
    names: list[str]


class Waits(NamedTuple):
    """The operations that one rank waits in."""

    last: dict[str, int]  # the number of its last collective in each group
    pending: list[Operation]


def exists() -> bool:
    """Returns whether this build of torch has a flight recorder."""
    return bool(_list_readers())


def _list_readers() -> dict[str, Any]:
    readers = {
        "gloo": getattr(_distributed_c10d, "_dump_fr_trace_json", None),
        "nccl": getattr(_distributed_c10d, "_dump_nccl_trace_json", None),  # not in a build without NCCL
    }
    return {backend: read for backend, read in readers.items() if read is not None}


def read_traces() -> dict[str, Any]:
    """Return what has been recorded, by backend; empty in a build of torch without a recorder."""
    return {
        backend: json.loads(read(includeCollectives=True, onlyActive=False))
        for backend, read in _list_readers().items()
    }


def list_groups() -> dict[str, list[int]]:
    """Return the ranks of each of this rank's process groups by its name, which is the same on all ranks."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return {group.group_name: dist.get_process_group_ranks(group) for group in groups}


def find_waits(traces: Mapping[str, Any], groups: Mapping[str, list[int]]) -> Waits:
    """Return what this rank waits in. groups: as `list_groups` returns them."""
    last: dict[str, int] = {}
    begun: dict[tuple[str, bool, int], list[dict[str, Any]]] = defaultdict(list)
    for backend, trace in traces.items():
        for entry in trace.get("entries", ()):
            group, is_message = f"{backend} {entry['process_group'][0]}", entry["is_p2p"]
            number = entry["p2p_seq_id" if is_message else "collective_seq_id"]
            begun[group, is_message, number].append(entry)
            if not is_message:
                last[group] = max(last.get(group, 0), number)
    pending = [
        Operation(
            group,
            entries[0]["process_group"][1],
            groups.get(entries[0]["process_group"][0], []),
            0 if is_message else number,
            [entry["profiling_name"] for entry in entries if entry["profiling_name"] != _COALESCED],
        )
        for (group, is_message, number), entries in begun.items()
        if not any(entry["retired"] or entry["state"] == _ENDED for entry in entries)
    ]
    return Waits(last, pending)


def read_waits(sent: Any) -> Waits:
    """Return what another rank has sent as JSON."""
    last, pending = sent
    return Waits(last, [Operation(*fields) for fields in pending])


def describe_waits(waits: Mapping[int, Waits], name: Callable[[int], str] = str) -> str:
    """Return a clause that names the operation in which ranks wait, and the ranks that have not begun it; empty where
    none is known. Where ranks wait in several, it is the one that waits for a rank which waits in none.

    waits: of each rank. name: formats a rank.
    """
    waiting: dict[tuple[str, int, tuple[str, ...]], list[int]] = defaultdict(list)
    operations: dict[tuple[str, int, tuple[str, ...]], Operation] = {}
    for rank, found in sorted(waits.items()):
        for operation in found.pending:
            key = (operation.group, operation.number, () if operation.number else tuple(operation.names))
            waiting[key].append(rank)
            operations.setdefault(key, operation)
    lacking = {key: _list_lacking(operation, waits) for key, operation in operations.items()}

    def rank_causes(key: tuple[str, int, tuple[str, ...]]) -> tuple[bool, bool, int]:
        is_cause = any(not waits[rank].pending for rank in lacking[key])
        return is_cause, bool(lacking[key]), len(waiting[key])

    if not waiting:
        return ""
    key = max(waiting, key=rank_causes)
    verb = "waits" if len(waiting[key]) == 1 else "wait"
    begun = "all its ranks have begun"
    if lacking[key]:
        begun = f"{_name_ranks(lacking[key], name)} {'has' if len(lacking[key]) == 1 else 'have'} not begun"
    return f"{_name_ranks(waiting[key], name)} {verb} in {_describe(operations[key], name)}, which {begun}"


def _list_lacking(operation: Operation, waits: Mapping[int, Waits]) -> list[int]:
    """Return the ranks without which an operation cannot end, since they have not begun it."""
    if operation.number:
        return [
            rank
            for rank in operation.ranks
            if rank in waits and waits[rank].last.get(operation.group, 0) < operation.number
        ]
    lacking = set()
    for text in operation.names:
        found = _MESSAGE.fullmatch(text)
        if found is None or int(found["peer"]) >= len(operation.ranks):
            continue
        is_sent, rank = found["verb"] == "send", operation.ranks[int(found["peer"])]
        mirrored = f"{'recv' if is_sent else 'send'} {found['peer']}{'<-' if is_sent else '->'}{found['own']}"
        begun = [other for other in waits[rank].pending if other.group == operation.group]
        if not any(name.endswith(f":{mirrored}") for other in begun for name in other.names):
            lacking.add(rank)
    return sorted(lacking)


def _describe(operation: Operation, name: Callable[[int], str]) -> str:
    names = ", ".join(dict.fromkeys(operation.names))
    number = f" number {operation.number}" if operation.number else ""
    group = "" if operation.description in ("", "undefined") else f" {operation.description}"
    return f"{names}{number} of the group{group} of {_name_ranks(operation.ranks, name)}"


def _name_ranks(ranks: Iterable[int], name: Callable[[int], str]) -> str:
    names = [name(rank) for rank in ranks]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names[:_MOST_NAMED])}{more}"
