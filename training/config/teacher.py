"""The config of the pass in which a run's teacher scores its data (`distill.teacher`)."""

from __future__ import annotations

from dataclasses import replace

from models.adapters.options import AdapterName
from training.config.schema import (
    CheckpointMode,
    ContextParallelMode,
    DistillConfig,
    Init,
    MoEConfig,
    Offload,
    RopeConfig,
    RunConfig,
    load_default_group,
)


def derive_teacher(config: RunConfig, micro_batch_size: int) -> RunConfig:
    """Return the config of the teacher's pass: the run's ranks and data, its own model and split into stages, nothing
    that only training needs. micro_batch_size: the run's."""
    distill = config.distill
    assert distill.teacher is not None
    return replace(
        config,
        model=dict(distill.model),
        model_name_or_path=distill.teacher,
        init=Init.pretrained,
        rope_parameters=load_default_group("rope_parameters", RopeConfig),
        tokenizer_name_or_path=config.tokenizer_name_or_path or config.model_name_or_path,
        adapter=replace(config.adapter, name=AdapterName.none, load_in_4bit=False),
        moe=load_default_group("moe", MoEConfig),
        distill=load_default_group("distill", DistillConfig),
        resume=None,
        freeze=[],
        parameter_groups=[],
        callbacks=[],
        num_stages=distill.num_stages or config.num_stages,
        tensor_parallel_size=distill.tensor_parallel_size or config.tensor_parallel_size,
        sequence_parallel=False,
        context_parallel_mode=ContextParallelMode.auto,
        expert_parallel_size=1,
        zero_stage=1,
        sharding_parallel_size=None,
        partition_method="balanced",
        schedule="1f1b",
        schedule_memory_limit=None,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=1,
        global_batch_size=None,
        label_smoothing=0.0,
        neftune_noise_alpha=0.0,
        offload_optimizer=Offload.none,
        offload_parameters=Offload.none,
        activation_checkpoint_interval=0,
        activation_checkpoint_mode=CheckpointMode.grouped,
        activation_offload=False,
        compile=False,
    )
