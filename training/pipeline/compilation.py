"""`torch.compile` of layers, where compiled code is kept, and the point where it stops compiling without an error.

Layers of a class share one function, which contains the layer and its recomputation and takes the context's values as
arguments. It is compiled again for what differs between layers or between batches (a kind of attention, lengths that
change, training or evaluation), up to a limit; from then on what is new runs uncompiled. torch reports that only in its
own log (2.13, torch/_dynamo/convert_frame.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.compiler.config as compiler
from torch._dynamo.callback import callback_handler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import console
from models.layers.decoder import PipelineDecoderLayer

VARIANTS = 32  # of one function; torch's own limit, 8, is reached by two kinds of layers with changing lengths
_LOGGER, _LIMIT_HIT = "torch._dynamo.convert_frame", "hit config."
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(layers: Iterable[PipelineDecoderLayer], rank: int) -> None:
    """Compile the function that each layer runs, when it is first called; names and parameters stay.

    Where a part of a layer cannot be compiled (a mixer on packed rows), torch runs the checkpoint as it is, and what is
    around that part is compiled by itself. rank: of this process, for a warning.
    """
    compiler.recompile_limit = max(compiler.recompile_limit, VARIANTS)
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(handler, _LimitWarning) for handler in logger.handlers):
        logger.addHandler(_LimitWarning(rank))
    report_compilation()
    for layer in layers:
        layer.transform_apart = torch.compile(layer.transform)
        layer.run = torch.compile(layer.run)  # type: ignore[method-assign]


def keep_compiled(folder: Path) -> None:
    """Keep compiled code in `folder`, where the other ranks of a host and later runs find it, unless the user has named
    another one in TORCHINDUCTOR_CACHE_DIR. When torch is imported, it sets that variable to a temporary folder (2.13,
    torch/_dynamo/package.py)."""
    temporary = os.path.abspath(default_cache_dir())
    if os.environ.get(_FOLDER, temporary) == temporary:
        os.environ[_FOLDER] = str(folder.absolute())


def report_compilation() -> None:
    """Report progress whenever this process starts or ends to compile something: a pass is not stuck meanwhile."""
    for callbacks in (callback_handler.start_callbacks, callback_handler.end_callbacks):
        if _report_progress not in callbacks:
            callbacks.append(_report_progress)


def _report_progress(_: object) -> None:
    console.report_progress()


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
