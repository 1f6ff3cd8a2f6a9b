"""The anonymous memory of this process: pages of mapped files, which the kernel can reclaim, are
not counted."""

from __future__ import annotations

import re
import threading
from pathlib import Path

SECONDS_BETWEEN_SAMPLES = 0.002


class AnonymousPeak:
    """Watches, from a thread of its own, how many bytes a block adds at most."""

    def __enter__(self) -> AnonymousPeak:
        self._before = self._peak = read_anonymous_bytes()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        self._peak = max(self._peak, read_anonymous_bytes())

    @property
    def added(self) -> int:
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_SAMPLES):
            self._peak = max(self._peak, read_anonymous_bytes())


def read_anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
