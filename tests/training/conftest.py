"""Fixtures of whole runs, for every test of training."""

from support.runs import finished, root, run  # noqa: F401
