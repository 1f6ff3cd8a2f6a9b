"""Patterns of `freeze` that are invalid."""

from __future__ import annotations

import pytest
from support.families import build_family, build_family_config

from errors import UserError
from models.adapters.freeze import check_freeze
from models.architecture.lookup import build_layers

LLAMA = build_layers(build_family("llama").config)


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        (["layer5"], "freeze: 'layer5' matches no weight; they are named like 'lm_head.weight'"),
        (["("], "freeze: '(' is not a valid regular expression"),
        (["."], "freeze=['.'] leaves nothing to train"),
    ],
)
def test_invalid_freeze_patterns(freeze: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_freeze(freeze, LLAMA)
    assert expected in str(caught.value)


@pytest.mark.parametrize("pattern", [r"^(?!.*\.indexer\.)", r"^(?!.*(\.indexer\.|e_score_correction_bias))"])
def test_indexers_and_buffers_are_never_trained(pattern: str) -> None:
    """Patterns that leave nothing else leave nothing to train."""
    layers = build_layers(build_family_config("deepseek_v32"))
    with pytest.raises(UserError, match="leaves nothing to train"):
        check_freeze([pattern], layers)
    check_freeze([r"^(?!.*\.(indexer|o_proj)\.)"], layers)
