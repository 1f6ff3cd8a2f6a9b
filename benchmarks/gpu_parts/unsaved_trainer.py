"""The training command, without what it leaves at its end: checkpoints and the exported model.

A benchmark of 8B would write 130 GB for a few seconds of training, more than many a machine's disk has. Everything else
is the command itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
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


def leave_out_saving() -> None:
    import training.run
    from training.checkpoint.writer import CheckpointWriter

    CheckpointWriter.save = CheckpointWriter.check_room = lambda *arguments, **named: None  # type: ignore
    training.run.export = lambda *arguments: None


if __name__ == "__main__":
    run_trainer(leave_out_saving)
