"""Which operation ranks wait in, and which ranks lack it: from traces in the form that torch writes them."""

from __future__ import annotations

from typing import Any

import pytest

from training.distributed import flight_recorder
from training.distributed.flight_recorder import describe_waits, find_waits

GROUPS = {"0": [0, 1, 2, 3], "7": [2, 3]}


def entry(name: str, number: int, group: str = "0", description: str = "default_pg", ended: bool = False) -> Any:
    is_message = name.startswith(("nccl:send", "nccl:recv"))
    return {
        "process_group": [group, description], "profiling_name": name, "is_p2p": is_message, "retired": ended,
        "collective_seq_id": 0 if is_message else number, "p2p_seq_id": number if is_message else 0,
        "state": "completed" if ended else "scheduled",
    }  # fmt: skip


def coalesced(number: int, *names: str, ended: bool = False) -> list[Any]:
    """Messages in one launch: NCCL ends only the entry of all of them."""
    return [*(entry(name, number, "7", "undefined") for name in names), {
        **entry("nccl:coalesced", number, "7", "undefined", ended), "is_p2p": True, "p2p_seq_id": number,
    }]  # fmt: skip


def describe(*traces: list[Any]) -> str:
    """By the entries that each rank has recorded."""
    return describe_waits({
        rank: find_waits({"nccl": {"entries": entries}}, GROUPS) for rank, entries in enumerate(traces)
    })  # fmt: skip


def test_the_collective_and_the_ranks_that_have_not_begun_it() -> None:
    done, begun = entry("nccl:all_reduce", 4, ended=True), entry("nccl:all_reduce", 5)
    assert describe([done, begun], [done], [done, begun], []) == (
        "ranks 0, 2 wait in nccl:all_reduce number 5 of the group default_pg of ranks 0, 1, 2, 3, "
        "which ranks 1, 3 have not begun"
    )
    assert describe([begun], [begun], [begun], [begun]).endswith("which all its ranks have begun")
    assert describe([done], [done], [done], [done]) == ""


def test_the_cause_is_a_rank_that_waits_in_nothing() -> None:
    """Rank 3 waits for rank 2, and all the others wait for rank 0, which is elsewhere."""
    begun, message = entry("nccl:all_reduce", 5), entry("nccl:recv 1<-0", 9, "7", "undefined")
    assert describe([], [begun], [begun], [message]) == (
        "ranks 1, 2 wait in nccl:all_reduce number 5 of the group default_pg of ranks 0, 1, 2, 3, "
        "which ranks 0, 3 have not begun"
    )
    assert describe([], [], [], [message]) == (
        "rank 3 waits in nccl:recv 1<-0 of the group of ranks 2, 3, which rank 2 has not begun"
    )


def test_messages_are_begun_where_the_peer_has_begun_the_other_end_of_them() -> None:
    pair = coalesced(3, "nccl:send 0->1", "nccl:recv 0<-1"), coalesced(8, "nccl:send 1->0", "nccl:recv 1<-0")
    assert describe([], [], *pair).endswith("of the group of ranks 2, 3, which all its ranks have begun")
    lone = coalesced(3, "nccl:send 0->1", ended=True) + coalesced(4, "nccl:send 0->1", "nccl:recv 0<-1")
    assert describe([], [], lone, coalesced(8, "nccl:recv 1<-0")).endswith("which rank 3 has not begun")
    assert describe([], [], coalesced(3, "nccl:send 0->1", ended=True), []) == ""


def test_a_list_of_many_ranks_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROUPS, "0", list(range(12)))
    traces = [[entry("nccl:all_reduce", 1)], *([] for _ in range(11))]
    assert describe(*traces).endswith("which ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more have not begun")


def test_a_build_without_a_recorder_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight_recorder.exists() and set(flight_recorder.read_traces()) >= {"gloo"}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(flight_recorder._distributed_c10d, name, raising=False)
    assert not flight_recorder.exists() and flight_recorder.read_traces() == {}
    assert describe_waits({0: find_waits({}, GROUPS)}) == ""
