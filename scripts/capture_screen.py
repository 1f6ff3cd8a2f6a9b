"""Runs a command in a terminal of a given width and prints what remains on its screen.

    python scripts/capture_screen.py --width 80 make demo

Lines that the terminal had to break are marked with `>`, since no output should be wider than the terminal.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass

_HEIGHT = 50
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|\x08|([^\x1b\r\n\x08]+)")


@dataclass(frozen=True)
class Capture:
    code: int
    written: str  # as it was sent to the terminal
    # the screen at the end, after the lines that have scrolled off; longer than the terminal where it broke them
    lines: list[str]


def capture(
    command: Sequence[str],
    width: int,
    cwd: str | os.PathLike[str] | None = None,
    environment: dict[str, str] | None = None,
) -> Capture:
    """Runs the command with all three streams on a terminal of `width` columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, width, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cwd,
        env={**(environment or os.environ), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(slave)
    written = bytearray()
    try:
        while chunk := os.read(master, 65536):
            written += chunk
    except OSError:  # how Linux says that the last process on the terminal is gone
        pass
    os.close(master)
    text = written.decode(errors="replace")
    return Capture(process.wait(), text, replay(text))


def replay(written: str) -> list[str]:
    """The lines on a terminal that was sent this. Knows what progress bars and colours send; no line is broken."""
    lines, row, column = [""], 0, 0
    for token in _TOKEN.finditer(written):
        argument, command, text = token.groups()
        if text is not None:
            lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
            column += len(text)
        elif token[0] == "\r":
            column = 0
        elif token[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token[0] == "\x08":
            column = max(0, column - 1)
        elif command == "A":
            row = max(0, row - int(argument or 1))
        elif command == "K":
            lines[row] = "" if argument == "2" else lines[row][:column]
    return [line.rstrip() for line in lines]


def main() -> int:
    """Returns the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=80, metavar="COLUMNS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    captured = capture(arguments.command, arguments.width)
    for line in captured.lines:
        print(f"{'>' if len(line) > arguments.width else ' '} {line}")
    return captured.code


if __name__ == "__main__":
    sys.exit(main())
