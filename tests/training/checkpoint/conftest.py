"""Fixtures of runs that continue at another layout."""

from support.resuming import layout_root, run_at  # noqa: F401
