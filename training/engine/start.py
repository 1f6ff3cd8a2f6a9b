"""Which engine trains a run."""

from __future__ import annotations

from training.config.schema import RunConfig
from training.distributed.topology import Layout
from training.engine.engine import Engine
from training.engine.pipeline_engine import start_pipeline
from training.engine.zero3_engine import start_plain
from training.pipeline.module import StageModule


def start_engine(module: StageModule, config: RunConfig, layout: Layout, trains: bool = True) -> Engine:
    """The engine around this rank's stage, with the optimizer over its parameters, or without one when it only
    evaluates: nothing is sharded then."""
    if trains and config.zero_stage == 3:
        return start_plain(module, config, layout)
    return start_pipeline(module, config, layout, trains)
