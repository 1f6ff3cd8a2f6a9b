"""Prints everything that a person sees of a command: lines, panels, and one bar at a time. They fit the width of a
terminal; elsewhere all output is plain lines.

Output goes to stderr as it was when the process started, even after `redirect_to_console` has sent the output of
libraries to a log. A new bar replaces the one before it until it ends.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from masking import mask_text

_SECONDS_BEFORE_BAR = 1.0  # work that takes less needs none
_SECONDS_BEFORE_PHASE = 2.0
_SECONDS_BEFORE_LINE, _SECONDS_BETWEEN_LINES = 10.0, 30.0  # where there is no terminal
_WIDTH = 80  # of a terminal that does not say
_BAR = "{desc} {n_fmt}/{total_fmt}{unit} |{bar}| {remaining} left{postfix}"
_COUNT = "{desc} {n_fmt}{unit}, {elapsed}"  # when the total is not known
Item = TypeVar("Item")

_kept: TextIO | None = None
_listeners: list[Callable[[], None]] = []  # to progress
_alive: list[Progress] = []  # the last of them is visible


def stream() -> TextIO:
    """Returns the stream that the person reads; where there is none, as after `2>&-`, one that nobody reads."""
    return _kept or sys.__stderr__ or _open_nowhere()


@cache
def _open_nowhere() -> TextIO:
    return open(os.devnull, "w")


def redirect_to_console(log: Path) -> None:
    """Redirects stdout and stderr of this process, native libraries included, to `log`; output of this module is not
    redirected."""
    global _kept
    _kept = open_unfailing(os.dup(stream().fileno()), stream().encoding)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def open_unfailing(file: int | Path, encoding: str = "utf-8") -> TextIO:
    """Opens a file, by its path or descriptor, for output that may get lost, but must not end a run: a log on a full
    disk, a screen that has gone away."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Unfailing(file, "a")), encoding, errors="backslashreplace", line_buffering=True
    )


class _Unfailing(io.FileIO):
    """Drops what cannot be written. Ctrl-C ends the `tee` of `deepspeed ... | tee log` too, before a run has saved."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def is_terminal() -> bool:
    return stream().isatty()


def measure_width(output: TextIO) -> int | None:
    """Returns the columns of a terminal, or None for any other stream, where nothing needs to fit."""
    if not output.isatty():
        return None
    try:
        return os.get_terminal_size(output.fileno()).columns or _WIDTH
    except OSError:
        return _WIDTH


def fit(text: str, width: int | None, indent: str = "  ") -> str:
    """Wraps lines that are longer than `width` between words, and indents the rest. A path is never broken, so that it
    can be copied, nor a line of a command that continues after a backslash."""
    if width is None:
        return text
    return "\n".join(
        line if len(line) <= width or line.endswith("\\") else _wrap(line, width, indent) for line in text.split("\n")
    )


def _wrap(line: str, width: int, indent: str, first: str = "") -> str:
    return textwrap.fill(
        line,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def say(text: str) -> None:
    """Prints lines, without secrets, above the bar if there is one."""
    _write(fit(mask_text(text), measure_width(stream())))


def _write(text: str) -> None:
    with tqdm.external_write_mode(file=stream()):
        print(text, file=stream(), flush=True)


def say_last(text: str) -> None:
    """Prints the last output of a process: ends all bars first, so that none is drawn after it."""
    for progress in reversed(list(_alive)):
        progress.end()
    say(text)


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 step" and "1,200 steps". noun: in the singular, with a regular plural;
    its first word where others follow ("sample split")."""
    head, space, rest = noun.partition(" ")
    return f"{number:,} {head}{'' if number == 1 else 's'}{space}{rest}"


def indent_lines(text: str) -> str:
    """Indents all lines of a text but its first."""
    return text.replace("\n", "\n  ")


def show_panel(title: str, facts: Mapping[str, str]) -> None:
    """Prints a title over named facts of one or more lines, without secrets; without a terminal `name: fact`, and what
    follows its first line indented."""
    rule = "\u2500" if "utf" in (stream().encoding or "").lower() else "-"
    shown = {name: mask_text(fact) for name, fact in facts.items()}
    _write(render_panel(title, shown, measure_width(stream()), rule))


