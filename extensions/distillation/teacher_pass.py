"""The config of a teacher's pass: the forward passes in which the model of `distill.teacher` computes its distributions
over the tokens of a run's data."""

from __future__ import annotations

from dataclasses import replace

from extensions.distillation.keys import DistillConfig
from training.config.schema import RunConfig, load_defaults


def derive_teacher(config: RunConfig, micro_batch_size: int, micro_batches: int) -> RunConfig:
    """Return the config of the teacher's pass.

    The teacher has its own model (`distill.teacher`, `distill.model`). It has its own split if `distill.num_stages` or
    `distill.tensor_parallel_size` is set, else the run's. The data, the tokenizer, the ranks, the precision, the
    kernels and all else that is copied below are the run's. Every key that is not named below has its default: the
    adapter, the optimizer and the callbacks of the run, for example, do not apply.

    With `distill.online` the teacher also follows the run's schedule, so its last layer is on the same rank as the loss
    of the student, and its steps have as many micro-batches as the run's. Otherwise its steps have one micro-batch.

    config: the run's; its `distill.teacher` must be set. micro_batch_size: the run's samples per micro-batch.
    micro_batches: the run's micro-batches per step in each pipeline, read with `distill.online` only.
    """
    distill = config.read_group(DistillConfig)
    assert distill.teacher is not None
    teacher = replace(
        load_defaults(),
        model=dict(distill.model),
        model_name_or_path=distill.teacher,
        tokenizer_name_or_path=config.tokenizer_name_or_path or config.model_name_or_path,
        trust_remote_code=config.trust_remote_code,
        trust_checkpoint=config.trust_checkpoint,
        train_file=config.train_file,
        eval_file=config.eval_file,
        data=config.data,
        task=config.task,
        max_seq_length=config.max_seq_length,
        num_workers=config.num_workers,
        seed=config.seed,
        evaluate_only=config.evaluate_only,
        plan=config.plan,
        world_size=config.world_size,
        hardware=config.hardware,
        deepspeed=config.deepspeed,
        num_stages=distill.num_stages or config.num_stages,
        tensor_parallel_size=distill.tensor_parallel_size or config.tensor_parallel_size,
        context_parallel_size=config.context_parallel_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=1,
        activation_checkpoint_interval=0,
        precision=config.precision,
        attn_implementation=config.attn_implementation,
        flash_kernels=config.flash_kernels,
        fused_kernels=config.fused_kernels,
    )
    if not distill.online:
        return teacher
    return replace(
        teacher,
        schedule=config.schedule,
        virtual_stages_per_rank=config.virtual_stages_per_rank,
        schedule_memory_limit=config.schedule_memory_limit,
        gradient_accumulation_steps=micro_batches,
    )
