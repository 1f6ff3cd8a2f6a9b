"""Chooses the engine that trains a run."""

from __future__ import annotations

from training.config.schema import RunConfig
from training.distributed.topology import Layout
from training.engine.engine import Engine
from training.engine.pipeline_engine import start_pipeline
from training.engine.zero3 import start_zero3
from training.pipeline.module import StageModule


def start_engine(module: StageModule, config: RunConfig, layout: Layout, trains: bool = True) -> Engine:
    """Build the engine for this rank's stage. trains: False for an engine without an optimizer, which only evaluates;
    it shards nothing."""
    if trains and config.shards_weights:
        return start_zero3(module, config, layout)
    return start_pipeline(module, config, layout, trains)
