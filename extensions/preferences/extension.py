"""Preferences: pairs of answers of which one was preferred, single answers that were liked or not, reward models."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

_OBJECTIVES = ("cpo", "dpo", "kto", "orpo", "reward", "simpo")
EXTENSION = Extension(
    folder=Path(__file__).parent,
    keys={
        "dpo": "extensions.preferences.keys:DPOConfig",
        "orpo": "extensions.preferences.keys:ORPOConfig",
        "simpo": "extensions.preferences.keys:SimPOConfig",
        "cpo": "extensions.preferences.keys:CPOConfig",
        "reward": "extensions.preferences.keys:RewardConfig",
        "kto": "extensions.preferences.keys:KTOConfig",
        "data": "extensions.preferences.keys:PairKeys",
    },
    refusals="extensions.preferences.refusals:ROWS",
    data_kinds="extensions.preferences.encoders:KINDS",
    objectives="extensions.preferences.objectives:OBJECTIVES",
    hints={
        "data=dpo": "data=preference task=dpo",
        "data=kto": "data=unpaired_preference task=kto",
        "dpo_beta": "dpo.beta",
        "pref_beta": "dpo.beta",
        "dpo_label_smoothing": "dpo.label_smoothing",
        "rpo_alpha": "dpo.sft_coef",
        "sft_loss_ratio": "dpo.sft_coef",
        "simpo_gamma": "simpo.gamma",
        "cpo_alpha": "cpo.alpha",
        "kto_desirable_weight": "kto.desirable_weight",
        "kto_chosen_weight": "kto.desirable_weight",
        "kto_undesirable_weight": "kto.undesirable_weight",
        "kto_rejected_weight": "kto.undesirable_weight",
        "center_rewards_coefficient": "reward.centering_coef",
    },
    aliases={
        "data.encoders.preference": "extensions.preferences.encoders",
        "data.storage.mismatched": "extensions.preferences.mismatched",
        "models.losses.pairs": "extensions.preferences.pairs",
        "training.objectives.preference": "extensions.preferences.pairs",
        **{f"training.objectives.{name}": f"extensions.preferences.{name}" for name in _OBJECTIVES},
    },
)
