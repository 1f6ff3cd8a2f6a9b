"""TRL's command line: the YAML of `trl sft --config`, `trl dpo --config`, ..., or a script with such a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extensions.import_config import hugging_face
from extensions.import_config.draft import Draft, Rule, if_true, left, set_targets, to, unneeded, usual, when
from extensions.import_config.hugging_face import name_hub, set_task

HEADINGS = ("From TRL", "From the Hugging Face Trainer")
DEFAULTS = {**hugging_face.DEFAULTS, "learning_rate": 2e-5, "activation_checkpoint_interval": 1, "max_seq_length": 1024,
            "logging_steps": 10}  # fmt: skip
TASKS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward", "orpo": "orpo", "cpo": "cpo"}
PRECISIONS: dict[Any, dict[str, Any]] = {
    "bfloat16": {"precision": "bf16"}, "float16": {"precision": "fp16"}, "float32": {"precision": "fp32"}, "auto": {},
}  # fmt: skip


def set_targets_of_peft(draft: Draft, key: str, value: Any) -> None:
    set_targets(draft, key, value.split() if isinstance(value, str) and "," not in value else value)


def set_peft(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.set("adapter", "lora")
        for ours, default in (("r", 16), ("lora_alpha", 32), ("lora_dropout", 0.05)):
            draft.keys.setdefault(f"adapter.{ours}", default)


RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    "dataset_name": unneeded, "dataset_config": unneeded, "dataset_train_split": unneeded, "datasets": left(),
    "dataset_test_split": unneeded, "dataset_streaming": left("data.streaming=true, with max_steps"),
    "dataset_text_field": left("data=pretrain with data.text_field, where records hold plain text"),
    "dataset_num_proc": to("data.num_proc"), "dataset_kwargs": left(),
    "max_length": to("max_seq_length"), "max_seq_length": to("max_seq_length"), "max_prompt_length": unneeded,
    "max_completion_length": unneeded, "truncation_mode": unneeded, "packing": to("data.packing"),
    "packing_strategy": unneeded, "eval_packing": unneeded, "padding_free": if_true(data__packing=True),
    "completion_only_loss": usual(True), "assistant_only_loss": usual(True),
    "chat_template_path": to("data.chat_template"),
    "eos_token": to("data.eos_token"), "pad_token": left(), "use_peft": set_peft, "lora_r": to("adapter.r"),
    "lora_alpha": to("adapter.lora_alpha"), "lora_dropout": to("adapter.lora_dropout"),
    "lora_target_modules": set_targets_of_peft, "lora_modules_to_save": to("adapter.modules_to_save"),
    "lora_task_type": unneeded, "use_rslora": to("adapter.use_rslora"), "use_dora": to("adapter.use_dora"),
    "load_in_4bit": to("adapter.load_in_4bit"), "load_in_8bit": left("adapter.load_in_4bit"),
    "torch_dtype": when(PRECISIONS), "dtype": when(PRECISIONS), "model_revision": left(), "beta": unneeded,
    "loss_type": unneeded, "label_smoothing": to("dpo.label_smoothing"), "rpo_alpha": to("dpo.sft_coef"),
    "desirable_weight": to("kto.desirable_weight"), "undesirable_weight": to("kto.undesirable_weight"),
    "center_rewards_coefficient": to("reward.centering_coef"), "precompute_ref_log_probs": unneeded,
    "reference_free": left(), "ref_model": left(), "sync_ref_model": left(), "f_divergence_type": left(),
    "cpo_alpha": to("cpo.alpha"), "simpo_gamma": to("simpo.gamma"), "model_init_kwargs": left(),
    "bnb_4bit_quant_type": unneeded, "use_bnb_nested_quant": unneeded,
    "activation_offloading": to("activation_offload"),
}  # fmt: skip


def finish(draft: Draft, folder: Path, command: str) -> None:
    """Settle task and data. command: the word after `trl`, where it is known; a config alone does not say it."""
    task = TASKS.get(command) or guess_task(draft)
    loss = draft.their.get("loss_type")
    if task == "cpo" and loss == "simpo":
        task = "simpo"
        if "cpo_alpha" in draft.their:
            draft.set("simpo.sft_coef", draft.keys.pop("cpo.alpha"))
    elif task == "dpo" and loss in ("sigmoid", "ipo", "hinge", "robust"):
        draft.set("dpo.loss_type", loss)
    elif loss not in (None, "nll", "kto", "sigmoid"):
        draft.leave("loss_type")
    set_task(draft, task)
    if "beta" in draft.their and task in ("dpo", "orpo", "cpo", "simpo", "kto"):
        draft.set(f"{task}.beta", draft.their["beta"])
    name, config = draft.their.get("dataset_name"), draft.their.get("dataset_config")
    if name:
        is_file = Path(str(name)).suffix in (".json", ".jsonl", ".parquet", ".csv")
        train = draft.their.get("dataset_train_split", "train")
        draft.set("train_file", name if is_file else name_hub(name, config=config, split=train))
        if draft.their.get("eval_strategy", "no") not in ("no", False) and not is_file:
            draft.set("eval_file", name_hub(name, config=config, split=draft.their.get("dataset_test_split", "test")))
    hugging_face.finish(draft)


def guess_task(draft: Draft) -> str:
    their = draft.their
    if {"desirable_weight", "undesirable_weight"} & their.keys() or their.get("loss_type") == "kto":
        return "kto"
    if "center_rewards_coefficient" in their:
        return "reward"
    if {"cpo_alpha", "simpo_gamma"} & their.keys():
        return "cpo"
    return "dpo" if {"beta", "rpo_alpha", "max_prompt_length", "precompute_ref_log_probs"} & their.keys() else "sft"
