"""The features that `plan=search` does not go together with."""

from __future__ import annotations

from dataclasses import replace

from training.config.incompatible import GROUPED, ONLINE_TEACHER, Row, Scope, has_value

SEARCH = replace(has_value("plan", "search"), scope=Scope.plan)
ROWS: tuple[Row, ...] = (
    (GROUPED, {SEARCH: "the search varies the number of replicas, and the state is sharded over all of them; "
        "give plan=true, or sharding_parallel_size=null"}),
    (ONLINE_TEACHER, {SEARCH: "the search does not count the teacher's memory; give plan=true"}),
)  # fmt: skip
