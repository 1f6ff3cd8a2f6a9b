"""axolotl: its YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extensions.import_config import hugging_face
from extensions.import_config.draft import (
    TEMPLATE_OF_PAIRS,
    Draft,
    Rule,
    at_least_one,
    if_true,
    left,
    read_list,
    set_init_weights,
    set_targets,
    set_zero_stage,
    to,
    unneeded,
    usual,
    when,
)
from extensions.import_config.hugging_face import SCHEDULES, name_hub, set_betas, set_held_out, set_task

HEADINGS = ("From axolotl",)
DEFAULTS = {**hugging_face.DEFAULTS, "lr_scheduler_type": "cosine", "num_train_epochs": 1, "micro_batch_size": 1,
            "max_seq_length": 2048, "warmup_ratio": 0.03}  # fmt: skip
LENGTHS = {name: {"data.length_policy": name} for name in ("drop", "truncate")}
TASKS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
ADAPTERS: dict[Any, dict[str, Any]] = {
    "lora": {"adapter": "lora"}, "qlora": {"adapter": "lora", "adapter.load_in_4bit": True}, None: {}, "": {},
}  # fmt: skip


def set_evaluations(draft: Draft, key: str, value: Any) -> None:
    """So many per epoch."""
    if value:
        draft.set("eval_epochs" if key == "evals_per_epoch" else "save_epochs", round(1 / value, 6))


def set_tokens(draft: Draft, key: str, value: Any) -> None:
    """Special tokens: the one that ends a turn here; padding is the converter's."""
    if eos := (value or {}).get("eos_token"):
        draft.set("data.eos_token", eos)
    if others := [name for name in value or {} if name != "eos_token"]:
        draft.leave(f"special_tokens.{others[0]}", "data.special_tokens, convert2ckpt.py --pad_token")


TEXTS = ("completion", "pretrain")
# `type`s of records, without what follows a dot
KINDS = ("", *TEXTS, "chat_template", "alpaca", "alpaca_chat", "sharegpt", "chatml", "bradley_terry")
# What is read of an entry of `datasets`, and what says nothing of what is trained on
ENTRY_KEYS = {"path", "name", "split", "data_files", "type", "ds_type", "trust_remote_code"}
# By kind of data, what an entry calls the fields of a record -> our key
FIELDS = {
    "chat": {"field_messages": "data.messages_field"}, "pretrain": {"field": "data.text_field"},
    "preference": {"field_messages": "data.prompt_field", "field_chosen": "data.chosen_field",
                   "field_rejected": "data.rejected_field"},
    "unpaired_preference": {},
}  # fmt: skip
ENTRY_REASONS = {
    "shards": "none: data.max_samples takes the first records of each entry",
    "preprocess_shards": "none needed",
    "message_property_mappings": "messages are read as role and content, or as from and value; rename their fields",
}
OTHER_REASON = "none: what a record has is read by the keys of the group data; docs/data.md"
TRAINED_ROLES = ("assistant", "gpt", "model")
USUAL_VALUES = {"train_on_eos": "turn", "message_field_training": "train", "chat_template": "tokenizer_default"}
# Values that records of chats are read with here, whatever they are called
USUAL_MAPPINGS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})


def _is_as_usual(name: str, value: Any) -> bool:
    """Whether a key of an entry asks for what is always so here."""
    if name == "message_property_mappings":
        given = value if isinstance(value, dict) else {"": value}
        return any(given.items() <= mapping.items() for mapping in USUAL_MAPPINGS)
    if name == "roles_to_train":
        return {*read_list(value)} <= {*TRAINED_ROLES}
    return value in (None, USUAL_VALUES.get(name))


