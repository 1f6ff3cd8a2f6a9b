"""Names what keeps a model from being a pipeline of its layers, where its config says so.

A small model shows the first obstacle that it meets, which need not be the one that matters: layers that exchange more
than one stream of hidden states pass in one process, and no stage could send them.
"""

from __future__ import annotations

from transformers import PretrainedConfig

_STREAMS = ("hc_mult", "hc_count")  # of DeepSeek-V4, GLM-5 Next and Hy 4; of Qwen 4
_INDEXED = ("indexed_attention", "compressed_sparse_attention")


def list_obstacles(config: PretrainedConfig) -> list[str]:
    """Return what a model of this config has that no pipeline of its layers computes, in words; empty where its config
    tells of nothing. An indexer alone is not listed: its gradients show it."""
    found = []
    if (streams := max(getattr(config, name, None) or 1 for name in _STREAMS)) > 1:
        found.append(f"hyper-connections ({streams} streams of hidden states, where a stage sends one)")
    if "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):  # "store" alone is read by other models (5.24)
        found.append("layers that use the keys and values of earlier ones")
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        found.append("layers that attend to the tokens that earlier ones have chosen")
    if getattr(config, "ple_layer_ids", None):
        found.append("layers with embeddings of hashed n-grams of the tokens")
    if "hash_moe" in (getattr(config, "mlp_layer_types", None) or ()):
        found.append("experts that a hash of the token chooses")
    if found and set(_INDEXED) & set(getattr(config, "layer_types", None) or ()):
        found.append("indexers, which are trained to another loss")
    return found
