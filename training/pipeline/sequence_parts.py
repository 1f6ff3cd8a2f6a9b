"""How the ranks of a run share its sequences: its config's and its model's to say."""

from __future__ import annotations

from transformers import PretrainedConfig

from models.parallel.context_parallel import check_sequences, choose_parts
from models.parallel.shard import ContextParallel
from training.config.schema import RunConfig


def choose_run_parts(config: RunConfig, architecture: PretrainedConfig) -> ContextParallel:
    """Of no rank in particular."""
    return choose_parts(
        architecture, config.context_parallel_mode.value, config.context_parallel_size, config.tensor_parallel_size
    )


def check_run_sequences(config: RunConfig, architecture: PretrainedConfig) -> ContextParallel:
    """What `choose_run_parts` returns. Raises UserError for sequences that cannot be shared so."""
    check_sequences(
        architecture,
        config.context_parallel_mode.value,
        config.context_parallel_size,
        config.tensor_parallel_size,
        config.max_seq_length,
    )
    return choose_run_parts(config, architecture)
