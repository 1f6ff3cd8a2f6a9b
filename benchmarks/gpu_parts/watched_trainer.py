"""The training command, which also keeps what its routers choose, in `output_dir/routers_N.pt` of each rank N."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.processes import TRAINER


def run_trainer(change: Callable[[], None]) -> None:
    """Run the command of this process's arguments. change: called once all of it is imported."""
    spec = importlib.util.spec_from_file_location("trainer_base_ds_mp", TRAINER)
    assert spec is not None and spec.loader is not None
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    import_work = trainer.import_work

    def import_changed(is_plan: bool) -> Any:
        """The command's own `import_work`, which imports torch when it is time to."""
        work = import_work(is_plan)
        change()
        return work

    trainer.import_work = import_changed
    sys.argv[0] = str(TRAINER)
    if trainer.prepare(trainer.SCRIPT, trainer.CONFIG_NAME):
        trainer.main()


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
