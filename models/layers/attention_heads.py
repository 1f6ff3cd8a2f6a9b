"""The heads of a model's attention, which may differ between its layers (Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig


def list_layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the config of each layer, or one config for all layers where they have the same."""
    configs: Sequence[PretrainedConfig] = config.per_layer_config if config.is_heterogeneous else [config]
    return configs


def find_head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Return the head sizes of queries and keys, and of values: multi-head latent attention has its own. config: of a
    layer."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "qk_head_dim", None) or head_size, getattr(config, "v_head_dim", None) or head_size
