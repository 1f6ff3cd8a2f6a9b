"""Finds the parameters that `transformers` keeps in fp32 in a model of 16 bits (`_keep_in_fp32_modules_strict`): from
5.24 on the gates of most mixtures, whose choice of experts depends on the last bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from models.layers.layer import Layer


def mark_fp32(config: PretrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with the names of the parameters that stay in fp32, found as `transformers` finds them: a
    pattern matches anywhere in a name."""
    patterns = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._keep_in_fp32_modules_strict
    if not patterns:
        return list(layers)
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return [replace(layer, fp32=_find_names(layer, kept)) if layer.owns_weights else layer for layer in layers]


def _find_names(layer: Layer, kept: re.Pattern[str]) -> frozenset[str]:
    names = (name for name, _ in layer.build_on_meta().named_parameters())
    return frozenset(name for name in names if kept.search(layer.hf_prefix + name))
