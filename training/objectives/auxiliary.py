"""A frozen model that a run reads besides the one that it trains: how the loss uses it, and when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from batch import Column
from errors import UserError
from training.config.schema import RunConfig
from training.objectives.objective import LastStage, Modifier, PassOver, Scorer


class AuxiliaryModel(Modifier):
    """A modifier whose key names a frozen model, which reads the run's data.

    Either it scores the data once (`scored`) and is gone before the model that is trained is built, or it stays in
    memory next to that, on the same stages, and runs before each step (`PassOver.auxiliary`). What it says is compared
    over `num_tokens`, the tokens that both vocabularies have.
    """

    name: str  # in messages and in what a run is resumed with; begins the names of folders of scores
    architecture_key: str  # the key of its architecture, for a plan where its folder is not there
    # "module:function" of its plan. The function takes the `ResolvedRun` of its passes, the `Machine`, the run's config
    # and the rows of the data (None where not known); it returns lines of the report, and the seconds of its pass
    # before training, None where there is none or they are not known
    plan: str

    def is_resident(self, config: RunConfig) -> bool:
        """Return whether it stays in memory."""
        return self.pass_over(config) is PassOver.auxiliary

    def derive(self, config: RunConfig, micro_batch_size: int, micro_batches: int) -> RunConfig:
        """Return the config of its passes. config: the run's. micro_batch_size: the run's samples per micro-batch.
        micro_batches: the run's micro-batches per step in each pipeline."""
        raise NotImplementedError

    def check_sizes(self, config: RunConfig, own_rows: int, rows: int) -> None:
        """Raise UserError for embeddings that do not go together. own_rows: of the model that is trained."""

    def check_tokenizer(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError for a model in `folder` that cannot be used with the run's tokenizer."""

    def scored(self, config: RunConfig) -> tuple[Column, ...]:
        """Return the columns that it scores once before training; empty where it stays in memory."""
        return ()

    def settings(self, config: RunConfig) -> dict[str, Any]:
        """Return what `scored` depends on besides the model and its tokens, JSON values by name."""
        return {}

    def build_scorer(self, config: RunConfig, stage: LastStage, num_tokens: int) -> Scorer:
        """Return how it computes `scored`. stage: its own last one."""
        raise NotImplementedError

    def build_head(self, config: RunConfig, stage: LastStage, num_tokens: int) -> Any:
        """Return what the loss reads of it while it is in memory (`LastStage.auxiliary`). stage: its own last one."""
        raise NotImplementedError

    @contextmanager
    def naming(self, config: RunConfig) -> Iterator[None]:
        """Begin a UserError with its key and where it is."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.key}={self.read(config)}: {error}", error.ending) from None
