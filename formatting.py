"""Counts, bytes, seconds and tables as text, for the plan, the summary of a run and its reports."""

from __future__ import annotations

from collections.abc import Sequence


def render_bytes(count: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills: 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"


def render_seconds(seconds: float) -> str:
    """Return a time in ms, s, min or h: 12.3 ms, 2 min 5 s."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def render_cost(cost: float) -> str:
    """Return a sum of money: 1,234 or 12.34."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}"


def render_count(count: float) -> str:
    """Return a count with the suffix K, M, B or T: 7.62B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def render_rows(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table with right-aligned columns. One that is wider than `width` characters is transposed:
    each row becomes a column, as many next to each other as fit."""
    lines = _align([header, *rows])
    if width is None or len(lines[0]) <= width:
        return lines
    longest, cell = max(map(len, header)), max(len(cell) for row in rows for cell in row)
    fitting = max(1, (width - longest) // (cell + 2))
    turned = []
    for first in range(0, len(rows), fitting):
        shown = rows[first : first + fitting]
        turned += [
            *([""] if first else []),
            *_align([(name.ljust(longest), *cells) for name, *cells in zip(header, *shown, strict=True)]),
        ]
    return turned


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
