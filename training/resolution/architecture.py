"""The architecture of a run: the model's own config, completed by the keys of the run. Nothing changes it later."""

from __future__ import annotations

import copy
import math

from transformers import PretrainedConfig

from data.options import Packing
from errors import UserError
from models.architecture.lookup import (
    apply_rope_overrides,
    check_length,
    check_packing,
    choose_attention,
    choose_experts,
)
from models.further.table import set_trained
from models.heads.table import describe_head, find_head
from models.weights.quantized import QUANTIZATION_CONFIG
from models.weights.source import DescribedModel
from training.config.precision import DTYPES
from training.config.schema import RunConfig
from training.config.validate import check_model_fields
from training.inputs.datasets import build_chat_template
from training.objectives.registry import choose_packing, get_objective, list_tasks_of_head
from training.resolution.target import Target


def complete_architecture(config: RunConfig, model: DescribedModel, target: Target) -> PretrainedConfig:
    """Return a copy of the text model's config with the run's rotary positions, head, attention kernel and way to
    compute experts.

    Raises UserError for what the run asks of the model and it cannot be, such as rows longer than its positions.
    """
    check_stated_fields(config, model)
    check_head(config, model)
    architecture = _override_positions(config, model)
    if config.mtp.loss_coef and model.wrapper is not None:
        raise UserError(
            f"mtp.loss_coef: {model.path} has its text model in '{model.wrapper.name}', whose further layers are only "
            "passed through; give mtp.loss_coef=0"
        )
    set_trained(architecture, trains=config.mtp.loss_coef > 0)
    objective = get_objective(config)
    if objective.head is not None:
        architecture = describe_head(architecture, objective.head, objective.name_labels(config.data))
    dtype = DTYPES[config.precision]
    architecture._attn_implementation = choose_attention(
        architecture,
        config.attn_implementation.value,
        dtype if target.has_accelerator else None,
        config.hardware.flash_attention_2 > 0 if target.is_planned else None,
    )
    architecture._experts_implementation = choose_experts(
        architecture, config.tensor_parallel_size, dtype, config.expert_parallel_size
    )
    check_length(architecture, config.max_seq_length)
    _check_packing(config, architecture)
    return architecture


def check_stated_fields(config: RunConfig, model: DescribedModel) -> None:
    """Raises UserError where `conf/model` and the model's config.json disagree. The model may have more rows, for the
    tokens that the run adds."""
    adds = bool(build_chat_template(config.data)) and config.model.get("vocab_size", math.inf) < model.config.vocab_size
    others = {QUANTIZATION_CONFIG, "vocab_size" if adds else ""}  # the folder says itself how it is quantized
    stated = {key: value for key, value in config.model.items() if key not in others}
    check_model_fields(stated, model.config, str(model.path))


def check_head(config: RunConfig, model: DescribedModel) -> None:
    """Raises UserError where the model's head is not one that the task can train or evaluate."""
    objective, own = get_objective(config), find_head(model.config)
    task, head = objective.name, objective.head
    if own is not None and own is not head:
        tasks = " or ".join(f"task={name}" for name in list_tasks_of_head(own))
        raise UserError(
            f"{model.path} is a {own.words} ({model.config.architectures[0]}), which has no "
            f"{'LM head' if head is None else 'head of task=' + task}; give {tasks}, or another model for task={task}"
        )
    if head is None:
        return
    if (files := objective.exports(config, model.config.hidden_size)) is not None:
        files.check(model.path)
    if config.evaluate_only and own is None and head.has_weights:
        raise UserError(
            f"evaluate_only=true with task={task}: {model.path} is not a {head.words}, its head would be a new one; "
            "give one in model_name_or_path, or resume"
        )
    if model.wrapper is not None:
        raise UserError(
            f"{model.path}: a {head.words} of a text model inside another one ('{model.wrapper.name}') is not "
            "supported; give the text model's own folder"
        )


def _override_positions(config: RunConfig, model: DescribedModel) -> PretrainedConfig:
    given = config.rope_parameters.list_given()
    if given and model.wrapper is not None:
        raise UserError(
            f"rope_parameters: {model.path} has its text model in '{model.wrapper.name}', where positions of images "
            "count too; omit it"
        )
    architecture = copy.deepcopy(model.config)
    apply_rope_overrides(architecture, given)
    return architecture


def _check_packing(config: RunConfig, architecture: PretrainedConfig) -> None:
    """A user's collator may lay several documents in a row too."""
    if packs_rows(config) or config.data.collator is not None:
        check_packing(architecture)


def packs_rows(config: RunConfig) -> bool:
    """Return whether a row of the run may have several documents."""
    return choose_packing(config) is not Packing.NONE
