"""Finds the parameters that `transformers` keeps in fp32 in a model of 16 bits (`_keep_in_fp32_modules_strict`): from
5.24 on the gates of most mixtures, whose choice of experts depends on the last bits. Others it keeps in a model of fp16
alone (`_keep_in_fp32_modules`): the norms of gpt-oss and AFMoE."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from models.layers.layer import Layer


def mark_fp32(config: PretrainedConfig, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with the names of the parameters that stay in fp32, found as `transformers` finds them: a
    pattern matches anywhere in a name."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    always, in_fp16 = (
        frozenset(patterns or ())
        for patterns in (model_class._keep_in_fp32_modules_strict, model_class._keep_in_fp32_modules)
    )
    if not always | in_fp16:
        return list(layers)
    return [
        replace(layer, fp32=_find_names(layer, always), fp32_in_fp16=_find_names(layer, always | in_fp16))
        if layer.owns_weights
        else layer
        for layer in layers
    ]


def _find_names(layer: Layer, patterns: Collection[str]) -> frozenset[str]:
    if not patterns:
        return frozenset()
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    names = (name for name, _ in layer.build_on_meta().named_parameters())
    return frozenset(name for name in names if kept.search(layer.hf_prefix + name))
