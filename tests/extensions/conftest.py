"""Fixtures of whole runs."""

from support.runs import finished, root, run  # noqa: F401