RULES: dict[str, Rule] = {
    "base_model": to("model_name_or_path"), "base_model_config": unneeded, "model_type": unneeded,
    "tokenizer_type": unneeded, "tokenizer_config": to("tokenizer_name_or_path"), "revision_of_model": left(),
    "trust_remote_code": to("trust_remote_code"), "strict": unneeded, "plugins": unneeded, "debug": unneeded,
    "local_rank": unneeded, "hub_model_id": to("hub.repo_id"), "save_first_step": unneeded, "datasets": unneeded,
    "test_datasets": unneeded, "dataset_prepared_path": unneeded, "dataset_processes": to("data.num_proc"),
    "shuffle_merged_datasets": unneeded, "val_set_size": set_held_out,
    "chat_template": left("the tokenizer's own, or data.chat_template"),
    "chat_template_jinja": to("data.chat_template"), "train_on_inputs": left(), "train_on_eos": usual("turn"),
    "roles_to_train": usual(*TRAINED_ROLES), "output_dir": to("output_dir"),
    "micro_batch_size": to("micro_batch_size"),
    "gradient_accumulation_steps": to("gradient_accumulation_steps"), "eval_batch_size": unneeded,
    "learning_rate": to("learning_rate"), "weight_decay": to("weight_decay"), "warmup_ratio": to("warmup_ratio"),
    "warmup_steps": hugging_face.set_warmup, "max_steps": at_least_one("max_steps"),
    "num_epochs": to("num_train_epochs"),
    "logging_steps": to("logging_steps"), "eval_steps": to("eval_steps"), "save_steps": to("save_steps"),
    "evals_per_epoch": set_evaluations, "saves_per_epoch": set_evaluations, "eval_strategy": unneeded,
    "save_strategy": unneeded, "save_total_limit": at_least_one("keep_last"), "seed": to("seed"),
    "max_grad_norm": to("max_grad_norm"), "adapter": when(ADAPTERS), "lora_model_dir": to("adapter.name_or_path"),
    "lora_r": to("adapter.r"), "lora_alpha": to("adapter.lora_alpha"), "lora_dropout": to("adapter.lora_dropout"),
    "lora_target_modules": set_targets, "lora_target_linear": if_true(adapter__target_modules="all-linear"),
    "lora_modules_to_save": to("adapter.modules_to_save"), "lora_fan_in_fan_out": unneeded,
    "peft_use_dora": to("adapter.use_dora"), "peft_use_rslora": to("adapter.use_rslora"),
    "peft_init_lora_weights": set_init_weights, "relora_steps": left(),
    "load_in_8bit": left(), "load_in_4bit": to("adapter.load_in_4bit"), "unfrozen_parameters": left(),
    "sequence_len": to("max_seq_length"), "sample_packing": to("data.packing"), "eval_sample_packing": unneeded,
    "pad_to_sequence_len": if_true(data__pad_to="max_seq_length"), "group_by_length": to("data.group_by_length"),
    "excess_length_strategy": when(LENGTHS), "wandb_project": to("logger.project"),
    "wandb_name": to("logger.run_name"), "wandb_mode": unneeded, "wandb_entity": left(), "wandb_watch": left(),
    "wandb_log_model": left(), "wandb_run_id": left(), "use_wandb": unneeded, "use_mlflow": if_true(logger="mlflow"),
    "use_comet": if_true(logger="comet"), "use_trackio": if_true(logger="trackio"),
    "optimizer": when({**hugging_face.OPTIMIZERS, "adamw_torch_8bit": {"optimizer": "adamw_8bit"}}),
    "adam_beta1": lambda draft, key, value: set_betas(draft, first=value),
    "adam_beta2": lambda draft, key, value: set_betas(draft, second=value), "adam_epsilon": to("optimizer.eps"),
    "embedding_lr": left(), "embedding_lr_scale": left(), "lr_groups": left(),
    "loraplus_lr_ratio": to("adapter.loraplus_lr_ratio"),
    "lr_scheduler": when(SCHEDULES), "cosine_min_lr_ratio": to("min_lr_ratio"),
    "bf16": if_true(precision="bf16"), "fp16": if_true(precision="fp16"), "tf32": unneeded,
    "gradient_checkpointing": if_true(activation_checkpoint_interval=1), "gradient_checkpointing_kwargs": unneeded,
    "flash_attention": hugging_face.set_attention,
    "sdp_attention": if_true(attn_implementation="sdpa"),
    "flex_attention": if_true(attn_implementation="flex_attention"), "xformers_attention": left(),
    "attn_implementation": hugging_face.set_attention, "eager_attention": if_true(attn_implementation="eager"),
    "early_stopping_patience": to("early_stopping_patience"), "load_best_model_at_end": to("load_best_model_at_end"),
    "metric_for_best_model": hugging_face.set_metric, "greater_is_better": to("greater_is_better"),
    "resume_from_checkpoint": left(), "auto_resume_from_checkpoints": if_true(resume="auto"),
    "loss_watchdog_threshold": left(), "loss_watchdog_patience": left(), "deepspeed": set_zero_stage, "fsdp": left(),
    "fsdp_config": left("zero_stage, as fsdp"), "fsdp_version": unneeded,
    "tensor_parallel_size": to("tensor_parallel_size"), "context_parallel_size": to("context_parallel_size"),
    "dp_shard_size": left("zero_stage=3, or zero_stage=2"), "special_tokens": set_tokens,
    "tokens": to("data.special_tokens"), "rl": unneeded, "dpo_beta": unneeded, "rl_beta": unneeded,
    "kto_desirable_weight": to("kto.desirable_weight"), "kto_undesirable_weight": to("kto.undesirable_weight"),
    "reward_model": unneeded, "neftune_noise_alpha": to("neftune_noise_alpha"), "torch_compile": to("compile"),
    "liger_rms_norm": if_true(fused_kernels="auto"), "liger_rope": if_true(fused_kernels="auto"),
    "liger_glu_activation": if_true(fused_kernels="auto"), "liger_layer_norm": unneeded,
    "liger_fused_linear_cross_entropy": unneeded, "eval_table_size": left(), "eval_max_new_tokens": left(),
    "eval_causal_lm_metrics": left(), "do_causal_lm_eval": left(), "remove_unused_columns": unneeded,
}  # fmt: skip


