"""`torch.compile` of layers, and the point where it stops compiling without an error.

Layers of a class share one function. It is compiled again for what differs between them or between batches (a kind of
attention, lengths that change, training or evaluation), up to a limit; from then on what is new runs uncompiled. torch
reports that only in its own log (2.13, torch/_dynamo/convert_frame.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.compiler.config as compiler
from torch import nn

import console

VARIANTS = 32  # of one function; torch's own limit, 8, is reached by two kinds of layers with changing lengths
_LOGGER, _LIMIT_HIT = "torch._dynamo.convert_frame", "hit config."


def compile_layers(layers: Iterable[nn.Module], rank: int) -> None:
    """Compile each layer by itself, when it is called; names and parameters stay. rank: of this process, for a
    warning."""
    compiler.recompile_limit = max(compiler.recompile_limit, VARIANTS)
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(handler, _LimitWarning) for handler in logger.handlers):
        logger.addHandler(_LimitWarning(rank))
    for layer in layers:
        layer.compile()


class _LimitWarning(logging.Handler):
    """One line on the screen when the limit is reached for the first time."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._rank, self._was_shown = rank, False

    def emit(self, record: logging.LogRecord) -> None:
        if _LIMIT_HIT in record.getMessage() and not self._was_shown:
            self._was_shown = True
            console.say(
                f"warning: compile=true: rank {self._rank} has compiled {compiler.recompile_limit} variants of a "
                "layer, and runs further ones uncompiled, which is slower; data.pad_to=max_seq_length gives all "
                "batches one length, or set compile=false (the reason is in its log: logs/)"
            )
