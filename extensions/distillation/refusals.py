"""The features that a distillation does not go together with, and which runs read its keys."""

from __future__ import annotations

from dataclasses import fields, replace

from extensions.distillation.keys import DistillConfig
from training.config.incompatible import (
    CHECKPOINT_AUTO,
    COLLATOR,
    CONTEXT_PARALLEL,
    EXPERT_PARALLEL,
    FP16,
    FURTHER_TOKENS,
    STREAMED,
    USER_LOSS,
    ZERO_3,
    Feature,
    Row,
    Scope,
    has_value,
)

TEACHER = Feature(
    "distill.teacher",
    lambda run: bool(run.config.read_group(DistillConfig).teacher),
    switches=("distill.teacher",),
)
ONLINE_TEACHER = has_value("distill.online", "true")
SEARCH = replace(has_value("plan", "search"), scope=Scope.plan)
OWN_STAGES = Feature("distill.num_stages", lambda run: run.config.read_group(DistillConfig).num_stages is not None)
OWN_TENSOR_PARALLEL = Feature(
    "distill.tensor_parallel_size",
    lambda run: run.config.read_group(DistillConfig).tensor_parallel_size is not None,
)
READERS = {f"distill.{each.name}": TEACHER for each in fields(DistillConfig) if each.name != "teacher"}
ROWS: tuple[Row, ...] = (
    (TEACHER, {
        FURTHER_TOKENS: "the teacher's distributions are those of the next token; "
            "give mtp.loss_coef=0, or distill.teacher=null",
        FP16: "the gradient of the divergence is computed before the loss scale is known; "
            "use precision=bf16, or distill.teacher=null",
        USER_LOSS: "each of them defines the loss; give one of them",
        STREAMED: "the teacher reads rows that are known beforehand; give data.streaming=false",
        COLLATOR: "the teacher's rows are numbered by their targets, which it may move; give data.collator=null",
    }),
    (ONLINE_TEACHER, {
        OWN_STAGES: "teacher and student share the stages; omit distill.num_stages",
        OWN_TENSOR_PARALLEL: "teacher and student share the stages; omit distill.tensor_parallel_size",
        CONTEXT_PARALLEL: "it is not tested with split sequences; give context_parallel_size=1",
        EXPERT_PARALLEL: "it is not tested with divided experts; give expert_parallel_size=1",
        ZERO_3: "the teacher's weights are whole on each rank; give zero_stage=1 or 2",
        CHECKPOINT_AUTO: "the choice does not count the teacher's memory; give a number",
        SEARCH: "the search does not count the teacher's memory; give plan=true",
    }),
)  # fmt: skip
