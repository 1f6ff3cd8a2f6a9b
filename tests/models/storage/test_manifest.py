"""A manifest detects files that have changed since they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.storage.manifest import (
    MANIFEST_NAME,
    HashedFile,
    find_wrong_content,
    find_wrong_size,
    read_manifest,
    write_manifest,
)

CONTENT = {"a.pt": b"first" * 1000, "b.safetensors": b"second", "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = {}
    for name, content in CONTENT.items():
        with HashedFile(tmp_path / name) as stream:
            for start in range(0, len(content), 7):  # in several writes
                stream.write(memoryview(content)[start : start + 7])
            records[name] = stream.finish()
    write_manifest(tmp_path, records)
    return tmp_path


def find_damage(folder: Path) -> str | None:
    return find_wrong_size(folder) or find_wrong_content(folder, CONTENT)


def test_what_is_whole_is_found_whole(folder: Path) -> None:
    assert find_damage(folder) is None
    records = read_manifest(folder)
    assert records is not None and {name: record.size for name, record in records.items()} == {
        name: len(content) for name, content in CONTENT.items()
    }
    assert (folder / "a.pt").read_bytes() == CONTENT["a.pt"]


@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_a_flipped_byte_is_found(folder: Path, place: int) -> None:
    content = bytearray(CONTENT["a.pt"])
    content[place] ^= 1
    (folder / "a.pt").write_bytes(content)
    assert find_wrong_size(folder) is None
    assert find_damage(folder) == f"{folder}/a.pt is damaged: its bytes are not those that were saved"


def test_a_truncated_and_a_missing_file_are_found(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes(b"sec")
    assert find_damage(folder) == f"{folder}/b.safetensors is damaged: 3 bytes, 6 were saved"
    (folder / "b.safetensors").unlink()
    assert find_damage(folder) == f"{folder}/b.safetensors is missing"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"files": {}}',
        '{"files": {"a.pt": {}}}',
        '{"files": {"../a.pt": {"size": 1, "xxh3_128": ""}}}',
    ],
)
def test_a_damaged_manifest_makes_nothing_whole(folder: Path, text: str) -> None:
    (folder / MANIFEST_NAME).write_text(text)
    assert (
        find_wrong_size(folder)
        == find_wrong_content(folder, CONTENT)
        == f"{folder}/{MANIFEST_NAME} is missing or damaged"
    )
