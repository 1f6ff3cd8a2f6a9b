"""How the ranks of a run share its sequences, chosen from its config and model."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig

from models.layers.layer import Layer
from models.parallel.shard import ContextParallel, find_length_multiple
from models.sharding.context_parallel import check_sequences, choose_parts
from models.sharding.sequence_obstacles import check_sequence_parts
from training.config.schema import RunConfig


def choose_run_parts(config: RunConfig, architecture: PretrainedConfig) -> ContextParallel:
    """Return how the ranks share sequences, for no rank in particular."""
    return choose_parts(
        architecture, config.context_parallel_mode.value, config.context_parallel_size, config.tensor_parallel_size
    )


def check_run_sequences(config: RunConfig, architecture: PretrainedConfig, layers: Sequence[Layer]) -> ContextParallel:
    """Return the result of `choose_run_parts`. layers: as `shard_layers` makes them. Raises UserError for sequences
    that cannot be shared so."""
    check_sequences(
        architecture,
        config.context_parallel_mode.value,
        config.context_parallel_size,
        config.tensor_parallel_size,
        config.max_seq_length,
    )
    parts = choose_run_parts(config, architecture)
    if config.sequence_parallel and config.tensor_parallel_size > 1:
        check_sequence_parts(
            architecture,
            layers,
            find_length_multiple(parts, config.sequence_parallel_size),
            config.max_seq_length,
        )
    return parts
