"""The keys of preference objectives and reward models."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from training.config.ranges import below, positive, zero_or_more


class DPOLossType(Enum):
    """The variants of the DPO loss, see `dpo.py`."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"


class NLLReduction(Enum):
    """The reduction of an answer's negative log-likelihood over its tokens, see `cpo.py`."""

    mean = "mean"
    sum = "sum"


@dataclass
class DPOConfig:
    """The group `dpo`."""

    beta: float = positive(default=0.1)  # how far from the reference the model may go: the lower, the farther
    # The fraction of preferences assumed to be wrong, with sigmoid and robust
    label_smoothing: float = below(0.5, note="at 0.5 no preference is left", default=0.0)
    loss_type: DPOLossType = DPOLossType.sigmoid
    # Times the negative log-likelihood per token of the chosen answer, added to the loss
    sft_coef: float = zero_or_more(note="0 turns it off", default=0.0)


@dataclass
class ORPOConfig:
    """The group `orpo`."""

    beta: float = positive(default=0.1)  # times the odds ratio's term; the paper's lambda


@dataclass
class SimPOConfig:
    """The group `simpo`."""

    beta: float = positive(default=2.0)  # scale of the rewards
    # The margin by which the reward of the chosen answer should exceed the other
    gamma: float = zero_or_more(note="0 turns it off", default=0.5)
    sft_coef: float = zero_or_more(note="0 turns it off", default=0.0)  # as in `DPOConfig`


@dataclass
class CPOConfig:
    """The group `cpo`."""

    beta: float = positive(default=0.1)  # scale of the log-probabilities, summed over tokens
    alpha: float = zero_or_more(note="0 turns it off", default=1.0)  # times the chosen answer's negative log-likelihood
    nll_reduction: NLLReduction = NLLReduction.mean


@dataclass
class RewardConfig:
    """The group `reward`."""

    # Times the square of the sum of a pair's scores, which keeps them around zero
    centering_coef: float = zero_or_more(note="0 turns it off", default=0.0)


@dataclass
class KTOConfig:
    """The group `kto`."""

    beta: float = positive(default=0.1)  # as in `DPOConfig`
    desirable_weight: float = positive(default=1.0)  # of the losses of liked answers
    undesirable_weight: float = positive(default=1.0)  # of the losses of disliked answers


@dataclass
class PairKeys:
    """Further keys of `data`: fields of a record."""

    chosen_field: str | None = None  # the preferred answer
    rejected_field: str | None = None  # the other answer
