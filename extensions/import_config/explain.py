"""Explains a key of another trainer in the words of README.md, or by the nearest key of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from training.config.foreign_keys import find_hint
from training.config.key_table import list_types

PAGE = Path(__file__).with_name("README.md")


@cache
def read_rows(heading: str) -> list[tuple[str, str]]:
    """Return the rows under a heading of the page: (left cell, right cell)."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [(cells[0], cells[1]) for line in section.splitlines() if len(cells := _split(line)) == 2]


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def list_documented(headings: Sequence[str]) -> Iterator[str]:
    """Yield the keys in the left columns under some headings."""
    for heading in headings:
        for left, _ in read_rows(heading):
            for code in re.findall(r"`([^`]+)`", left):
                yield from re.findall(r"\w+", code)


def explain(key: str, headings: Sequence[str]) -> str:
    """Return what takes the place of a key, in the words of the page, else the nearest key of ours."""
    for heading in headings:
        for left, right in read_rows(heading):
            if any(key in re.findall(r"\w+", code) for code in re.findall(r"`([^`]+)`", left)):
                return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", right).replace("`", "")
    if hint := find_hint(key, list_types()):
        return f"none; the nearest key here is {hint}"
    return "none; docs/configure.md lists every key"
