"""The features that `plan=search` does not go together with."""

from __future__ import annotations

from dataclasses import replace

from training.config.incompatible import GROUPED, Row, Scope, has_value

SEARCH = replace(has_value("plan", "search"), scope=Scope.plan)
ROWS: tuple[Row, ...] = (
    (GROUPED, {SEARCH: "the search varies the number of replicas, and the state is sharded over all of them; "
        "give plan=true, or sharding_parallel_size=null"}),
)  # fmt: skip
