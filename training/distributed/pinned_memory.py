"""Pinned (page-locked) memory of the host: what copies to and from a card are fast with."""

from __future__ import annotations


def pinned_bytes(nbytes: int) -> int:
    """What torch's allocator takes from the host for a pinned tensor of `nbytes`: the next power of two, so up to twice
    as much (torch 2.13, ATen/core/CachingHostAllocator.h, `allocate`)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
