"""ms-swift: the arguments of `swift sft`, `swift pt` and `swift rlhf`, in a script or a YAML or JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extensions.import_config import hugging_face
from extensions.import_config.draft import (
    Draft,
    Rule,
    if_true,
    left,
    read_list,
    set_init_weights,
    set_targets,
    to,
    unneeded,
    when,
)
from extensions.import_config.hugging_face import name_hub, set_held_out, set_task
from extensions.import_config.trl import PRECISIONS

HEADINGS = ("From ms-swift", "From the Hugging Face Trainer")
DEFAULTS = {**hugging_face.DEFAULTS, "lr_scheduler_type": "cosine", "warmup_ratio": 0.05, "micro_batch_size": 1,
            "activation_checkpoint_interval": 1, "optimizer.betas": [0.9, 0.95], "weight_decay": 0.1,
            "num_train_epochs": 1, "logging_steps": 5}  # fmt: skip
RLHF = {"dpo", "orpo", "simpo", "cpo", "kto", "rm"}
TUNERS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora"}, "full": {},
    "qlora": {"adapter": "lora", "adapter.load_in_4bit": True},
}  # fmt: skip


def set_tuner(draft: Draft, key: str, value: Any) -> None:
    if value == "adalora":
        draft.set("adapter", "lora")
        draft.leave(key, "none: adapter=lora, whose rank is the same for all matrices")
    else:
        when(TUNERS)(draft, key, value)


def set_targets_of_swift(draft: Draft, key: str, value: Any) -> None:
    set_targets(draft, key, value.split() if isinstance(value, str) and "," not in value else value)


def set_adapter(draft: Draft, key: str, value: Any) -> None:
    draft.set("adapter.name_or_path", read_list(value)[0])


def set_bits(draft: Draft, key: str, value: Any) -> None:
    if value == 4:
        draft.set("adapter.load_in_4bit", True)
    else:
        draft.leave(key)


RULES: dict[str, Rule] = {
    **hugging_face.RULES,
    "model": to("model_name_or_path"), "model_id_or_path": to("model_name_or_path"), "model_type": unneeded,
    "train_type": set_tuner, "tuner_type": set_tuner, "sft_type": set_tuner, "tuner_backend": unneeded,
    "lora_rank": to("adapter.r"), "lora_alpha": to("adapter.lora_alpha"), "lora_dropout": to("adapter.lora_dropout"),
    "target_modules": set_targets_of_swift, "lora_target_modules": set_targets_of_swift,
    "modules_to_save": to("adapter.modules_to_save"), "use_rslora": to("adapter.use_rslora"),
    "use_dora": to("adapter.use_dora"), "adapters": set_adapter,
    "lorap_lr_ratio": to("adapter.loraplus_lr_ratio"), "init_weights": set_init_weights, "quant_method": unneeded,
    "quant_bits": set_bits,
    "bnb_4bit_compute_dtype": unneeded, "bnb_4bit_quant_type": unneeded, "bnb_4bit_use_double_quant": unneeded,
    "torch_dtype": when(PRECISIONS), "dataset": unneeded, "val_dataset": unneeded,
    "split_dataset_ratio": set_held_out,
    "max_length": to("max_seq_length"), "truncation_strategy": left(), "system": left(),
    "packing": to("data.packing"), "padding_free": if_true(data__packing=True),
    "dataset_num_proc": to("data.num_proc"),
    "streaming": left("data.streaming=true, with max_steps"), "template": left(), "loss_scale": left(),
    "rlhf_type": unneeded, "beta": unneeded, "loss_type": unneeded, "rpo_alpha": to("dpo.sft_coef"),
    "simpo_gamma": to("simpo.gamma"), "cpo_alpha": to("cpo.alpha"), "desirable_weight": to("kto.desirable_weight"),
    "undesirable_weight": to("kto.undesirable_weight"), "label_smoothing": to("dpo.label_smoothing"),
    "center_rewards_coefficient": to("reward.centering_coef"), "attn_impl": hugging_face.set_attention,
    "freeze_parameters": to("freeze"), "freeze_vit": unneeded, "freeze_aligner": unneeded, "freeze_llm": left(),
    "model_author": unneeded, "model_name": unneeded, "use_hf": unneeded, "load_from_cache_file": unneeded,
    "add_version": unneeded, "ref_model": left(), "sequence_parallel_size": to("context_parallel_size"),
    "model_revision": left(), "lazy_tokenize": unneeded, "dataset_shuffle": unneeded, "save_safetensors": unneeded,
}  # fmt: skip


def finish(draft: Draft, folder: Path, command: str) -> None:
    """Settle task and data. command: the word after `swift`."""
    kind = draft.their.get("rlhf_type")
    task = "pretrain" if command == "pt" else "sft"
    if kind in RLHF:
        task = "reward" if kind == "rm" else str(kind)
    elif kind is not None:
        draft.leave("rlhf_type", "none: no training on generated answers; task=dpo learns from pairs")
    if (
        command != "pt"
        and draft.program != "megatron"
        and not {"train_type", "tuner_type", "sft_type"} & draft.their.keys()
    ):
        draft.set("adapter", "lora")  # ms-swift's own defaults, these and the next
    if "learning_rate" not in draft.their:
        draft.set("learning_rate", 1e-4 if draft.groups.get("adapter") == "lora" else 1e-5)
    if draft.groups.get("adapter") == "lora":
        for ours, default in (("r", 8), ("lora_alpha", 32), ("lora_dropout", 0.05)):
            draft.keys.setdefault(f"adapter.{ours}", default)
    if task == "dpo" and draft.their.get("loss_type") in ("sigmoid", "ipo", "hinge", "robust"):
        draft.set("dpo.loss_type", draft.their["loss_type"])
    set_task(draft, task)
    if "beta" in draft.their and task in ("dpo", "orpo", "cpo", "simpo", "kto"):
        draft.set(f"{task}.beta", draft.their["beta"])
    for theirs, ours in (("dataset", "train_file"), ("val_dataset", "eval_file")):
        read = [read_dataset(str(name)) for name in _words(draft.their.get(theirs))]
        if read:
            files = [file for file, _ in read]
            draft.set(ours, files[0] if len(files) == 1 else files)
        if theirs == "dataset" and any(count for _, count in read):
            set_counts(draft, {count for _, count in read})
    hugging_face.finish(draft)


def set_counts(draft: Draft, counts: set[int | None]) -> None:
    """Take the first samples of each file, where the numbers after `#` are the same for all."""
    (count, *others) = counts
    if others:
        draft.leave("dataset", "data.max_samples, which is one number for all files; shares: train_file with weights")
    else:
        draft.set("data.max_samples", count)


def _words(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else list(value or [])


def read_dataset(name: str) -> tuple[str, int | None]:
    """Return `ID:SUBSET#COUNT`, or a file, as an entry of `train_file`, and the count."""
    name, _, count = name.partition("#")
    name = name.removeprefix("hf::").removeprefix("ms::")
    name, _, subset = name.partition(":")
    if Path(name).is_dir():
        return str(Path(name) / "*.jsonl"), int(count) if count.isdigit() else None
    path = (
        name
        if Path(name).suffix or name.startswith(("/", "."))
        else name_hub(name, config=subset.partition("/")[0] if subset else None)
    )
    return path, int(count) if count.isdigit() else None
