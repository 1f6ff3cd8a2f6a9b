"""Keys of other trainers, and what is written here in their place: the hints of the command line, before torch is
imported. The extension `import_config` translates values too; a test compares the two."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from extension import load_extensions

# Keys that switch a check off or delete something: never a hint
SWITCHES = frozenset({"trust_checkpoint", "trust_remote_code", "resume_allow_changes", "overwrite_output_dir"})
NEAR_ENOUGH = 0.7  # of difflib; at its own 0.6 `lora_rank` is `rerank`
LONGEST_ABBREVIATION = 3  # characters: `dp` is near keys that mean something else
LENGTH, PACKING = "max_seq_length", "data.packing=true"
BATCH, EPOCHS = "micro_batch_size", "num_train_epochs"
RECOMPUTED, LORA = "activation_checkpoint_interval=1", "adapter=lora"
WORKERS, TOKENS, FUSED = "data.num_proc", "data.special_tokens", "fused_kernels=auto"
HELD_OUT = "data.eval_fraction or data.eval_samples"
# Choices of groups that others name, and what is written here
FOREIGN_CHOICES: dict[str, str] = {
    "adapter=qlora": "adapter=lora adapter.load_in_4bit=true", "adapter=dora": "adapter=lora adapter.use_dora=true",
    "adapter=rslora": "adapter=lora adapter.use_rslora=true",
    "adapter=pissa": "adapter=lora adapter.init_lora_weights=pissa",
    "data=sharegpt": "data=chat, which reads ShareGPT's records", "data=messages": "data=chat",
    "data=alpaca": "data=chat, which reads Alpaca's records", "data=conversations": "data=chat",
    "data=text": "data=pretrain", "data=pt": "data=pretrain",
    "optimizer=adamw_torch": "optimizer=adamw", "optimizer=adamw_torch_fused": "optimizer=adamw",
    "optimizer=adamw_bnb_8bit": "optimizer=adamw_8bit", "optimizer=paged_adamw_8bit": "optimizer=adamw_8bit",
}  # fmt: skip
FOREIGN: dict[str, str] = {
    # model, tokenizer and data
    "base_model": "model_name_or_path", "model_id_or_path": "model_name_or_path", "model_path": "model_name_or_path",
    "tokenizer": "tokenizer_name_or_path", "tokenizer_name": "tokenizer_name_or_path",
    "tokenizer_path": "tokenizer_name_or_path", "tokenizer_config": "tokenizer_name_or_path",
    "dataset": "train_file", "dataset_name": "train_file=hf:NAME", "datasets": "train_file", "data_path": "train_file",
    "train_data": "train_file", "train_dataset": "train_file", "validation_file": "eval_file",
    "eval_data": "eval_file", "eval_dataset": "eval_file", "test_datasets": "eval_file", "val_file": "eval_file",
    "val_set_size": HELD_OUT, "val_size": HELD_OUT, "split_dataset_ratio": HELD_OUT,
    "chat_template_jinja": "data.chat_template", "chat_template_path": "data.chat_template",
    "add_tokens": TOKENS, "new_special_tokens": TOKENS, "tokens": TOKENS, "mask_history": "data.train_on=last_turn",
    "cutoff_len": LENGTH, "max_length": LENGTH, "max_len": LENGTH, "max_seq_len": LENGTH, "sequence_len": LENGTH,
    "seq_length": LENGTH, "model_max_length": LENGTH, "block_size": LENGTH,
    "excess_length_strategy": "data.length_policy",
    "sample_packing": PACKING, "neat_packing": PACKING, "padding_free": PACKING, "zero_padding": PACKING,
    "group_by_length": "data.group_by_length=true",
    "pad_to_sequence_len": "data.pad_to=max_seq_length", "dataset_num_proc": WORKERS, "dataset_processes": WORKERS,
    "preprocessing_num_workers": WORKERS, "dataloader_num_workers": "num_workers",
    # adapters
    "lora": LORA, "use_lora": LORA, "use_peft": LORA, "peft": LORA, "finetuning_type": LORA, "sft_type": LORA,
    "train_type": LORA, "tuner_type": LORA, "lora_r": "adapter.r", "lora_rank": "adapter.r", "rank": "adapter.r",
    "lora_target": "adapter.target_modules", "lora_target_modules": "adapter.target_modules",
    "lora_target_linear": "adapter.target_modules=all-linear", "lora_modules_to_save": "adapter.modules_to_save",
    "additional_target": "adapter.modules_to_save", "adapter_name_or_path": "adapter.name_or_path",
    "adapters": "adapter.name_or_path", "lora_model_dir": "adapter.name_or_path", "lora_path": "adapter.name_or_path",
    "lora_plus_scale": "adapter.loraplus_lr_ratio", "lorap_lr_ratio": "adapter.loraplus_lr_ratio",
    "init_weights": "adapter.init_lora_weights", "peft_init_lora_weights": "adapter.init_lora_weights",
    "pissa_init": "adapter.init_lora_weights=pissa", "peft_use_dora": "adapter.use_dora", "dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora", "rslora": "adapter.use_rslora", "qlora": "adapter.load_in_4bit=true",
    "quantization_bit": "adapter.load_in_4bit=true", "freeze_parameters": "freeze",
    # batch, learning rate and optimizer
    "per_device_train_batch_size": BATCH, "per_gpu_train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH,
    "batch_size": "global_batch_size", "train_batch_size": "global_batch_size",
    "grad_accum_steps": "gradient_accumulation_steps", "accumulate_grad_batches": "gradient_accumulation_steps",
    "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "scheduler": "lr_scheduler_type",
    "cosine_min_lr_ratio": "min_lr_ratio", "min_lr": "min_lr_ratio", "num_warmup_steps": "warmup_steps",
    "lr_warmup_steps": "warmup_steps", "epochs": EPOCHS, "num_epochs": EPOCHS, "max_epochs": EPOCHS,
    "train_epochs": EPOCHS, "train_iters": "max_steps", "max_train_steps": "max_steps", "optim": "optimizer",
    "adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas", "adam_epsilon": "optimizer.eps",
    "beta1": "optimizer.betas", "beta2": "optimizer.betas", "grad_clip": "max_grad_norm",
    "gas": "gradient_accumulation_steps",
    "total_steps": "max_steps", "warmup": "warmup_steps or warmup_ratio", "alpha": "adapter.lora_alpha",
    "gradient_clipping": "max_grad_norm", "clip_grad": "max_grad_norm", "label_smoothing_factor": "label_smoothing",
    # objectives
    "stage": "task", "rlhf_type": "task", "rl": "task",
    # layout and memory
    "pp": "num_stages", "pp_size": "num_stages", "tp_size": "tensor_parallel_size", "ep": "expert_parallel_size",
    "pipeline_parallel_size": "num_stages", "pipeline_parallel_degree": "num_stages",
    "pipeline_model_parallel_size": "num_stages", "tp": "tensor_parallel_size",
    "tensor_parallel_degree": "tensor_parallel_size", "tensor_model_parallel_size": "tensor_parallel_size",
    "cp": "context_parallel_size", "context_parallel_degree": "context_parallel_size",
    "sep_parallel_degree": "context_parallel_size", "sequence_parallel_size": "context_parallel_size",
    "expert_parallel_degree": "expert_parallel_size", "expert_model_parallel_size": "expert_parallel_size",
    "zero": "zero_stage", "fsdp": "zero_stage=3", "dp_shard_size": "zero_stage",
    "gradient_checkpointing": RECOMPUTED, "use_gradient_checkpointing": RECOMPUTED, "recompute": RECOMPUTED,
    "activation_checkpointing": RECOMPUTED, "disable_gradient_checkpointing": "activation_checkpoint_interval=0",
    "activation_offloading": "activation_offload=true", "cpu_offload": "offload_optimizer=cpu",
    # precision and kernels
    "bf16": "precision=bf16", "fp16": "precision=fp16", "pure_bf16": "precision=bf16", "dtype": "precision",
    "torch_dtype": "precision", "mixed_precision": "precision", "torch_compile": "compile=true",
    "attn_impl": "attn_implementation", "flash_attn": "attn_implementation", "flash_attention": "attn_implementation",
    "use_flash_attention": "attn_implementation", "eager_attention": "attn_implementation=eager",
    "sdp_attention": "attn_implementation=sdpa", "flex_attention": "attn_implementation=flex_attention",
    "use_liger_kernel": FUSED, "enable_liger_kernel": FUSED, "liger_rms_norm": FUSED, "liger_rope": FUSED,
    "liger_glu_activation": FUSED, "use_fused_rms_norm": FUSED, "use_fused_rope": FUSED,
    # evaluation, saving, following
    "eval_strategy": "eval_steps", "evaluation_strategy": "eval_steps", "evals_per_epoch": "eval_epochs",
    "eval_every": "eval_steps", "save_every": "save_steps", "log_every": "logging_steps", "wandb": "logger=wandb",
    "save_strategy": "save_steps", "saves_per_epoch": "save_epochs", "save_total_limit": "keep_last",
    "save_only_model": "save_weights_only", "resume_from_checkpoint": "resume", "load_checkpoint": "resume",
    "auto_resume_from_checkpoints": "resume=auto", "report_to": "logger", "use_wandb": "logger=wandb",
    "wandb_project": "logger.project", "wandb_name": "logger.run_name",
}  # fmt: skip


def find_choice_hint(choice: str) -> str | None:
    """Return what to write in place of GROUP=CHOICE of another trainer; None if it is not known."""
    return next((hints[choice] for hints in (FOREIGN_CHOICES, *_list_added()) if choice in hints), None)


def find_hint(key: str, known: Iterable[str]) -> str | None:
    """Return what to write in place of a key that does not exist: of another trainer, or mistyped; None if nothing is
    near. known: the keys to compare with, by their dotted names."""
    group, _, last = key.rpartition(".")
    for foreign in (FOREIGN, *_list_added()):
        if last in foreign:
            return foreign[last]
    # Of keys with one last part that of the group which was named, or the one in the fewest groups, which comes last
    ordered = sorted(known, key=lambda name: (name.rpartition(".")[0] == group, -name.count(".")))
    by_last_part = {name.rpartition(".")[2]: name for name in ordered if name not in SWITCHES}
    if len(last) <= LONGEST_ABBREVIATION:
        return None
    near = difflib.get_close_matches(last, by_last_part, n=1, cutoff=NEAR_ENOUGH)
    return by_last_part[near[0]] if near else None


def _list_added() -> list[Mapping[str, str]]:
    """Return the hints of extensions."""
    return [extension.hints for extension in load_extensions()]
