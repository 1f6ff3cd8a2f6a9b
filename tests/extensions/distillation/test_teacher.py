"""The config of a teacher's pass: the keys that it shares with the run, and every other one at its default."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from support.configs import build_config

from extensions.distillation.teacher_pass import derive_teacher
from training.config.schema import RunConfig, build_schema, load_defaults

SHARED = {
    "trust_remote_code", "trust_checkpoint", "train_file", "eval_file", "data", "task", "max_seq_length",
    "num_workers", "seed", "evaluate_only", "plan", "world_size", "hardware", "deepspeed", "context_parallel_size",
    "precision", "attn_implementation", "flash_kernels", "fused_kernels", "tokenizer_name_or_path", "num_stages",
    "tensor_parallel_size",
}  # fmt: skip
OF_THE_SCHEDULE = {"schedule", "virtual_stages_per_rank", "schedule_memory_limit"}


def mark(config: RunConfig) -> RunConfig:
    """Return a config whose keys all have values of their own, except those of the distillation."""
    values: Any = {field.name: object() for field in fields(build_schema()) if field.name != "distill"}
    return replace(config, **values)


@pytest.mark.parametrize(("online", "shared"), [(False, SHARED), (True, SHARED | OF_THE_SCHEDULE)])
def test_a_teacher_has_no_key_of_the_run_but_those_listed(online: bool, shared: set[str]) -> None:
    run, defaults = mark(build_config("distill.teacher=big", f"distill.online={online}")), load_defaults()
    teacher = derive_teacher(run, 2, 8)
    assert {key for key in vars(run) if getattr(teacher, key) is getattr(run, key)} == shared
    own = {key: value for key, value in vars(teacher).items() if value != getattr(defaults, key) and key not in shared}
    accumulated = {"gradient_accumulation_steps": 8 if online else 1}
    assert own == {
        "model_name_or_path": "big", "micro_batch_size": 2, "activation_checkpoint_interval": 0, **accumulated
    }  # fmt: skip


def test_a_teacher_has_its_own_model_and_split() -> None:
    given = ("distill.teacher=big", "+distill.model.hidden_size=8", "distill.num_stages=2")
    teacher = derive_teacher(build_config(*given, "distill.tensor_parallel_size=4", "num_stages=8"), 1, 1)
    assert (teacher.model, teacher.num_stages, teacher.tensor_parallel_size) == ({"hidden_size": 8}, 2, 4)
    assert teacher.tokenizer_name_or_path == "model"  # the run's model has the tokenizer


def test_defaults_are_those_of_a_run_that_gives_nothing() -> None:
    run, defaults = build_config(), load_defaults()
    given = {"model_name_or_path", "train_file", "output_dir"}
    assert {key for key in vars(run) if getattr(run, key) != getattr(defaults, key)} == given
