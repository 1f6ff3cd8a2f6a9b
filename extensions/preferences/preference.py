"""The base of objectives over pairs of answers (`models/losses/pairs.py`); each adds its formula, keys and checks."""

from __future__ import annotations

from data.loading.columns import DOCUMENT_SUMS
from data.options import MeanOver
from models.losses.cross_entropy import Loss
from models.losses.pairs import REWARDS, PairFormula, PairLoss
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Objective


class PreferenceObjective(Objective):
    """A sample is a pair: documents 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer."""

    data_kinds = ("preference",)
    unit = "pairs"
    mean_over = MeanOver.samples
    columns = DOCUMENT_SUMS
    remakes_logits = True

    def build_formula(self, config: RunConfig) -> PairFormula:
        """Build the loss of one pair."""
        raise NotImplementedError

    def group_size(self, data: DataConfig) -> int:
        return 2

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        formula = self.build_formula(config)
        return PairLoss(stage.architecture, formula, parallel=stage.parallel, sequence_part=stage.sequence_part)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return (*REWARDS, *self.build_formula(config).reported)
