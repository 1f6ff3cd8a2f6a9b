"""The table of objectives, and what is asked of it: which one a run has, and whether its keys go together."""

from __future__ import annotations

from data.encoders.kinds import KINDS, DataKind, find_kind
from errors import UserError
from training.config.schema import RunConfig
from training.objectives.dpo import DPO
from training.objectives.objective import Objective
from training.objectives.pretrain import Pretraining
from training.objectives.sft import SFT

OBJECTIVES: dict[str, Objective] = {objective.name: objective for objective in (SFT(), Pretraining(), DPO())}


def get_objective(config: RunConfig) -> Objective:
    """The one that `task` names, or that the data is for. Raises UserError for a name that is not in the table."""
    name = config.task or find_kind(config.data.name).task
    if name not in OBJECTIVES:
        raise UserError(f"task={name}: must be one of {', '.join(sorted(OBJECTIVES))}")
    return OBJECTIVES[name]


def check_objective(config: RunConfig) -> None:
    """What `check_config` cannot know: that there are such a task and such data, and that they go together.

    Raises UserError.
    """
    kind, objective = find_kind(config.data.name), get_objective(config)
    if not is_trained_on(objective, kind):
        fitting = " or data=".join(other.name for other in KINDS.values() if is_trained_on(objective, other))
        raise UserError(
            f"task={objective.name} and data={kind.name} do not go together; give data={fitting}, or task={kind.task}"
        )
    objective.check(config)


def is_trained_on(objective: Objective, kind: DataKind) -> bool:
    return kind.task == objective.name or kind.name in objective.data_kinds


def describe_objective(config: RunConfig) -> dict[str, str]:
    """What a run must keep to continue with the same loss: name -> value. The data says the rest."""
    objective = get_objective(config)
    is_usual = objective.name == find_kind(config.data.name).task
    of_routers = {key: getattr(config.moe, key) for key in ("aux_loss_coef", "z_loss_coef")}
    return (
        objective.describe(config)
        | {f"moe.{key}": f"{value:g}" for key, value in of_routers.items() if value}
        | ({} if is_usual else {"task": objective.name})
    )
