"""The training command, which also keeps what its routers choose, in `output_dir/routers_N.pt` of each rank N."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.unsaved_trainer import run_trainer


def keep_choices() -> None:
    import training.build
    from benchmarks.gpu_parts.routers import RouterChoices

    build_stage = training.build.build_stage
    output = next(word.partition("=")[2] for word in sys.argv if word.startswith("output_dir="))

    def build_watched(*arguments: Any, **named: Any) -> Any:
        stage, choices = build_stage(*arguments, **named), RouterChoices()
        choices.watch(stage)
        stage.register_forward_pre_hook(lambda _, inputs: choices.start(inputs[0][0]))
        atexit.register(lambda: choices.save(Path(output) / f"routers_{os.environ.get('RANK', '0')}.pt"))
        return stage

    training.build.build_stage = build_watched


if __name__ == "__main__":
    run_trainer(keep_choices)