def finish(draft: Draft, folder: Path, command: str) -> None:
    """Settle task and data, and the tracker that wandb's keys name."""
    their = draft.their
    kinds = [_read_kind(draft, entry) for entry in _list_entries(their.get("datasets"))]
    task = "sft"
    if their.get("reward_model"):
        task = "reward"
    elif their.get("rl") in TASKS:
        task = TASKS[their["rl"]]
        if their["rl"] == "ipo":
            draft.set("dpo.loss_type", "ipo")
    elif their.get("rl"):
        draft.leave("rl", "none: no training on generated answers; task=dpo learns from pairs")
    elif kinds and all(kind in TEXTS for kind in kinds):
        task = "pretrain"
    elif others := sorted({*kinds} & {*TEXTS}):
        draft.leave(
            f"datasets.type: {others[0]}", "data=pretrain, where all files hold plain text; here the others hold chats"
        )
    set_task(draft, task)
    beta = their.get("dpo_beta", their.get("rl_beta"))
    if beta is not None and task in ("dpo", "orpo", "simpo", "kto"):
        draft.set(f"{task}.beta", beta)
    if their.get("adapter") in ("lora", "qlora"):
        for ours, default in (("r", 8), ("lora_alpha", 16), ("lora_dropout", 0.0)):
            draft.keys.setdefault(f"adapter.{ours}", default)
    if their.get("wandb_project") and their.get("wandb_mode") != "disabled":
        draft.groups.setdefault("logger", "wandb")
        if their.get("wandb_mode") == "offline":
            draft.set("logger.mode", "offline")
    for theirs, ours in (("datasets", "train_file"), ("test_datasets", "eval_file")):
        files = [
            file
            for entry in _list_entries(their.get(theirs))
            for file in read_dataset(draft, entry, is_train=theirs == "datasets")
        ]
        if files:
            draft.set(ours, files[0] if len(files) == 1 else files)
    if "excess_length_strategy" not in their and draft.groups["data"] != "pretrain":
        draft.set("data.length_policy", "drop")  # axolotl's default
    for key in [key for key, value in draft.keys.items() if value is None and key not in ("warmup_ratio",)]:
        draft.drop(key)
    hugging_face.finish(draft)


def _list_entries(value: Any) -> list[Any]:
    return [value] if isinstance(value, dict) else list(value or [])


def _read_kind(draft: Draft, entry: Any) -> str:
    """Return the `type` of an entry of `datasets`; one that reads records in another way than here is left by name."""
    kind = entry.get("type") or "" if isinstance(entry, dict) else ""
    if isinstance(kind, dict):
        draft.leave("datasets.type", "data=sft, with data.prompt_field, data.completion_field and data.prompt_template")
        return ""
    name = str(kind).partition(".")[0]
    if name not in KINDS and draft.their.get("rl") is None:
        draft.leave(f"datasets.type: {kind}", "none: records are read as chats, or with Alpaca's fields; docs/data.md")
    elif draft.their.get("rl") is not None and name and kind not in ("chat_template", "chat_template.default"):
        draft.leave(f"datasets.type: {kind}", TEMPLATE_OF_PAIRS)
    return str(kind)


def read_dataset(draft: Draft, entry: Any, is_train: bool) -> list[str]:
    """Return an entry of `datasets` as `train_file` takes it, and set the field of its records. What else an entry says
    of what is trained on is left by name."""
    if isinstance(entry, str):
        return [entry]
    path, split = str(entry.get("path", "")), entry.get("split")
    for theirs, ours in FIELDS[draft.groups["data"]].items() if is_train else ():
        if not entry.get(theirs):
            continue
        if draft.keys.get(ours, entry[theirs]) == entry[theirs]:
            draft.set(ours, entry[theirs])
        else:
            draft.leave(f"datasets.{theirs}: {entry[theirs]}", f"{ours} is one for all files; rename the field")
    for name, value in entry.items():
        is_read = name in ENTRY_KEYS or name in FIELDS[draft.groups["data"]]
        if not is_read and not _is_as_usual(name, value):
            draft.leave(f"datasets.{name}", ENTRY_REASONS.get(name, OTHER_REASON))
    files, is_hub = entry.get("data_files"), "/" in path and not Path(path).exists()
    if files and is_hub and not Path(path).suffix:
        draft.leave("datasets.data_files", f"hf:NAME takes all files of a split; download {files} and name them")
    elif files or Path(path).suffix in (".json", ".jsonl", ".parquet", ".csv", ".txt") or Path(path).exists():
        if split not in (None, "train"):
            draft.leave("datasets.split", f"a file is taken whole; give the records of {split} in a file, or hf:NAME")
        folder = Path(path) if Path(path).is_dir() else Path()
        return [str(folder / file) for file in ([files] if isinstance(files, str) else files or [])] or [path]
    return [name_hub(path, config=entry.get("name"), split=split)]
