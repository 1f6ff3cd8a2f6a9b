"""The names of weights that published checkpoints hold and no layer reads: mostly layers that predict further tokens
(DeepSeek-V3, 2412.19437, section 2.2), which servers draft with.

Which they are follows from `transformers`: the names that a model's class ignores when it loads, and the layers that
config.json counts in addition to `num_hidden_layers`. Anything else that belongs to no layer is a mistake.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from models.further.table import FURTHER_LAYERS, count_published
from models.layers.wrapped import TEXT_CONFIG, Wrapper

# Old exports hold them: rotary frequencies and causal masks, which are computed.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")
_COMPUTED_WHERE_IGNORED = re.compile(r"(inv_freq|\.attention\.(masked_)?bias)$")
_NUMBERED = re.compile(r"^(.*?\.layers\.)(\d+)\.(.+)$")
_GROUP = re.compile(r"^((?:[^.]+\.)*?(?:layers\.\d+|mtp[^.]*)|[^.]+(?:\.[^.]+)?)\.")


def find_unread(
    config: PretrainedConfig, wrapper: Wrapper | None, names: Collection[str], read: Collection[str]
) -> tuple[set[str], set[str]]:
    """Return those of `names`, the tensors of a folder as they are named in memory, that belong to no part of the model
    and are no mistake: the weights, which an export keeps, and what is computed from the config.

    read: the names that the layers read. A layer with the parts of a decoder layer and no others belongs to neither:
    config.json has too few layers, since one that predicts further tokens has a projection of its own.
    """
    own, whole = list_ignored(config), _compile(wrapper.ignored if wrapper is not None else (), config)
    weights, computed = set(), set()
    for name in set(names) - set(read):
        alone = name if wrapper is None else wrapper.name_alone(name)
        is_ignored = _matches(own, alone) if wrapper is None or wrapper.is_text(name) else False
        is_ignored = is_ignored or (wrapper is not None and not wrapper.has(name) and _matches(whole, name))
        if _COMPUTED.search(alone) or (is_ignored and _COMPUTED_WHERE_IGNORED.search(alone)):
            computed.add(name)
        elif is_ignored:
            weights.add(name)
    return weights - set(_list_decoders(weights, read)), computed


def list_ignored(config: PretrainedConfig) -> list[re.Pattern[str]]:
    """Return patterns of names that published weights hold and no layer needs: those that `transformers` ignores, and
    the layers that predict further tokens."""
    first, further = config.num_hidden_layers, count_published(config)
    numbers = "|".join(map(str, range(first, first + further)))
    patterns = _compile(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._keys_to_ignore_on_load_unexpected or (), config)
    return [*patterns, *([re.compile(rf"\.layers\.({numbers})\.")] if further else [])]


def clear_further_layers(fields: dict[str, Any], config: PretrainedConfig) -> None:
    """Set the number of layers that predict further tokens to 0 in `fields`, the content of config.json, so that
    servers do not look for them. config: of the text model."""
    text_fields = fields.get(TEXT_CONFIG) or fields
    stated = False
    for level in (fields, text_fields):
        for key in [key for key in FURTHER_LAYERS if key in level]:
            level[key], stated = 0, True
    by_default = [key for key in FURTHER_LAYERS if getattr(config, key, None)]
    if by_default and not stated:
        text_fields[by_default[0]] = 0


def group_names(names: Iterable[str]) -> dict[str, int]:
    """Return the prefixes of tensors by layer or part, such as "model.layers.61", with their numbers of tensors."""
    counts: dict[str, int] = defaultdict(int)
    for name in sorted(names):
        counts[match[1] if (match := _GROUP.match(name)) else name] += 1
    return dict(counts)


def _compile(patterns: Iterable[str], config: PretrainedConfig) -> list[re.Pattern[str]]:
    """Return the patterns without those of models with fewer layers: `transformers` lists the published sizes of a
    family one by one, and the further layer of one is an ordinary layer of another."""
    numbered = [(pattern, re.search(r"layers\\?\.(\d+)", pattern)) for pattern in patterns]
    return [re.compile(text) for text, number in numbered if not number or int(number[1]) >= config.num_hidden_layers]


def _matches(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _list_decoders(names: Collection[str], read: Collection[str]) -> Iterator[str]:
    """Yield those of `names` that are in a layer next to the decoder layers with no other parts than theirs."""
    ordinary = _list_parts(read)
    for base, layers in _list_parts(names).items():
        known = set().union(*ordinary.get(base, {}).values())
        for number, parts in layers.items():
            if parts <= known:
                yield from (f"{base}{number}.{part}" for part in parts)


def _list_parts(names: Iterable[str]) -> dict[str, dict[str, set[str]]]:
    """Return the parts of numbered layers, by the list that they are in and their number."""
    parts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if (match := _NUMBERED.match(name)) is not None:
            parts[match[1]][match[2]].add(match[3])
    return parts
