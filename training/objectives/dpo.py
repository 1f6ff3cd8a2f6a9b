"""Direct preference optimization (2305.18290): pairs of answers, against what the model thought of them before."""

from __future__ import annotations

from errors import UserError
from models.losses.dpo import DPOFormula
from models.losses.pairs import PairFormula, WithNLL
from training.config.schema import RunConfig
from training.objectives.preference import PreferenceObjective, check_coefficient, check_more_than_zero


class DPO(PreferenceObjective):
    name = "dpo"
    needs_reference = True

    def check(self, config: RunConfig) -> None:
        dpo = config.dpo
        check_more_than_zero("dpo.beta", dpo.beta)
        if not 0 <= dpo.label_smoothing < 0.5:
            raise UserError(
                f"dpo.label_smoothing={dpo.label_smoothing}: from 0 to below 0.5, where no preference would be left"
            )
        check_coefficient("dpo.sft_coef", dpo.sft_coef)

    def describe(self, config: RunConfig) -> dict[str, str]:
        """Without `sft_coef` where it is off: checkpoints from before there was such a key continue."""
        return {
            key: value for key, value in self.describe_keys(config).items() if (key, value) != ("dpo.sft_coef", "0")
        }

    def build_formula(self, config: RunConfig) -> PairFormula:
        dpo = config.dpo
        formula = DPOFormula(dpo.beta, dpo.label_smoothing, dpo.loss_type)
        return WithNLL(formula, dpo.sft_coef) if dpo.sft_coef else formula