def render_panel(title: str, facts: Mapping[str, str], width: int | None, rule: str) -> str:
    """Returns a panel with rules above and below, but not at the sides, so that a path or a command can be copied."""
    if width is None:
        return "\n".join([title, *(indent_lines(f"{name}: {fact}") for name, fact in facts.items())])
    longest = max(map(len, facts))
    indent = " " * (longest + 3)
    lines = [f"{rule * 2} {title} ".ljust(width, rule)]
    for name, fact in facts.items():
        first, *rest = fact.split("\n")
        lines.append(_wrap(first, width, indent, f" {name:<{longest}}  "))
        lines += [_wrap(line, width, f"{indent}  ", indent) for line in rest]
    return "\n".join([*lines, rule * width])


@contextmanager
def listen_to_progress(listener: Callable[[], None]) -> Iterator[None]:
    """Within this context `listener` is called whenever anything in this process advances, whether shown or not."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_progress() -> None:
    """Notifies the listeners; for work that takes long and shows no bar, such as reading one large file."""
    for listener in _listeners:
        listener()


def describe_progress() -> str:
    """Returns how far the innermost task of this process is, such as "saving step 8: 40% of 1.20GB"; empty without
    one."""
    return f"{_alive[-1]._what}: {_alive[-1]._describe()}" if _alive else ""


class Progress:
    """The progress of a task: a bar on a terminal, elsewhere a line from time to time if it takes long."""

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        done: float = 0,
        shown: bool = True,
        stays: bool = False,
    ) -> None:
        """unit: "B" is scaled. shown: False on a rank that prints nothing. stays: the bar stays on the screen at the
        end."""
        self._what, self._total, self._unit, self._done, self._shown = what, total, unit, done, shown
        self._next_line = time.monotonic() + _SECONDS_BEFORE_LINE
        self._bar: tqdm | None = None
        if shown and is_terminal():
            below = [other._bar for other in _alive if other._bar is not None]
            for bar in below:
                bar.clear()
                bar.disable = True
            self._bar = tqdm(
                desc=what,
                total=total,
                unit=unit if unit == "B" else f" {unit}" if unit else "",
                unit_scale=unit == "B",
                initial=done,
                leave=stays,
                file=stream(),
                dynamic_ncols=True,
                miniters=1,
                position=0,
                delay=0 if below or stays else _SECONDS_BEFORE_BAR,
                bar_format=_COUNT if total is None else _BAR,
            )
        _alive.append(self)

    def advance(self, count: float = 1) -> None:
        self.reach(self._done + count)

    def reach(self, done: float, total: float | None = None) -> None:
        """Sets the progress to `done`. total: where it was not known before."""
        if done != self._done:
            report_progress()
        self._done, self._total = done, total or self._total
        if self._bar is not None:
            if self._total != self._bar.total:
                self._bar.total, self._bar.bar_format = self._total, _BAR
            self._bar.update(done - self._bar.n)
        elif self._shown and (now := time.monotonic()) >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            say(f"{self._what}: {self._describe()}")

    def _describe(self) -> str:
        done, total = (
            f"{tqdm.format_sizeof(n)}B" if self._unit == "B" else f"{n:,} {self._unit}".strip()
            for n in (self._done, self._total or 0)
        )
        return f"{self._done / self._total:.0%} of {total}" if self._total else done

    def follow(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items, and counts each when the next is requested."""
        for item in items:
            yield item
            self.advance()

    def note(self, text: str) -> None:
        """Shows `text` at the end of the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def end(self) -> None:
        if self not in _alive:
            return
        _alive.remove(self)
        if self._bar is not None:
            self._bar.close()
            below = next((other._bar for other in reversed(_alive) if other._bar is not None), None)
            if below is not None:
                below.disable = False
                below.refresh()


@contextmanager
def progress(what: str, total: float | None = None, unit: str = "", shown: bool = True) -> Iterator[Progress]:
    """Shows progress during the block; arguments as for `Progress`."""
    shows = Progress(what, total, unit, shown=shown)
    try:
        yield shows
    finally:
        shows.end()


@contextmanager
def phase(what: str, shown: bool = True) -> Iterator[None]:
    """Prints `what` if the block takes more than two seconds and no bar is visible by then. shown: False on a rank that
    prints nothing."""
    timer = threading.Timer(_SECONDS_BEFORE_PHASE, _announce, [what])
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce(what: str) -> None:
    if all(progress._bar is None for progress in _alive):
        say(f"{what} ...")
