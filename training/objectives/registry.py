"""The table of objectives: the lookup of a run's objective, and checks that its keys go together."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from data.components import describe_component
from data.encoders.kinds import KINDS, DataKind, find_kind
from data.options import Packing, RowTargets
from errors import UserError
from extension import check_not_removed, load_parts, name_parts
from masking import fingerprint_hidden, mask
from models.heads.head import Head
from training.config.criterion import Criterion
from training.config.incompatible import write_value
from training.config.schema import RunConfig
from training.config.sources import list_evaluations
from training.objectives.auxiliary import AuxiliaryModel
from training.objectives.next_token import SFT, Pretraining
from training.objectives.objective import Modifier, Objective

OBJECTIVES: dict[str, Objective] = name_parts(
    (SFT(), Pretraining(), *load_parts("objectives")),
    "objectives",
)


MODIFIERS = tuple({modifier: None for objective in OBJECTIVES.values() for modifier in objective.modifiers})


def get_objective(config: RunConfig) -> Objective:
    """Return the objective that `task` names, or the default of the data. Raises UserError for an unknown name."""
    name = config.task or find_kind(config.data.name).task
    if name not in OBJECTIVES:
        check_not_removed(f"task={name}", f"task={name}")
        raise UserError(f"task={name}: must be one of {', '.join(sorted(OBJECTIVES))}")
    return OBJECTIVES[name]


def find_auxiliary(config: RunConfig) -> AuxiliaryModel | None:
    """Return the frozen model that the run reads besides the one that it trains; None without one. Raises UserError for
    two."""
    found = [each for each in get_objective(config).list_active(config) if isinstance(each, AuxiliaryModel)]
    if len(found) > 1:
        raise UserError(f"{found[0].key} and {found[1].key}: a run reads one frozen model; omit one of them")
    return found[0] if found else None


def choose_packing(config: RunConfig) -> Packing:
    """Return how the samples of the run share rows."""
    return find_kind(config.data.name).choose_packing(config.data.packing)


def count_rows(config: RunConfig) -> int:
    """Return the rows of a micro-batch that `micro_batch_size` counts as one: those of samples that stay together, or
    a packed one."""
    return choose_packing(config).count_rows(get_objective(config).group_size(config.data))


def list_tasks_of_head(head: Head) -> list[str]:
    """Return the objectives that train a head."""
    return sorted(objective.name for objective in OBJECTIVES.values() if objective.head is head)


def check_objective(config: RunConfig) -> None:
    """Check the parts of a config that need the tables: the task and the data exist, and they and their keys go
    together.

    Raises UserError.
    """
    kind, objective = find_kind(config.data.name), get_objective(config)
    if not is_trained_on(objective, kind):
        fitting = " or data=".join(other.name for other in KINDS.values() if is_trained_on(objective, other))
        tasks = " or task=".join(_list_tasks(kind))
        raise UserError(
            f"task={objective.name} and data={kind.name} do not go together; give data={fitting}, or task={tasks}"
        )
    if config.data.collator is not None and objective.row_targets is RowTargets.last_tokens:
        raise UserError(
            f"data.collator with task={objective.name}: documents are scored at their last tokens, which are counted "
            "in rows as they are stored; omit data.collator"
        )
    for modifier in MODIFIERS:
        if modifier.read(config):
            _check_modifier(modifier, config, objective)
    find_auxiliary(config)
    check_metric_name(config)


def check_metric_name(config: RunConfig) -> None:
    """Raise UserError for a `metric_for_best_model` that no evaluation of this run reports, and for one of which lower
    is better unless a key says so. Metrics that the objective does not know in advance are checked by the first
    evaluation.
    """
    metric = Criterion.of(config).metric
    names = [f"eval_{name}_" if name else "eval_" for name in list_evaluations(config)]
    others = get_objective(config).list_metrics(config)
    reported = list(
        dict.fromkeys(["eval_loss", *(name + each for name in names for each in ("loss", *(others or ())))])
    )
    may_be_other = others is None and any(metric.startswith(name) for name in names)
    if names and metric not in reported and not may_be_other:
        unknown = f", and what task={get_objective(config).name} reports of each file" if others is None else ""
        raise UserError(
            f"metric_for_best_model: '{metric}' is not reported by this run's evaluations; give one of "
            f"{', '.join(reported)}{unknown}"
        )
    errors = [name + each for name in names for each in get_objective(config).errors]
    if metric in errors and config.greater_is_better is None:
        raise UserError(
            f"metric_for_best_model: of {metric} lower is better, which its name does not say; give "
            "greater_is_better=false"
        )


def _list_tasks(kind: DataKind) -> list[str]:
    """Return the objectives that can be trained on a kind of data, its default first."""
    return sorted(
        (each.name for each in OBJECTIVES.values() if is_trained_on(each, kind)), key=lambda name: name != kind.task
    )


def _check_modifier(modifier: Modifier, config: RunConfig, objective: Objective) -> None:
    if modifier not in objective.modifiers:
        fitting = ", ".join(sorted(other.name for other in OBJECTIVES.values() if modifier in other.modifiers))
        raise UserError(
            f"{modifier.key}={write_value(modifier.read(config))}: task={objective.name} does not read it, only "
            f"{fitting} do; give {modifier.key}={modifier.off}"
        )
    if config.loss is not None:
        raise UserError(
            f"{modifier.key}={write_value(modifier.read(config))}: loss takes the place of the loss that it changes; "
            f"omit loss, or give {modifier.key}={modifier.off}"
        )
    modifier.check(config)


def _write_rope(config: RunConfig) -> str:
    return ", ".join(
        f"{key}={write_value(value)}" for key, value in sorted(config.rope_parameters.list_given().items())
    )


def is_trained_on(objective: Objective, kind: DataKind) -> bool:
    """Returns whether an objective can be trained on a kind of data."""
    return kind.task == objective.name or kind.name in objective.data_kinds


def describe_objective(config: RunConfig) -> dict[str, str]:
    """Return what a run must keep to continue with the same loss, name -> value; the data's default task is omitted."""
    objective = get_objective(config)
    is_usual = objective.name == find_kind(config.data.name).task
    router_losses = {key: getattr(config.moe, key) for key in ("aux_loss_coef", "z_loss_coef")}
    return (
        objective.identity(config)
        | {f"moe.{key}": f"{value:g}" for key, value in router_losses.items() if value}
        | ({"neftune_noise_alpha": f"{config.neftune_noise_alpha:g}"} if config.neftune_noise_alpha else {})
        | ({} if is_usual else {"task": objective.name})
        | describe_component_key("loss", config.loss)
        | describe_forward(config)
    )


def describe_forward(config: RunConfig) -> dict[str, str]:
    """Return what decides the outputs of a forward pass in addition to weights, tokens and precision, name -> value: a
    run must keep it to continue, and what a model has computed before is found by it. Keys at their defaults are
    omitted."""
    return (
        ({"rope_parameters": _write_rope(config)} if config.rope_parameters.list_given() else {})
        | ({"adapter.load_in_4bit": "true"} if config.adapter.quantizes else {})
        | describe_component_key("data.collator", config.data.collator)
    )


def describe_component_key(key: str, spec: Any) -> dict[str, str]:
    """Return a user-defined component by its key: its fields, a hash of its code, and one of the secrets among its
    fields, which are hidden. Nothing where there is none. Raises UserError for one that is not there."""
    if not isinstance(spec, dict):  # what else was given is refused where it is built
        return {}
    code = xxhash.xxh3_64_hexdigest(json.dumps(describe_component(spec, key)).encode())
    hidden = fingerprint_hidden(spec)
    secrets = f" and hidden values {hidden}" if hidden else ""
    return {key: f"{json.dumps(mask(spec), sort_keys=True)} with code {code}{secrets}"}
