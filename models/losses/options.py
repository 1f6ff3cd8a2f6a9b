"""Enums of the losses; members are named as in a config.

The schema of a run imports this before torch is loaded, so nothing imported here may be slow.
"""

from enum import Enum


class Divergence(Enum):
    """How far a student's distribution is from its teacher's, see `models/losses/divergence.py`."""

    forward = "forward"
    reverse = "reverse"
    jensen_shannon = "jensen_shannon"
