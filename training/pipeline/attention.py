"""Which attention kernel a run uses: its config's, its model's and this process's device's to say."""

from __future__ import annotations

from transformers import PretrainedConfig

from models.architecture.lookup import choose_attention
from training.config.precision import DTYPES
from training.config.schema import RunConfig
from training.distributed.process import has_accelerator


def choose_run_attention(config: RunConfig, architecture: PretrainedConfig) -> str:
    """Raises UserError for one that cannot be used."""
    gpu_dtype = DTYPES[config.precision] if has_accelerator() else None
    return choose_attention(architecture, config.attn_implementation.value, gpu_dtype)
