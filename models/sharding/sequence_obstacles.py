"""Finds parts of a model that prevent splitting sequences between the blocks that tensor parallelism shards."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig

from errors import UserError
from models.architecture.alike import map_alike
from models.experts.grouped import is_stack
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer
from models.layers.random_keys import find_jitter
from models.layers.recurrent import find_mixers
from models.layers.sharding_styles import list_blocks


def check_sequence_parts(config: PretrainedConfig, layers: Sequence[Layer], multiple: int, max_seq_length: int) -> None:
    """Check that sequences can be split between blocks. Raises UserError for layers that need all tokens outside of a
    sharded block, for routers with jitter, and for a length that is not a `multiple`. layers: with styles."""
    if (jitter := find_jitter(config)) is not None:
        raise UserError(
            f"sequence_parallel: the routers of this '{config.model_type}' draw random numbers ({jitter}="
            f"{getattr(config, jitter):g} in its config.json), of which each rank would draw its own; give "
            f"sequence_parallel=false, or set {jitter} to 0 there"
        )
    for layer, part in zip(layers, map_alike(_find_whole, layers), strict=True):
        if part is not None:
            name = (layer.hf_prefix + part).rstrip(".")
            raise UserError(
                f"sequence_parallel: a '{config.model_type}' cannot keep parts of sequences between its blocks: "
                f"'{name}' needs all tokens, and tensor parallelism does not shard it; give sequence_parallel=false"
            )
    if max_seq_length % multiple:
        below = max_seq_length // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        raise UserError(
            f"sequence_parallel: each rank has an equal part of every sequence, and max_seq_length={max_seq_length} is "
            f"not a multiple of {multiple}; the nearest is {nearest}"
        )


def _find_whole(layer: Layer) -> str | None:
    """Return the name of a part of the layer that looks at several tokens, or counts them, outside of all blocks."""
    if getattr(layer.module_class, "sees_positions", False):
        return ""
    if not issubclass(layer.module_class, PipelineDecoderLayer):
        return None
    module, blocks = layer.build_on_meta(), list_blocks(layer.styles)
    mixers = {id(mixer) for mixer in find_mixers(module, getattr(module, "attention_type", ""))}
    for name, part in module.named_modules():
        looks_around = "Attention" in type(part).__name__ or id(part) in mixers or is_stack(part)
        if looks_around and not any(f"{name}.".startswith(f"{block}.") for block in blocks):
            return name
    return None
