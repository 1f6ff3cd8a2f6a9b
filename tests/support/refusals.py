"""Overrides that are refused: for each pair of the table, in its order, by a start of the message; and for what spans
keys otherwise."""

from __future__ import annotations

TWO_RANKS, SCRATCH = "tensor_parallel_size=2", "init=random"
SHARED_SEQUENCES = "context_parallel_size=2"
FURTHER_TOKENS = "mtp.loss_coef=0.1"
# A start of the message -> what to write to get it, of each pair of the table in turn.
EXAMPLES = {
    "precision=fp16 does not go together with a machine without a GPU: ": ("precision=fp16",),
    "attn_implementation=flash_attention_3 does not go together with a machine": (
        "attn_implementation=flash_attention_3",
    ),
    "attn_implementation=flex_attention does not go together with a machine": ("attn_implementation=flex_attention",),
    "attn_implementation=flash_attention_2 does not go together with precision=fp32: ": (
        "attn_implementation=flash_attention_2",
        "precision=fp32",
    ),
    "flash_kernels=fa3 does not go together with a machine without a GPU: ": ("flash_kernels=fa3",),
    "flash_kernels=fa3 does not go together with precision=fp32: ": ("flash_kernels=fa3", "precision=fp32"),
    "flash_kernels=fa3 does not go together with attn_implementation=eager: ": (
        "flash_kernels=fa3",
        "attn_implementation=eager",
    ),
    "fused_kernels=auto does not go together with compile=true: ": ("fused_kernels=auto", "compile=true"),
    "activation_checkpoint_mode=every does not go together with activation_checkpoint_interval=0: ": (
        "activation_checkpoint_mode=every",
        "activation_checkpoint_interval=0",
    ),
    "activation_checkpoint_mode=selective does not go together with activation_checkpoint_interval=auto: ": (
        "activation_checkpoint_mode=selective",
        "activation_checkpoint_interval=auto",
    ),
    "activation_offload=true does not go together with activation_checkpoint_interval=0: ": (
        "activation_offload=true",
        "activation_checkpoint_interval=0",
    ),
    "activation_offload=true does not go together with compile=true: ": ("activation_offload=true", "compile=true"),
    "schedule=interleaved does not go together with num_stages=1: ": ("schedule=interleaved",),
    "schedule=zero_bubble does not go together with compile=true: ": (
        "num_stages=2",
        "schedule=zero_bubble",
        "compile=true",
    ),
    "tensor_parallel_size=2 does not go together with precision=fp16: ": (TWO_RANKS, "precision=fp16"),
    "tensor_parallel_size=2 does not go together with compile=true: ": (TWO_RANKS, "compile=true"),
    "tensor_parallel_size=2 does not go together with loss={_target_: ...}: ": (TWO_RANKS, "loss={_target_: my.Loss}"),
    "tensor_parallel_size=2 does not go together with adapter.lora_dropout=0.1: ": (
        TWO_RANKS,
        "adapter=lora",
        "adapter.lora_dropout=0.1",
    ),
    "tensor_parallel_size=2 does not go together with adapter.use_dora=true: ": (
        TWO_RANKS,
        "adapter=lora",
        "adapter.use_dora=true",
    ),
    "tensor_parallel_size=2 does not go together with adapter.init_lora_weights=pissa: ": (
        TWO_RANKS,
        "adapter=lora",
        "adapter.init_lora_weights=pissa",
    ),
    "tensor_parallel_size=2 does not go together with adapter.load_in_4bit=true: ": (
        TWO_RANKS,
        "adapter=lora",
        "adapter.load_in_4bit=true",
    ),
    "sequence_parallel=true does not go together with tensor_parallel_size=1: ": ("sequence_parallel=true",),
    "tensor_parallel_size=2 does not go together with plan=true with hardware=here: ": (
        TWO_RANKS,
        "plan=true",
        "hardware=here",
        "hardware.peak_flops=null",
    ),
    "context_parallel_mode=ring does not go together with context_parallel_size=1: ": ("context_parallel_mode=ring",),
    **{
        f"context_parallel_size=2 does not go together with {other}: ": (SHARED_SEQUENCES, *keys)
        for other, keys in {
            "plan=true with hardware=here": ("plan=true", "hardware=here", "hardware.peak_flops=null"),
            "data=token_classification": ("data=token_classification",),
            "data=embedding": ("data=embedding",),
            "loss={_target_: ...}": ("loss={_target_: my.Loss}",),
            "attn_implementation=flash_attention_2": ("attn_implementation=flash_attention_2",),
            "compile=true": ("compile=true",),
            "precision=fp16": ("precision=fp16",),
        }.items()
    },
    **{
        f"expert_parallel_size=2 does not go together with {other}: ": ("expert_parallel_size=2", *keys)
        for other, keys in {
            "plan=true with hardware=here": ("plan=true", "hardware=here", "hardware.peak_flops=null"),
            "compile=true": ("compile=true",),
            "precision=fp16": ("precision=fp16",),
            "zero_stage=3": ("zero_stage=3",),
            "sharding_parallel_size": ("sharding_parallel_size=2",),
        }.items()
    },
    "optimizer=adamw_8bit does not go together with offload_optimizer=cpu: ": (
        "optimizer=adamw_8bit",
        "offload_optimizer=cpu",
    ),
    "zero_stage=3 does not go together with num_stages=2: ": ("zero_stage=3", "num_stages=2"),
    "zero_stage=3 does not go together with tensor_parallel_size=2: ": ("zero_stage=3", TWO_RANKS),
    "zero_stage=3 does not go together with precision=fp16: ": ("zero_stage=3", "precision=fp16"),
    "zero_stage=3 does not go together with compile=true: ": ("zero_stage=3", "compile=true"),
    "zero_stage=3 does not go together with offload_optimizer=cpu: ": ("zero_stage=3", "offload_optimizer=cpu"),
    "zero_stage=3 does not go together with optimizer=adamw_8bit: ": ("zero_stage=3", "optimizer=adamw_8bit"),
    "zero_stage=3 does not go together with adapter.load_in_4bit=true: ": (
        "zero_stage=3",
        "adapter=lora",
        "adapter.load_in_4bit=true",
    ),
    "zero_stage=3 does not go together with adapter.use_dora=true: ": (
        "zero_stage=3",
        "adapter=lora",
        "adapter.use_dora=true",
    ),
    "sharding_parallel_size does not go together with zero_stage=3: ": ("sharding_parallel_size=2", "zero_stage=3"),
    "sharding_parallel_size does not go together with precision=fp16: ": ("sharding_parallel_size=2", "precision=fp16"),
    "sharding_parallel_size does not go together with plan=search: ": ("sharding_parallel_size=2", "plan=search"),
    "offload_parameters=cpu does not go together with zero_stage=1: ": ("offload_parameters=cpu",),
    "zero_stage=3 does not go together with evaluate_only=true: ": (
        "zero_stage=3",
        "evaluate_only=true",
        "eval_file=eval.jsonl",
    ),
    "freeze does not go together with adapter=lora: ": ("freeze=[norm]", "adapter=lora"),
    "moe.update_router_bias=0.001 does not go together with adapter=lora: ": (
        "moe.update_router_bias=0.001",
        "adapter=lora",
    ),
    "data=pretrain does not go together with data.packing=false: ": (
        "data=pretrain",
        "data.packing=false",
        "data.length_policy=split",
    ),
    "data=pretrain does not go together with data.length_policy=truncate: ": ("data=pretrain", "data.packing=true"),
    "data.chat_template does not go together with data=pretrain: ": (
        "data=pretrain",
        "data.packing=true",
        "data.length_policy=split",
        "data.chat_template=chatml",
    ),
    "data=preference does not go together with data.packing=true: ": ("data=preference", "data.packing=true"),
    "data=preference does not go together with data.length_policy=split: ": (
        "data=preference",
        "data.length_policy=split",
    ),
    "data=unpaired_preference does not go together with data.packing=true: ": (
        "data=unpaired_preference",
        "data.packing=true",
    ),
    "data=unpaired_preference does not go together with data.length_policy=split: ": (
        "data=unpaired_preference",
        "data.length_policy=split",
    ),
    "data=classification does not go together with data.length_policy=split: ": (
        "data=classification",
        "data.length_policy=split",
    ),
    "data=embedding does not go together with data.packing=true: ": ("data=embedding", "data.packing=true"),
    "data=embedding does not go together with data.length_policy=split: ": (
        "data=embedding",
        "data.length_policy=split",
    ),
    "data=rerank does not go together with data.num_negatives=0: ": ("data=rerank", "data.num_negatives=0"),
    "data.num_negatives=1 does not go together with data=sft: ": ("data.num_negatives=1",),
    "data=embedding does not go together with adapter.lora_dropout=0.1: ": (
        "data=embedding",
        "adapter=lora",
        "adapter.lora_dropout=0.1",
    ),
    "data=embedding does not go together with neftune_noise_alpha=5.0: ": ("data=embedding", "neftune_noise_alpha=5"),
    "data.streaming=true does not go together with max_steps=null: ": ("data.streaming=true",),
    **{
        f"data.streaming=true does not go together with {other}: ": ("data.streaming=true", "max_steps=5", override)
        for other, override in {
            "eval_epochs": "eval_epochs=1",
            "save_epochs": "save_epochs=1",
            "data=preference": "data=preference",
            "data=unpaired_preference": "data=unpaired_preference",
            "data=embedding": "data=embedding",
            "data=classification": "data=classification",
            "train_file with shares": "train_file=[{path: a.jsonl, weight: 1}]",
            "data.eval_fraction=0.1": "data.eval_fraction=0.1",
            "data.eval_samples=5": "data.eval_samples=5",
            "data.max_samples=5": "data.max_samples=5",
            "inspect_data=true": "inspect_data=true",
        }.items()
    },
    "mtp.loss_coef=0.1 does not go together with loss={_target_: ...}: ": (FURTHER_TOKENS, "loss={_target_: my.Loss}"),
    "mtp.loss_coef=0.1 does not go together with compile=true: ": (FURTHER_TOKENS, "compile=true"),
    "mtp.loss_coef=0.1 does not go together with sequence_parallel=true: ": (
        FURTHER_TOKENS,
        TWO_RANKS,
        "sequence_parallel=true",
    ),
    "mtp.loss_coef=0.1 does not go together with context_parallel_size=2: ": (FURTHER_TOKENS, SHARED_SEQUENCES),
    "mtp.loss_coef=0.1 does not go together with expert_parallel_size=2: ": (
        FURTHER_TOKENS,
        "expert_parallel_size=2",
    ),
    "mtp.loss_coef=0.1 does not go together with zero_stage=3: ": (FURTHER_TOKENS, "zero_stage=3"),
    "mtp.loss_coef=0.1 does not go together with neftune_noise_alpha=5.0: ": (
        FURTHER_TOKENS,
        "neftune_noise_alpha=5",
    ),
    "mtp.loss_coef=0.1 does not go together with data.collator: ": (
        FURTHER_TOKENS,
        "data.collator={_target_: my.Collator}",
    ),
    "distill.teacher does not go together with mtp.loss_coef=0.1: ": ("distill.teacher=a", FURTHER_TOKENS),
    "distill.teacher does not go together with precision=fp16: ": ("distill.teacher=a", "precision=fp16"),
    "distill.teacher does not go together with loss={_target_: ...}: ": (
        "distill.teacher=a",
        "loss={_target_: my.Loss}",
    ),
    "distill.teacher does not go together with data.streaming=true: ": (
        "distill.teacher=a",
        "data.streaming=true",
        "max_steps=5",
    ),
    "distill.teacher does not go together with data.collator: ": (
        "distill.teacher=a",
        "data.collator={_target_: my.Collator}",
    ),
    **{
        f"distill.online=true does not go together with {other}: ": ("distill.teacher=a", "distill.online=true", key)
        for other, key in {
            "distill.num_stages=2": "distill.num_stages=2",
            "distill.tensor_parallel_size=2": "distill.tensor_parallel_size=2",
            "context_parallel_size=2": SHARED_SEQUENCES,
            "expert_parallel_size=2": "expert_parallel_size=2",
            "zero_stage=3": "zero_stage=3",
            "activation_checkpoint_interval=auto": "activation_checkpoint_interval=auto",
            "plan=search": "plan=search",
        }.items()
    },
    "label_smoothing=0.1 does not go together with loss={_target_: ...}: ": (
        "label_smoothing=0.1",
        "loss={_target_: my.Loss}",
    ),
    "data=preference does not go together with loss={_target_: ...}: ": ("data=preference", "loss={_target_: my.Loss}"),
    "data=unpaired_preference does not go together with loss={_target_: ...}: ": (
        "data=unpaired_preference",
        "loss={_target_: my.Loss}",
    ),
    "data=classification does not go together with loss={_target_: ...}: ": (
        "data=classification",
        "loss={_target_: my.Loss}",
    ),
    "data=embedding does not go together with loss={_target_: ...}: ": ("data=embedding", "loss={_target_: my.Loss}"),
    "dpo.label_smoothing=0.1 does not go together with dpo.loss_type=ipo: ": (
        "data=preference",
        "dpo.label_smoothing=0.1",
        "dpo.loss_type=ipo",
    ),
    "warmup_steps=10 does not go together with warmup_ratio=0: ": ("warmup_steps=10", "warmup_ratio=0"),
    "init=random does not go together with model=from_checkpoint: ": (SCRATCH, "tokenizer_name_or_path=t"),
    "init=random does not go together with tokenizer_name_or_path=null: ": (SCRATCH, "model={model_type: llama}"),
    **{
        f"init=random does not go together with {other}: ": (
            SCRATCH,
            "model={model_type: llama}",
            "tokenizer_name_or_path=t",
            "eval_file=a.jsonl",
            other,
        )
        for other in ("adapter=lora", "data=preference", "data=unpaired_preference", "evaluate_only=true")
    },
    **{
        f"data.{key}={value} does not go together with eval_file: ": (f"data.{key}={value}", "eval_file=a.jsonl")
        for key, value in {"eval_fraction": "0.1", "eval_samples": "5"}.items()
    },
    "data.eval_fraction=0.1 does not go together with data.eval_samples=5: ": (
        "data.eval_fraction=0.1",
        "data.eval_samples=5",
    ),
    "evaluate_only=true does not go together with eval_file=null: ": ("evaluate_only=true",),
    "evaluate_only=true does not go together with callbacks: ": (
        "evaluate_only=true",
        "eval_file=a.jsonl",
        "callbacks=[{_target_: my.Callback}]",
    ),
    "evaluate_only=true does not go together with overwrite_output_dir=true: ": (
        "evaluate_only=true",
        "eval_file=a.jsonl",
        "overwrite_output_dir=true",
    ),
    "resume does not go together with overwrite_output_dir=true: ": ("resume=latest", "overwrite_output_dir=true"),
    "eval_steps does not go together with eval_epochs: ": ("eval_steps=2", "eval_epochs=1"),
    "save_steps does not go together with save_epochs: ": ("save_steps=2", "save_epochs=1"),
    "keep_best does not go together with keep_last=null: ": ("keep_best=1", "eval_file=a.jsonl"),
    "keep_best does not go together with eval_file=null: ": ("keep_best=1", "keep_last=1"),
    "load_best_model_at_end=true does not go together with eval_file=null: ": ("load_best_model_at_end=true",),
    "early_stopping_patience does not go together with eval_file=null: ": (
        "early_stopping_patience=1",
        "eval_steps=1",
    ),
    "early_stopping_patience does not go together with eval_steps=null and eval_epochs=null: ": (
        "early_stopping_patience=1",
        "eval_file=a.jsonl",
    ),
}
# For each other refusal of training/config/ but those of ranges, which the fields state
OTHERS = (
    ("train_file=null",),
    ("eval_file={}",),
    ("eval_file={weight: c.jsonl}",),
    ("train_file=[{path: a, weight: 1}, b]",),
    ("train_file=[{path: a, weight: 0}]",),
    ("train_file=[{path: a, wieght: 1}]",),
    ("train_file=[{path: a, weight: -1}]",),
    ("train_file=[{weight: 1}]",),
    ("eval_file=[{path: a, weight: 1}]",),
    ("plan=maybe",),
    ("export_steps=[0]",),
    ("skip_data_intervals=[[3,1]]",),
    ("skip_data_intervals=[[1,3]]", "profile_step=2"),
    ("optimizer.betas=[0.9]",),
    ("optimizer.betas=[0.9,0.999]", "optimizer.state_dtype=bf16"),
    ("+model.no_such_field=1",),
    ("+model.hidden_size=64",),
)
