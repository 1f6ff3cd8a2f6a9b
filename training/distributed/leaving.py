"""How a process ends before its time, from any thread: not in the middle of a save, which all ranks have paid for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_SECONDS_BETWEEN_LOOKS = 0.1
_saves: list[int] = []  # ids of the threads that write one


@contextmanager
def saving() -> Iterator[None]:
    """Within this context, in any thread, a save is under way. What it waits for fails when another rank has ended."""
    _saves.append(threading.get_ident())
    try:
        yield
    finally:
        _saves.remove(threading.get_ident())


def is_saving() -> bool:
    """Returns whether a save of this process is under way."""
    return bool(_saves)


def exit_after_save(code: int, may_wait: Callable[[], bool]) -> NoReturn:
    """End this process as soon as no save is under way. may_wait: called again and again; False gives the save up."""
    while is_saving() and may_wait():
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(code)
