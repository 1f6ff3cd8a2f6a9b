"""The list of shards, and what changed in it."""

from pathlib import Path

import pytest

from data.streaming.shards import find_changes, list_shards
from errors import UserError


def test_a_shard_that_changed_is_named_and_one_that_moved_is_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        for number in range(6):
            (folder / f"{number}.jsonl").write_text("{}\n" * (number + 1))

    def describe(folder: Path) -> list[list[str]]:
        return [shard.describe() for shard in list_shards([str(folder / "*.jsonl")], "train_file")]

    before = describe(one)
    assert find_changes(before, describe(two)) == ("6 shards", "6 shards")
    assert find_changes(before, before[::-1]) == ("6 shards", "6 shards in another order")
    (two / "3.jsonl").write_text("{}\n" * 5)
    was, now = find_changes(before, describe(two))
    assert was.startswith("6 shards, among them 3.jsonl of 12 bytes, hash ")
    assert now.startswith("6 shards, among them 3.jsonl of 15 bytes, hash ")
    (two / "3.jsonl").write_text("[]\n" * 4)
    assert find_changes(before, describe(two))[0].startswith("6 shards, among them 3.jsonl"), "of the same size"
    (two / "6.jsonl").write_text("")
    assert "7 shards, among them 3.jsonl" in find_changes(before, describe(two))[1]


def test_a_tokenized_corpus_needs_no_streaming(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").write_bytes(b"")
    with pytest.raises(UserError, match="corpus.bin is tokenized already, and is read in place; give data.streaming=f"):
        list_shards([str(tmp_path / "corpus.bin")], "train_file")
