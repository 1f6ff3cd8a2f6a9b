"""The closed choices of the losses; members are named as a user does.

The schema of a run imports this before torch is loaded, so nothing imported here may be slow.
"""

from enum import Enum


class DPOLossType(Enum):
    """See `training/objectives/dpo.py`."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"


class NLLReduction(Enum):
    """Of the negative log-likelihood of an answer over its tokens; see `training/objectives/cpo.py`."""

    mean = "mean"
    sum = "sum"
