"""The names of labels that are found in the records."""

from __future__ import annotations

import json
from pathlib import Path

from support.configs import build_config

from data.sources.selection import TAKE_ALL
from training.inputs.labels import find_labels


def test_numbers_that_are_equal_keep_one_order_on_every_rank(tmp_path: Path) -> None:
    """The order of a set of texts differs between processes."""
    names = ["0" * zeros + "1" for zeros in range(9)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": "a", "label": name}) + "\n" for name in [*names, "0"]))
    data = build_config("data=classification").data
    assert find_labels([str(file)], data, TAKE_ALL) == ["0", *sorted(names)]
