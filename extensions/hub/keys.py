"""The keys of uploads."""

from __future__ import annotations

from dataclasses import dataclass

from training.config.ranges import at_least


@dataclass
class HubConfig:
    repo_id: str | None = None  # `org/name` on the hub; null: nothing is uploaded
    private: bool = True  # of a repository that does not exist yet
    # Also upload the model each so many steps, at which a checkpoint is saved too; null: at the end only
    every: int | None = at_least(1, note="null turns it off", default=None)

    def is_due(self, step: int) -> bool:
        """Return whether the model of this step is uploaded while the run continues."""
        return self.repo_id is not None and self.every is not None and step % self.every == 0
