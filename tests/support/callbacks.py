"""Callbacks of a run, as a user writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.callbacks import RunView


@dataclass
class Diary:
    """Records its calls on each rank, and makes the requests it is configured with on the last rank only."""

    save_at: int = 0
    stop_at: int = 0

    def on_step(self, run: RunView) -> None:
        assert not list((run.output_dir / "hf").glob("*"))
        self._write(run, "step", run.num_tokens, run.record.get("step"))
        if run.rank == run.world_size - 1:
            if run.step == self.save_at:
                run.save()
            if run.step == self.stop_at:
                run.stop()

    def on_evaluate(self, run: RunView, metrics: dict[str, Any]) -> None:
        self._write(run, "evaluate", metrics["eval_loss"])

    def on_save(self, run: RunView, checkpoint: Path) -> None:
        self._write(run, "save", checkpoint.name, (checkpoint / "manifest.json").is_file())

    def on_end(self, run: RunView) -> None:
        self._write(run, "end", run.ended_by)

    def _write(self, run: RunView, *what: Any) -> None:
        with open(run.output_dir / f"diary_{run.rank}.jsonl", "a") as file:
            file.write(json.dumps([*what, run.step]) + "\n")


@dataclass
class Failing:
    """Raises on one rank."""

    rank: int
    step: int

    def on_step(self, run: RunView) -> None:
        if (run.rank, run.step) == (self.rank, self.step):
            raise KeyError("no such thing")


class FromAnotherTrainer:
    def on_step_end(self, run: RunView) -> None: ...
