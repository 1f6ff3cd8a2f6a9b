"""Enums of the losses; members are named as in a config.

The schema of a run imports this before torch is loaded, so nothing imported here may be slow.
"""

from enum import Enum


class DPOLossType(Enum):
    """The variants of the DPO loss, see `training/objectives/dpo.py`."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"


class NLLReduction(Enum):
    """The reduction of an answer's negative log-likelihood over its tokens, see `training/objectives/cpo.py`."""

    mean = "mean"
    sum = "sum"


class Divergence(Enum):
    """How far a student's distribution is from its teacher's, see `models/losses/divergence.py`."""

    forward = "forward"
    reverse = "reverse"
    jensen_shannon = "jensen_shannon"
