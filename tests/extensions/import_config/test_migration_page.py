"""The importer's page names keys that exist: what its right columns show in code is a key, or a key and its
value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest

from extension import SHIPPED
from training.config.schema import build_schema, find_choice
from training.objectives.registry import OBJECTIVES

PAGE = SHIPPED / "import_config" / "README.md"
# Code in a right column that is not a key: commands, files, metrics, and what the text says of the other trainer.
OTHERS = re.compile(
    r".*\.py\b.*|--.*|hf/|.*\.json|deepspeed .*|\.\.\./.*|messages|eval_\w+_loss|eval_token_accuracy"
    r"|null|best|report\.html|orpo|simpo|stage\d|disable_p2p_cache_shape|epochs: 0.1|\+deepspeed.*|bf16"
    r"|offload_optimizer: \{.*|hf:NAME|\{_target_.*"
)
# Keys that the page names and that do not exist yet.
COMING: set[str] = set()


def list_named(page: str) -> Iterator[str]:
    """The code of the right columns; of a row that says "the same", that of the left one."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2 and set(cells[0]) != {"-"} and cells != ["there", "here"]:
            yield from re.findall(r"`([^`]+)`", cells[0] if cells[1].startswith("the same") else cells[1])


def find_wrong(named: str) -> str | None:
    """Returns what is wrong with a key, `key=value` or `key: value`; None if nothing is."""
    match = re.fullmatch(r"([\w.]+)(?:[=:](.*))?", named)
    if match is None:
        return "that is not a key"
    key, value = match[1], (match[2] or "").strip()
    hint: Any = build_schema()
    for name in key.split("."):
        hint = get_type_hints(hint).get(name) if is_dataclass(hint) else None
        if hint is None:
            return f"there is no key {key}"
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    enum = next((kind for kind in kinds if issubclass(kind, Enum)), None)
    if not re.fullmatch(r"[a-z]\w*", value) or value == "null":
        return None
    if enum is not None:
        return None if value in {member.value for member in enum} else f"{key} has no value {value}"
    if is_dataclass(hint):
        return None if find_choice(key, value) is not None else f"there is no {key}={value}"
    return f"there is no task {value}" if key == "task" and value not in OBJECTIVES else None


# The keys of one example of each: `run_clm.py` as its README starts it; TRL's scripts sft.py and dpo.py;
# train_lora/llama3_lora_sft.yaml; llama-3/lora-8b.yml; llm/config/llama/sft_argument.json.
EXAMPLES = {
    "From the Hugging Face Trainer": """
        model_name_or_path dataset_name dataset_config_name train_file validation_file per_device_train_batch_size
        per_device_eval_batch_size do_train do_eval output_dir config_overrides
    """,
    "From TRL": """
        model_name_or_path dataset_name dataset_streaming learning_rate num_train_epochs packing
        per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing eos_token eval_strategy
        eval_steps logging_steps use_peft lora_r lora_alpha output_dir push_to_hub remove_unused_columns report_to
    """,
    "From LLaMA-Factory": """
        model_name_or_path trust_remote_code stage do_train finetuning_type lora_rank lora_target dataset template
        cutoff_len max_samples overwrite_cache preprocessing_num_workers output_dir logging_steps save_steps plot_loss
        overwrite_output_dir per_device_train_batch_size gradient_accumulation_steps learning_rate num_train_epochs
        lr_scheduler_type warmup_ratio bf16 ddp_timeout val_size per_device_eval_batch_size eval_strategy eval_steps
    """,
    "From ms-swift": """
        model train_type dataset torch_dtype num_train_epochs per_device_train_batch_size learning_rate lora_rank
        lora_alpha target_modules gradient_accumulation_steps eval_steps save_steps save_total_limit logging_steps
        max_length output_dir system warmup_ratio dataloader_num_workers model_author model_name deepspeed rlhf_type
    """,
    "From axolotl": """
        base_model model_type tokenizer_type hub_model_id load_in_8bit load_in_4bit datasets dataset_prepared_path
        val_set_size output_dir sequence_len sample_packing eval_sample_packing adapter lora_model_dir lora_r lora_alpha
        lora_dropout lora_target_linear lora_modules_to_save wandb_project wandb_entity wandb_watch wandb_name
        wandb_log_model gradient_accumulation_steps micro_batch_size num_epochs optimizer lr_scheduler learning_rate
        bf16 tf32 gradient_checkpointing resume_from_checkpoint logging_steps flash_attention warmup_ratio
        evals_per_epoch saves_per_epoch weight_decay special_tokens save_first_step
    """,
    "From PaddleNLP's Trainer": """
        model_name_or_path dataset_name_or_path output_dir per_device_train_batch_size gradient_accumulation_steps
        per_device_eval_batch_size eval_accumulation_steps num_train_epochs learning_rate warmup_steps logging_steps
        evaluation_strategy save_strategy src_length max_length bf16 fp16_opt_level do_train do_eval disable_tqdm
        load_best_model_at_end eval_with_do_generation metric_for_best_model recompute save_total_limit
        tensor_parallel_degree pipeline_parallel_degree pipeline_parallel_config sharding zero_padding
        unified_checkpoint use_flash_attention
    """,
}
BESIDE_THE_KEYS_OF_THE_TRAINER = ("From TRL", "From LLaMA-Factory", "From ms-swift")

NAMED = sorted({named for named in list_named(PAGE.read_text()) if not OTHERS.fullmatch(named)})


def test_the_page_names_keys_that_are_there() -> None:
    assert len(NAMED) > 80
    wrong = {named: reason for named in NAMED if (reason := find_wrong(named)) and named not in COMING}
    assert not wrong, wrong


def test_what_is_still_to_come_is_not_there() -> None:
    assert not [named for named in COMING if find_wrong(named) is None], "it has come: take it out of COMING"
    assert set(NAMED) >= COMING


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("keep_lasst", "there is no key keep_lasst"),
        ("data.packng=true", "there is no key data.packng"),
        ("precision=fp8", "precision has no value fp8"),
        ("data=quiz", "there is no data=quiz"),
        ("task=ppo", "there is no task ppo"),
        ("max_steps: null", None),
        ("train_file=[{path: ..., weight: ...}, ...]", None),
    ],
)
def test_a_wrong_one_is_found(named: str, reason: str | None) -> None:
    assert find_wrong(named) == reason
    assert list(list_named(f"| there | here |\n|---|---|\n| `x` | `{named}` |\n| `a`, `b` | the same |\n")) == [
        named,
        "a",
        "b",
    ]


def list_left(page: str, heading: str) -> set[str]:
    """The keys in the left column under a heading."""
    (section,) = (part for part in page.split("\n## ") if part.startswith(heading))
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for code in re.findall(r"`([^`]+)`", row) for name in re.findall(r"\w+", code)}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_keys_of_the_main_example_are_there(heading: str) -> None:
    page = PAGE.read_text()
    known = list_left(page, heading)
    if heading in BESIDE_THE_KEYS_OF_THE_TRAINER:
        known |= list_left(page, "From the Hugging Face Trainer")
    assert [key for key in EXAMPLES[heading].split() if key not in known] == []
    assert "no_such_key" not in known and len(known) > 30
