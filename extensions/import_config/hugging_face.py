"""`TrainingArguments`, which LLaMA-Factory, TRL and ms-swift share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from extensions.import_config.draft import (
    Draft,
    Rule,
    at_least_one,
    if_true,
    left,
    set_zero_stage,
    to,
    unneeded,
    usual,
    when,
)
from training.config.validate import MAX_BF16_BETA


def each(names: Iterable[str], **keys: Any) -> dict[str, dict[str, Any]]:
    """Return a table in which each name sets the same keys."""
    return {name: dict(keys) for name in names}


# Where TrainingArguments and our defaults differ, and a config that is silent means theirs.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "min_lr_ratio": 0.0, "warmup_ratio": 0.0,
    "num_train_epochs": 3, "micro_batch_size": 8, "gradient_accumulation_steps": 1,
    "activation_checkpoint_interval": 0, "optimizer.betas": [0.9, 0.999],
}  # fmt: skip

SCHEDULES: dict[str, dict[str, Any]] = {
    **{
        name: {"lr_scheduler_type": name}
        for name in ("cosine", "linear", "constant", "polynomial", "cosine_with_restarts")
    },
    "constant_with_warmup": {"lr_scheduler_type": "constant"},
    "cosine_with_min_lr": {"lr_scheduler_type": "cosine"},
    "warmup_stable_decay": {"lr_scheduler_type": "wsd"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **each(
        ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"), optimizer="adamw"
    ),
    **each(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), optimizer="adamw_8bit"),
    **each(("lion", "lion_32bit", "paged_lion_32bit"), optimizer="lion"),
    "sgd": {"optimizer": "sgd"},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "auto": {}, "sdpa": {"attn_implementation": "sdpa"}, "disabled": {"attn_implementation": "eager"},
    "eager": {"attn_implementation": "eager"}, "flex_attention": {"attn_implementation": "flex_attention"},
}  # fmt: skip
FLASH = ("fa2", "fa3", "flash_attn", "flash_attention_2", "flash_attention_3")
METRICS = {"loss": "eval_loss", "accuracy": "eval_token_accuracy", "eval_accuracy": "eval_token_accuracy"}
TRACKERS = {"wandb", "tensorboard", "mlflow", "swanlab", "trackio", "comet", "comet_ml"}


def set_trackers(draft: Draft, key: str, value: Any) -> None:
    """`report_to`: a name, or a list of names."""
    words = [value] if isinstance(value, str) else list(value or [])
    ours = [word.removesuffix("_ml") for word in words if word in TRACKERS]
    if ours:
        draft.groups["logger"] = ours[0] if len(ours) == 1 else f"[{', '.join(ours)}]"
    if others := [word for word in words if word not in (*TRACKERS, "none", "all")]:
        draft.leave(key, f"no tracker {', '.join(others)}; logger takes {', '.join(sorted(TRACKERS - {'comet_ml'}))}")


def set_hub(draft: Draft, key: str, value: Any) -> None:
    """Whether to upload, which is so here where `hub.repo_id` is given."""
    if value and not draft.their.get("hub_model_id"):
        draft.leave(key)


def set_attention(draft: Draft, key: str, value: Any) -> None:
    """The name of an attention kernel, or a switch for flash attention."""
    if value is True or value in FLASH:
        draft.leave(
            key, "auto takes torch's own flash attention on a GPU; attn_implementation=flash_attention_2 another"
        )
    elif value:
        when(ATTENTION)(draft, key, value)


def set_metric(draft: Draft, key: str, value: Any) -> None:
    if value in METRICS or str(value).startswith("eval_") or value is None:
        draft.set(key, METRICS.get(value, value))
    else:
        draft.leave(key)


def set_warmup(draft: Draft, key: str, value: Any) -> None:
    """Steps, or below 1 a share of them."""
    if value and value < 1:
        draft.set("warmup_ratio", value)
    elif value:
        draft.set("warmup_steps", int(value))
        draft.set("warmup_ratio", None)


def set_schedule_kwargs(draft: Draft, key: str, value: Any) -> None:
    """The `num_cycles` of `cosine` are waves, half a one by default, as always here; those of `cosine_with_restarts`
    are the restarts."""
    schedule = draft.their.get("lr_scheduler_type", draft.their.get("lr_scheduler"))
    value = json.loads(value) if isinstance(value, str) else value  # in a script
    for name, given in (value or {}).items():
        if name in ("min_lr_rate", "min_lr_ratio"):
            draft.set("min_lr_ratio", given)
        elif name == "power" or (
            name == "num_cycles" and schedule == "cosine_with_restarts" and given in range(1, 1000)
        ):
            draft.set(f"lr_scheduler_kwargs.{name}", given)
        elif not (name == "num_cycles" and given == 0.5):
            draft.leave(f"{key}.{name}", "lr_scheduler_kwargs")


def set_betas(draft: Draft, first: Any = None, second: Any = None) -> None:
    betas = draft.keys.get("optimizer.betas", [0.9, 0.999])
    draft.set("optimizer.betas", [betas[0] if first is None else first, betas[1] if second is None else second])


RULES: dict[str, Rule] = {
    "model_name_or_path": to("model_name_or_path"), "tokenizer_name": to("tokenizer_name_or_path"),
    "output_dir": to("output_dir"), "overwrite_output_dir": to("overwrite_output_dir"), "seed": to("seed"),
    "learning_rate": to("learning_rate"), "weight_decay": to("weight_decay"), "max_grad_norm": to("max_grad_norm"),
    "num_train_epochs": to("num_train_epochs"), "max_steps": at_least_one("max_steps"),
    "warmup_ratio": to("warmup_ratio"), "warmup_steps": set_warmup,
    "lr_scheduler_type": when(SCHEDULES), "lr_scheduler_kwargs": set_schedule_kwargs, "optim": when(OPTIMIZERS),
    "adam_beta1": lambda draft, key, value: set_betas(draft, first=value),
    "adam_beta2": lambda draft, key, value: set_betas(draft, second=value),
    "adam_epsilon": to("optimizer.eps"),
    "per_device_train_batch_size": to("micro_batch_size"), "per_device_eval_batch_size": unneeded,
    "gradient_accumulation_steps": to("gradient_accumulation_steps"), "eval_accumulation_steps": unneeded,
    "logging_steps": to("logging_steps"), "logging_first_step": unneeded, "logging_strategy": unneeded,
    "logging_dir": unneeded, "eval_steps": to("eval_steps"), "eval_on_start": to("eval_on_start"),
    "save_steps": to("save_steps"), "eval_strategy": unneeded, "evaluation_strategy": unneeded,
    "save_strategy": unneeded, "save_total_limit": at_least_one("keep_last"),
    "save_only_model": to("save_weights_only"), "load_best_model_at_end": to("load_best_model_at_end"),
    "metric_for_best_model": set_metric, "greater_is_better": to("greater_is_better"),
    "bf16": if_true(precision="bf16"), "fp16": if_true(precision="fp16"), "pure_bf16": if_true(precision="bf16"),
    "tf32": unneeded, "gradient_checkpointing": if_true(activation_checkpoint_interval=1),
    "gradient_checkpointing_kwargs": unneeded, "torch_compile": to("compile"),
    "use_liger_kernel": if_true(fused_kernels="auto"), "attn_implementation": set_attention,
    "neftune_noise_alpha": to("neftune_noise_alpha"), "label_smoothing_factor": to("label_smoothing"),
    "dataloader_num_workers": to("num_workers"), "dataloader_pin_memory": unneeded, "dataloader_drop_last": unneeded,
    "dataloader_persistent_workers": unneeded, "dataloader_prefetch_factor": unneeded,
    "deepspeed": set_zero_stage, "fsdp": left(), "fsdp_config": left("zero_stage, as fsdp"),
    "report_to": set_trackers, "run_name": to("logger.run_name"), "ddp_timeout": unneeded,
    "ddp_find_unused_parameters": unneeded, "local_rank": unneeded, "do_train": unneeded, "do_eval": unneeded,
    "do_predict": left("evaluate_only=true, scripts/generate.py"), "predict_with_generate": left(),
    "resume_from_checkpoint": left(), "ignore_data_skip": unneeded, "remove_unused_columns": unneeded,
    "group_by_length": to("data.group_by_length"), "push_to_hub": set_hub, "hub_model_id": to("hub.repo_id"),
    "hub_private_repo": when({True: {"hub.private": True}, False: {"hub.private": False}, None: {}}),
    "data_seed": unneeded,
    "trust_remote_code": to("trust_remote_code"), "disable_tqdm": unneeded, "include_num_input_tokens_seen": unneeded,
    "include_tokens_per_second": unneeded, "log_level": unneeded, "prediction_loss_only": unneeded,
    "auto_find_batch_size": left(), "full_determinism": unneeded,
    "optim_args": left(), "optim_target_modules": left(), "average_tokens_across_devices": usual(True),
    "bf16_full_eval": unneeded, "fp16_full_eval": unneeded,
    "activation_checkpointing": if_true(activation_checkpoint_interval=1), "activation_checkpointing_kwargs": unneeded,
    "torch_compile_backend": unneeded, "torch_compile_mode": unneeded, "liger_kernel_config": left(),
    "use_cache": unneeded, "torch_empty_cache_steps": unneeded, "log_on_each_node": unneeded,
    "logging_nan_inf_filter": unneeded, "log_level_replica": unneeded, "project": to("logger.project"),
    "trackio_space_id": left(), "trackio_bucket_id": left(), "trackio_static_space_id": left(), "eval_delay": left(),
    "eval_do_concat_batches": unneeded, "eval_use_gather_object": unneeded, "include_for_metrics": left(),
    "batch_eval_metrics": unneeded, "save_on_each_node": unneeded, "enable_jit_checkpoint": unneeded,
    "hub_token": left(), "hub_strategy": usual("every_save", "end"), "hub_always_push": unneeded,
    "hub_revision": left(), "restore_callback_states_from_checkpoint": unneeded, "use_cpu": left(),
    "accelerator_config": left(), "parallelism_config": left(), "dataloader_multiprocessing_context": unneeded,
    "dataloader_in_order": unneeded, "label_names": left(), "train_sampling_strategy": usual("random"),
    "length_column_name": unneeded, "ddp_bucket_cap_mb": unneeded, "ddp_broadcast_buffers": unneeded,
    "ddp_static_graph": unneeded, "ddp_backend": unneeded, "debug": unneeded, "skip_memory_metrics": unneeded,
}  # fmt: skip

EVALUATION = ("eval_steps", "eval_epochs", "eval_on_start", "load_best_model_at_end", "metric_for_best_model",
              "greater_is_better", "early_stopping_patience")  # fmt: skip


def finish(draft: Draft) -> None:
    """Settle what depends on several of their keys: strategies, an evaluation without data, keys of an optimizer."""
    for ours, strategy in (
        ("eval", draft.their.get("eval_strategy", draft.their.get("evaluation_strategy"))),
        ("save", draft.their.get("save_strategy")),
    ):
        if strategy == "epoch":
            draft.drop(f"{ours}_steps")
            draft.set(f"{ours}_epochs", 1)
        elif strategy in ("no", False):
            draft.drop(f"{ours}_steps")
        steps = draft.keys.get(f"{ours}_steps")
        if isinstance(steps, float) and steps < 1:  # there a share of all steps
            draft.drop(f"{ours}_steps")
            draft.leave(f"{ours}_steps", f"a share of all steps; give {ours}_steps or {ours}_epochs")
    finish_evaluation(draft)
    finish_optimizer(draft)
    if draft.keys.get("warmup_ratio") and draft.keys.get("warmup_steps"):
        draft.set("warmup_ratio", None)


def finish_evaluation(draft: Draft) -> None:
    """Drop what needs an evaluation where there is no data for one."""
    if not any(draft.keys.get(key) for key in ("eval_file", "data.eval_fraction", "data.eval_samples")):
        draft.drop(*EVALUATION)
    if draft.keys.get("load_best_model_at_end") and not draft.keys.get("metric_for_best_model"):
        draft.drop("metric_for_best_model", "greater_is_better")


def finish_optimizer(draft: Draft) -> None:
    """Drop what an optimizer does not read."""
    name = draft.groups.get("optimizer", "adamw")
    if draft.keys.get("optimizer.state_dtype") == "bf16" and draft.keys["optimizer.betas"][1] > MAX_BF16_BETA:
        draft.leave("adam_beta2", f"optimizer.betas: at most {MAX_BF16_BETA} with optimizer.state_dtype=bf16")
        set_betas(draft, second=MAX_BF16_BETA)
    draft.drop(
        *([] if name.startswith("adamw") else ["optimizer.eps"]), *(["optimizer.betas"] if name == "sgd" else [])
    )


def set_held_out(draft: Draft, key: str, value: Any) -> None:
    """A share of the training data to evaluate on, or from 1 a number of samples."""
    if value and value < 1:
        draft.set("data.eval_fraction", value)
    elif value:
        draft.set("data.eval_samples", int(value))


def name_hub(name: str, **options: Any) -> str:
    """Return a data set of the hub as `train_file` takes it."""
    given = "&".join(f"{key}={value}" for key, value in options.items() if value)
    return f"hf:{name}" + (f"?{given}" if given else "")


def set_task(draft: Draft, task: str) -> None:
    """Choose objective and data. task: sft, pretrain, dpo, orpo, simpo, cpo, kto or reward."""
    kinds = {"sft": "chat", "pretrain": "pretrain", "kto": "unpaired_preference"}
    draft.groups["data"] = kinds.get(task, "preference")
    if task not in ("sft", "pretrain", "dpo", "kto"):
        draft.set("task", task)
    if task == "reward" and draft.groups.pop("adapter", None) is not None:
        for key in [key for key in draft.keys if key.startswith("adapter.")]:
            draft.drop(key)
        draft.leave("adapter", "task=reward trains the whole model")
    if task not in ("sft", "pretrain"):
        draft.drop("data.packing")
    if task == "pretrain":
        draft.drop("data.packing", "data.chat_template")
