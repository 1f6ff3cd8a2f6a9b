"""Pinned (page-locked) host memory, which makes copies to and from a GPU fast."""

from __future__ import annotations


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that torch allocates for a pinned tensor of `nbytes`: the next power of two, so up to twice as
    much (torch 2.13, ATen/core/CachingHostAllocator.h, `allocate`)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
