"""The reference model, which scores data once before training, for an objective with scored columns.

It is the model at `model_name_or_path`. A run that starts there computes with its own weights, a LoRA run with its
adapter switched off. A run that resumes finds what the run that it continues has left; where that is missing, or was
computed by other weights, it loads the reference's weights, scores the data, and reloads its own. So no rank ever holds
two models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from models.adapters.adapter import adapter_off
from models.weights.source import WeightSource
from training.pipeline.module import StageModule
from training.pipeline.preparation import copy_weights


@contextmanager
def hold_reference(module: StageModule, reference: WeightSource, own: WeightSource) -> Iterator[None]:
    """Make the stage compute as the reference model does. own: the source of its weights, which may be the same."""
    if module.options.adapter is not None:
        with adapter_off(module):
            yield
    elif own is reference:
        yield
    else:
        copy_weights(module.local_layers, reference, module.ranks)
        yield
        copy_weights(module.local_layers, own, module.ranks)
