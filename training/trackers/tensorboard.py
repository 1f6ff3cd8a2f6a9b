"""TensorBoard: `tensorboard --logdir output_dir/tensorboard`. A resumed run removes what was written after the step
that it resumes from. Of files it shows pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.trackers.tracker import TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    package = "tensorboard"

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.output_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=None if run.first_step is None else run.first_step + 1)
        for name, value in params.items():
            text = f"```\n{value}\n```" if isinstance(value, str) else f"```json\n{json.dumps(value, indent=2)}\n```"
            self._writer.add_text(name, text)
        return f"tensorboard --logdir {folder}"

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def log_file(self, file: Path) -> None:
        if file.suffix == ".png":
            from matplotlib.image import imread

            self._writer.add_image(file.name, imread(str(file)), dataformats="HWC")

    def close(self) -> None:
        self._writer.close()
