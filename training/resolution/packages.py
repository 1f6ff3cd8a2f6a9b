"""Packages that some keys need and not every machine has. A run refuses to start without them; a plan does."""

from __future__ import annotations

from importlib.util import find_spec

from errors import UserError
from models.layers import flash_kernels
from training.config.schema import AttnImplementation, FlashKernels, OptimizerName, RunConfig
from training.trackers.build import build_trackers

_ATTENTION = {
    AttnImplementation.flash_attention_2: "flash_attn",
    AttnImplementation.flash_attention_3: "flash_attn_interface",
}
BITSANDBYTES = "bitsandbytes"


def has_package(name: str) -> bool:
    """Returns whether a package is installed, without importing it."""
    return find_spec(name) is not None


def check_packages(config: RunConfig) -> None:
    """Raises UserError for the first key whose package is missing, with what to install or to give instead."""
    package = _ATTENTION.get(config.attn_implementation)
    if package is not None and not has_package(package):
        raise UserError(
            f"attn_implementation={config.attn_implementation.value} needs the package {package}; install it, or use "
            "sdpa"
        )
    if config.flash_kernels is FlashKernels.fa3 and not has_package(flash_kernels.PACKAGE):
        raise UserError(
            f"flash_kernels=fa3 needs the package {flash_kernels.PACKAGE} (FlashAttention-3); install it, or give "
            "flash_kernels=torch"
        )
    build_trackers(config.logger)
    if config.adapter.quantizes and not has_package(BITSANDBYTES):
        raise UserError(
            "adapter.load_in_4bit=true needs the package bitsandbytes (pip install bitsandbytes), or leave it false"
        )
    if config.optimizer.name is OptimizerName.adamw_8bit and not has_package(BITSANDBYTES):
        raise UserError(
            "optimizer=adamw_8bit needs the package bitsandbytes (pip install bitsandbytes); without it give "
            "optimizer=adamw optimizer.state_dtype=bf16"
        )
