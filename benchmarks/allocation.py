"""Measures what the C library does with memory that is freed."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Keeps freed memory, as a GPU's allocator does; glibc returns large tensors to the system, and gets them page by
    page again. By mallopt(3): no tensor has a mapping of its own, and the heap does not shrink."""
    allocator, most_mappings, trim_threshold = ctypes.CDLL(None), -4, -1
    if not (allocator.mallopt(most_mappings, 0) and allocator.mallopt(trim_threshold, -1)):
        print("this C library does not keep freed memory on request")
