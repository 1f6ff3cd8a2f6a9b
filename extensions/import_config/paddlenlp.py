"""PaddleNLP: the JSON of `run_finetune.py`, `run_pretrain.py`, `dpo/run_dpo.py` and `run_kto.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extensions.import_config import hugging_face
from extensions.import_config.draft import Draft, Rule, if_true, left, to, unneeded, when
from extensions.import_config.hugging_face import set_task

HEADINGS = ("From PaddleNLP's Trainer",)
DEFAULTS = {**hugging_face.DEFAULTS, "max_seq_length": 2048}
SHARDING: dict[Any, dict[str, Any]] = {
    **{f"stage{stage}": {"zero_stage": stage} for stage in (1, 2, 3)},
    **{f"stage{stage} offload": {"zero_stage": stage, "offload_optimizer": "cpu"} for stage in (1, 2)}, "": {},
}  # fmt: skip
OPTIMIZERS = {
    "adamw": {"optimizer": "adamw"},
    "adamw_custom": {"optimizer": "adamw"},
    "adamw_16bit_moment": {"optimizer": "adamw", "optimizer.state_dtype": "bf16"},
}


RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    "dataset_name_or_path": unneeded, "train_dataset_path": unneeded, "dev_dataset_path": unneeded,
    "input_dir": unneeded,
    "src_length": unneeded, "max_length": to("max_seq_length"), "max_seq_len": to("max_seq_length"),
    "max_seq_length": to("max_seq_length"), "max_prompt_len": unneeded, "zero_padding": to("data.packing"),
    "greedy_zero_padding": unneeded, "pipeline_parallel_degree": to("num_stages"),
    "tensor_parallel_degree": to("tensor_parallel_size"), "sequence_parallel": to("sequence_parallel"),
    "sep_parallel_degree": to("context_parallel_size"), "context_parallel_degree": to("context_parallel_size"),
    "sharding": when(SHARDING), "sharding_parallel_degree": unneeded, "sharding_parallel_config": unneeded,
    "pipeline_parallel_config": unneeded, "tensor_parallel_config": unneeded, "virtual_pp_degree": unneeded,
    "optim": when(OPTIMIZERS), "lora": lambda draft, key, value: draft.set("adapter", "lora") if value else None,
    "lora_rank": to("adapter.r"), "lora_alpha": to("adapter.lora_alpha"),
    "lora_plus_scale": to("adapter.loraplus_lr_ratio"),
    "rslora": to("adapter.use_rslora"), "lora_path": to("adapter.name_or_path"), "prefix_tuning": left(),
    "recompute": if_true(activation_checkpoint_interval=1), "recompute_granularity": unneeded,
    "use_flash_attention": hugging_face.set_attention, "flash_mask": unneeded,
    "fp16_opt_level": unneeded, "amp_master_grad": unneeded, "unified_checkpoint": unneeded,
    "autotuner_benchmark": unneeded, "benchmark": unneeded, "eval_with_do_generation": left(), "intokens": unneeded,
    "skip_data_intervals": to("skip_data_intervals"), "beta": unneeded, "loss_type": unneeded,
    "label_smoothing": to("dpo.label_smoothing"), "simpo_gamma": to("simpo.gamma"), "reference_free": unneeded,
    "pref_loss_ratio": unneeded, "sft_loss_ratio": to("dpo.sft_coef"), "dpop_lambda": unneeded,
    "desirable_weight": to("kto.desirable_weight"), "undesirable_weight": to("kto.undesirable_weight"),
    "quant_type": left(), "weight_quantize_algo": left(), "split": left(),
    "expert_parallel_degree": to("expert_parallel_size"),
    "fuse_attention_qkv": unneeded, "fuse_attention_ffn": unneeded,
    "use_fused_rms_norm": if_true(fused_kernels="auto"),
    "use_fused_rope": if_true(fused_kernels="auto"), "save_sharded_model": unneeded, "device": unneeded,
    "enable_linear_fused_grad_add": unneeded, "min_learning_rate": unneeded, "decay_steps": left(),
    "continue_training": unneeded, "distributed_dataloader": unneeded, "lazy": unneeded,
}  # fmt: skip


def finish(draft: Draft, folder: Path, command: str) -> None:
    """Settle task and data."""
    their = draft.their
    task = "sft"
    if {"desirable_weight", "undesirable_weight"} & their.keys():
        task = "kto"
    elif "loss_type" in their or "beta" in their or "train_dataset_path" in their:
        task = their["loss_type"] if their.get("loss_type") in ("orpo", "simpo") else "dpo"
    elif "input_dir" in their:
        task = "pretrain"
    if task == "dpo" and their.get("loss_type") in ("sigmoid", "hinge", "ipo"):
        draft.set("dpo.loss_type", their["loss_type"])
    set_task(draft, task)
    if "beta" in their and task != "sft":
        draft.set(f"{task}.beta", their["beta"])
    if minimum := their.get("min_learning_rate"):
        draft.set("min_lr_ratio", round(minimum / draft.keys["learning_rate"], 6))
    if task == "sft":
        draft.groups["data"] = "sft"
        draft.set("data.prompt_field", "src")
        draft.set("data.completion_field", "tgt")
    if folder_of := their.get("dataset_name_or_path"):
        draft.set("train_file", f"{folder_of}/train.json")
        draft.set("eval_file", f"{folder_of}/dev.json")
    for theirs, ours in (
        ("train_dataset_path", "train_file"),
        ("dev_dataset_path", "eval_file"),
        ("input_dir", "train_file"),
    ):
        if their.get(theirs):
            draft.set(ours, their[theirs])
    if their.get("do_eval") is False:
        draft.drop("eval_file")
    hugging_face.finish(draft)
