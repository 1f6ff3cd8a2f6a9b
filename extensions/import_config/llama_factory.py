"""LLaMA-Factory: the YAML of `llamafactory-cli train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from extensions.import_config import hugging_face
from extensions.import_config.draft import (
    TEMPLATE_OF_PAIRS,
    Draft,
    Rule,
    if_true,
    left,
    read_list,
    set_targets,
    set_words,
    to,
    unneeded,
)
from extensions.import_config.hugging_face import name_hub, set_attention, set_held_out, set_task
from models.storage.tensor_files import load_json

HEADINGS = ("From LLaMA-Factory", "From the Hugging Face Trainer")
DEFAULTS = {**hugging_face.DEFAULTS, "activation_checkpoint_interval": 1, "max_seq_length": 2048}
STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}
# What an entry of dataset_info.json calls the fields of a record -> our key.
COLUMNS = {
    "prompt": "data.prompt_field", "response": "data.completion_field", "messages": "data.messages_field",
    "chosen": "data.chosen_field", "rejected": "data.rejected_field", "kto_tag": "data.label_field",
}  # fmt: skip
# What a record is read with here without a key: of Alpaca and of ShareGPT, and the names of OpenAI
COLUMN_NAMES = {
    "prompt": ("instruction",), "query": ("input",), "response": ("output",), "messages": ("conversations", "messages"),
    "system": ("system",), "tools": ("tools",), "history": ("history",), "chosen": ("chosen",),
    "rejected": ("rejected",), "kto_tag": ("label",),
}  # fmt: skip
TAG_NAMES = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip
FIELDS = {
    "chat": ("data.messages_field",), "preference": ("data.prompt_field", "data.chosen_field", "data.rejected_field"),
    "unpaired_preference": ("data.prompt_field", "data.completion_field", "data.label_field"),
    "pretrain": (),
}  # fmt: skip


ENTRY_KEYS = {"file_name", "hf_hub_url", "subset", "split", "columns", "tags", "formatting", "ranking"}
ENTRY_REASONS = {
    "num_samples": "data.max_samples, one number for all files",
    "ms_hub_url": "hf:NAME, or a file", "folder": "train_file of the files in it", "script_url": "a file",
}  # fmt: skip


def set_stage(draft: Draft, key: str, value: Any) -> None:
    if value not in STAGES:
        draft.leave(key, "none: no training on generated answers; task=dpo learns from pairs")


def set_finetuning(draft: Draft, key: str, value: Any) -> None:
    if value == "lora":
        draft.set("adapter", "lora")
        # LLaMA-Factory's own defaults
        for ours, default in (("r", 8), ("lora_alpha", 2 * draft.their.get("lora_rank", 8)), ("lora_dropout", 0.0)):
            draft.keys.setdefault(f"adapter.{ours}", default)
    elif value == "freeze":
        draft.leave(key, "freeze: patterns of what is not trained")
    elif value != "full":
        draft.leave(key)


def set_bits(draft: Draft, key: str, value: Any) -> None:
    if value == 4:
        draft.set("adapter.load_in_4bit", True)
    elif value:
        draft.leave(key)


def set_pissa(draft: Draft, key: str, value: Any) -> None:
    """`pissa_iter` is 16 there by default, and -1 for the whole decomposition."""
    if value:
        count = draft.their.get("pissa_iter", 16)
        draft.set("adapter.init_lora_weights", "pissa" if count == -1 else f"pissa_niter_{count}")


RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    "stage": set_stage, "finetuning_type": set_finetuning, "lora_rank": to("adapter.r"),
    "lora_alpha": to("adapter.lora_alpha"), "lora_dropout": to("adapter.lora_dropout"), "lora_target": set_targets,
    "use_rslora": to("adapter.use_rslora"), "use_dora": to("adapter.use_dora"),
    "adapter_name_or_path": to("adapter.name_or_path"), "additional_target": set_words("adapter.modules_to_save"),
    "quantization_bit": set_bits, "quantization_method": unneeded, "double_quantization": unneeded,
    "dataset": unneeded, "dataset_dir": unneeded, "eval_dataset": unneeded, "media_dir": unneeded,
    "template": left("the tokenizer's own chat template; where it has none, data.chat_template"),
    "cutoff_len": to("max_seq_length"), "max_samples": to("data.max_samples"),
    "preprocessing_num_workers": to("data.num_proc"), "preprocessing_batch_size": unneeded,
    "overwrite_cache": unneeded,
    "tokenized_path": unneeded, "packing": to("data.packing"), "neat_packing": if_true(data__packing=True),
    "train_on_prompt": left(), "mask_history": if_true(data__train_on="last_turn"), "val_size": set_held_out,
    "streaming": left("data.streaming=true, with max_steps"), "mix_strategy": left(), "interleave_probs": left(),
    "plot_loss": unneeded, "compute_accuracy": unneeded, "flash_attn": set_attention,
    "enable_liger_kernel": if_true(fused_kernels="auto"),
    "disable_gradient_checkpointing": if_true(activation_checkpoint_interval=0),
    "pref_loss": unneeded, "ref_model": left(), "enable_thinking": left(), "default_system": left(),
    "resize_vocab": unneeded, "add_tokens": set_words("data.special_tokens"),
    "new_special_tokens": set_words("data.special_tokens"),
    "rope_scaling": left(), "freeze_trainable_layers": left(), "freeze_trainable_modules": left(),
    "loraplus_lr_ratio": to("adapter.loraplus_lr_ratio"), "pissa_init": set_pissa,
    "pissa_iter": unneeded, "pissa_convert": unneeded,
    "use_galore": left(), "use_badam": left(), "use_apollo": left(), "freeze_vision_tower": unneeded,
    "freeze_multi_modal_projector": unneeded, "image_max_pixels": unneeded, "video_max_pixels": unneeded,
    "use_unsloth": unneeded, "upcast_layernorm": unneeded, "low_cpu_mem_usage": unneeded, "cache_dir": unneeded,
    "kto_chosen_weight": to("kto.desirable_weight"), "kto_rejected_weight": to("kto.undesirable_weight"),
    "pref_beta": unneeded, "pref_ftx": unneeded, "dpo_label_smoothing": to("dpo.label_smoothing"),
    "simpo_gamma": to("simpo.gamma"), "eval_on_each_dataset": unneeded,
}  # fmt: skip


def finish(draft: Draft, folder: Path, command: str) -> None:
    """Settle the task and its data. folder: of their config."""
    if "finetuning_type" not in draft.their:
        set_finetuning(draft, "finetuning_type", "lora")  # LLaMA-Factory's default
    task = STAGES.get(draft.their.get("stage", "sft"), "sft")
    loss = draft.their.get("pref_loss", "sigmoid")
    if task == "dpo" and loss in ("orpo", "simpo"):
        task = loss
    elif task == "dpo" and loss in ("sigmoid", "hinge", "ipo", "robust"):
        draft.set("dpo.loss_type", loss)
    elif task == "dpo":
        draft.leave("pref_loss")
    set_task(draft, task)
    if ("pref_beta" in draft.their and task in ("dpo", "orpo", "kto")) or task == "simpo":
        draft.set(f"{task}.beta", draft.their.get("pref_beta", 0.1))  # the default there for all of them
    if draft.their.get("pref_ftx") and task in ("dpo", "simpo"):
        draft.set(f"{task}.sft_coef", draft.their["pref_ftx"])
    if task != "simpo":
        draft.drop("simpo.gamma")
    set_data(draft, folder)
    if "template" in draft.their and draft.groups["data"] in ("preference", "unpaired_preference"):
        draft.leave("template", TEMPLATE_OF_PAIRS)
    hugging_face.finish(draft)


def set_data(draft: Draft, folder: Path) -> None:
    info = read_info(draft.their.get("dataset_dir", "data"), folder)
    for theirs, ours in (("dataset", "train_file"), ("eval_dataset", "eval_file")):
        files = [find_file(draft, name, info) for name in read_list(draft.their.get(theirs))]
        if files:
            draft.set(ours, files[0] if len(files) == 1 else files)


def read_info(dataset_dir: Any, folder: Path) -> Mapping[str, Any]:
    """Return dataset_info.json, which lies where the command was started, or above the config."""
    for base in (Path.cwd(), folder, *folder.absolute().parents):
        file = base / str(dataset_dir) / "dataset_info.json"
        if file.is_file():
            return {"": file.parent, **load_json(file)}
    return {}


def find_file(draft: Draft, name: str, info: Mapping[str, Any]) -> str:
    """Return a data set of dataset_info.json as `train_file` takes it, and set the fields of its records."""
    entry = info.get(name)
    if entry is None:
        draft.leave(f"dataset {name}", "it is not in a dataset_info.json that was found; give its file in train_file")
        return f"data/{name}.json"
    fields = {ours: field for ours, field in list_fields(entry) if ours in FIELDS[draft.groups["data"]]}
    for ours, field in fields.items():
        if draft.keys.get(ours, field) == field:
            draft.set(ours, field)
        else:
            draft.leave(
                f"dataset {name}: {field}", f"{ours} is one for all files, {draft.keys[ours]}; rename the field"
            )
    for part, usual_names in (("columns", COLUMN_NAMES), ("tags", TAG_NAMES)):
        for column, field in entry.get(part, {}).items():
            is_read = part == "columns" and COLUMNS.get(column) in FIELDS[draft.groups["data"]]
            if not is_read and field not in usual_names.get(column, ()):
                draft.leave(
                    f"dataset {name}: {part}.{column}", f"none: no key names it; rename '{field}' in the records"
                )
    for part in entry.keys() - ENTRY_KEYS:
        draft.leave(f"dataset {name}: {part}", ENTRY_REASONS.get(part, "none"))
    if "file_name" in entry:
        return str(info[""] / entry["file_name"])
    if "hf_hub_url" in entry:
        return name_hub(entry["hf_hub_url"], config=entry.get("subset"), split=entry.get("split"))
    draft.leave(f"dataset {name}", "it is neither a file nor a data set of the hub; give its file in train_file")
    return f"data/{name}.json"


def list_fields(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (our key, field of a record). The layouts of Alpaca and ShareGPT are read as they are."""
    for column, field in entry.get("columns", {}).items():
        if column in COLUMNS and field not in ("instruction", "output", "conversations"):
            yield COLUMNS[column], field
