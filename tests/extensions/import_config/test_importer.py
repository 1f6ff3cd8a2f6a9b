"""Published example configs of other trainers become ones that compose and can be planned."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from support.configs import CONF
from support.published_configs import CONFIGS
from transformers import TrainingArguments

from errors import UserError
from extensions.import_config import hugging_face
from extensions.import_config.__main__ import find_refusal
from extensions.import_config.draft import TEMPLATE_OF_PAIRS
from extensions.import_config.explain import explain, list_documented, read_rows
from extensions.import_config.importer import PROJECTS, Imported, import_config, take_layout
from training.cli.command_line import check_command_line
from training.config.schema import RunConfig, register_schema
from training.plan_command.run import plan_run

# The first of each project
SHORT = {project: name for name, (project, *_) in reversed(CONFIGS.items())}.values()


def convert(tmp_path: Path, name: str) -> Imported:
    project, file_name, text = CONFIGS[name]
    (tmp_path / file_name).write_text(text)
    imported = import_config(tmp_path / file_name)
    assert imported.project == project
    return imported


def compose(imported: Imported, tmp_path: Path, *overrides: str) -> RunConfig:
    """Compose the file that the importer writes, as `--config-dir` does."""
    text = imported.render("-cn mine", "theirs.yaml")
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "mine.yaml").write_text(text)
    register_schema()
    command = ["--config-dir", str(tmp_path / "conf"), "-cn", "mine", *overrides]
    return OmegaConf.to_object(check_command_line(command, CONF, "base"))


def test_there_are_thirty_examples_of_five_projects() -> None:
    assert len(CONFIGS) >= 30 and {project for project, _, _ in CONFIGS.values()} == set(PROJECTS)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS]
)
def test_an_example_composes_and_can_be_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imported = convert(tmp_path, name)
    keys = (
        "model=llama_3_1_8b",
        "plan=true",
        "hardware=h100",
        f"output_dir={tmp_path}/out",
        "overwrite_output_dir=false",
    )
    config = compose(imported, tmp_path, *keys)
    world_size = (
        8 if math.prod((config.num_stages, config.tensor_parallel_size, config.context_parallel_size)) <= 8 else 16
    )
    config.world_size = world_size
    text = "\n".join(plan_run(config))
    assert "FITS" in text or "DOES NOT FIT" in text, text
    unexplained = {key for key, why in imported.left.items() if not why}
    assert not unexplained, unexplained


def test_a_config_means_the_same_here(tmp_path: Path) -> None:
    """The one of LLaMA-Factory's README: what it says, and what it leaves to defaults that are not ours."""
    imported = convert(tmp_path, "llama-factory/llama3_lora_sft")
    config = compose(imported, tmp_path)
    assert config.model_name_or_path == "meta-llama/Meta-Llama-3-8B-Instruct" and config.max_seq_length == 2048
    assert (config.micro_batch_size, config.gradient_accumulation_steps, config.global_batch_size) == (1, 8, None)
    assert (config.learning_rate, config.warmup_ratio, config.min_lr_ratio) == (1e-4, 0.1, 0.0)
    assert config.optimizer.betas == [0.9, 0.999] and config.num_train_epochs == 3
    adapter = config.adapter
    assert (adapter.name.value, adapter.r, adapter.lora_alpha, adapter.target_modules) == ("lora", 8, 16, "all-linear")
    assert config.data.name == "chat" and config.data.eval_fraction == 0.1 and config.data.max_samples == 1000
    assert config.train_file == ["data/identity.json", "data/alpaca_en_demo.json"] and config.eval_steps == 500
    assert config.precision.value == "bf16" and config.activation_checkpoint_interval == 1
    assert set(imported.left) == {"template", "dataset identity", "dataset alpaca_en_demo"}


def test_data_sets_are_found_in_dataset_info_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"file_name": "identity.json"},
        "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en", "split": "train", "columns": {"messages": "turns"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    imported = convert(tmp_path, "llama-factory/llama3_lora_sft")
    assert imported.keys["train_file"] == [f"{tmp_path}/data/identity.json", "hf:llamafactory/alpaca_en?split=train"]
    assert imported.keys["data.messages_field"] == "turns"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("axolotl/fft_8b", {"data": "chat", "optimizer": "adamw_8bit", "zero_stage": 2, "eval_epochs": 0.5,
                            "data.messages_field": "conversations", "learning_rate": 2e-5, "fused_kernels": "auto",
                            "train_file": "hf:mlabonne/FineTome-100k?split=train[:20%]"}),
        ("axolotl/pretrain_8b", {"data": "pretrain", "logger": "wandb", "logger.mode": "offline", "keep_last": 2,
                                 "data.text_field": "body", "data.eval_samples": 100, "lr_scheduler_type": "constant"}),
        ("axolotl/kto_8b", {"data": "unpaired_preference", "kto.beta": 0.5, "kto.desirable_weight": 0.2,
                            "adapter.load_in_4bit": True}),
        ("trl/cpo_simpo.sh", {"data": "preference", "task": "simpo", "simpo.beta": 2.0, "simpo.sft_coef": 0.5,
                              "simpo.gamma": 0.5, "precision": "bf16", "adapter.r": 16}),
        ("trl/sft_full", {"data": "chat", "eval_file": "hf:trl-lib/Capybara?split=test",
                          "data.eos_token": "<|im_end|>"}),
        ("ms-swift/lora_sft.sh", {"adapter.r": 8, "adapter.target_modules": "all-linear", "data.max_samples": 500,
                                  "train_file": ["hf:AI-ModelScope/alpaca-gpt4-data-zh",
                                                 "hf:AI-ModelScope/alpaca-gpt4-data-en", "hf:swift/self-cognition"]}),
        ("ms-swift/pretrain.sh", {"data": "pretrain", "zero_stage": 3, "offload_parameters": "cpu", "max_steps": 1000}),
        ("paddlenlp/sft_argument.json", {"num_stages": 2, "tensor_parallel_size": 4, "data.prompt_field": "src",
                                         "eval_epochs": 1, "save_epochs": 1, "warmup_steps": 30, "keep_last": 1}),
        ("paddlenlp/pretrain_argument.json", {"optimizer.state_dtype": "bf16", "optimizer.betas": [0.9, 0.996],
                                              "min_lr_ratio": 0.1,
                                              "sequence_parallel": True, "data": "pretrain"}),
    ],
)  # fmt: skip
def test_what_becomes_of_the_keys(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    imported = convert(tmp_path, name)
    ours = {**imported.groups, **imported.keys}
    assert {key: ours.get(key) for key in expected} == expected


@pytest.mark.parametrize("project", PROJECTS)
def test_the_page_and_the_rules_know_the_same_keys(project: str) -> None:
    module = PROJECTS[project]
    documented = set(list_documented(module.HEADINGS))
    own = module.RULES.keys() - (hugging_face.RULES.keys() if module.RULES.keys() > {"ddp_timeout"} else set())
    assert sorted(key for key in own if key not in documented) == [], "README.md does not name them"


def test_every_field_of_training_arguments_has_a_rule() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert sorted(fields - hugging_face.RULES.keys()) == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("train_on_inputs: true\ntrain_on_eos: all\nroles_to_train: [assistant, user]\n",
         {"train_on_inputs", "train_on_eos", "roles_to_train"}),
        ("train_on_inputs: false\ntrain_on_eos: turn\nroles_to_train: [assistant]\n", set()),
        ("datasets: [{path: a.jsonl, type: chat_template, shards: 4, split: test, field_system: sys}]\n",
         {"datasets.shards", "datasets.split", "datasets.field_system"}),
        ("datasets: [{path: a.jsonl, message_property_mappings: {role: who, content: said}}]\n",
         {"datasets.message_property_mappings"}),
        ("datasets: [{path: a.jsonl, message_property_mappings: {role: from, content: value}, split: train}]\n", set()),
        ("datasets: [{path: a.jsonl, field_messages: turns}, {path: b.jsonl, field_messages: chat}]\n",
         {"datasets.field_messages: chat"}),
        ("datasets: [{path: a.jsonl, type: {field_instruction: q, format: 'Q: {instruction}'}}]\n", {"datasets.type"}),
        ("datasets: [{path: a.jsonl, type: input_output}]\n", {"datasets.type: input_output"}),
        ("datasets: [{path: a.jsonl, type: completion}, {path: b.jsonl, type: alpaca}]\n",
         {"datasets.type: completion"}),
        ("datasets: [{path: org/ds, data_files: part1.jsonl, type: alpaca}]\n", {"datasets.data_files"}),
        ("datasets: {path: json, data_files: [a.jsonl, b.jsonl], type: alpaca.load_qa}\n", set()),
        ("special_tokens: [<a>]\nwarmup_steps: auto\nval_set_size: 10%\n",
         {"special_tokens", "warmup_steps", "val_set_size"}),
        ("deepspeed: configs/run1.json\ntrue: 1\n", {"deepspeed", "True"}),
    ],
)  # fmt: skip
def test_what_changes_what_axolotl_trains_on_is_never_dropped(text: str, left: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"base_model: m\nsequence_len: 512\n{text}")
    imported = import_config(tmp_path / "a.yaml")
    assert imported.left.keys() == left and all(imported.left.values())


def test_every_file_of_an_entry_is_read(tmp_path: Path) -> None:
    text = "datasets: {path: json, data_files: [a.jsonl, b.jsonl], type: alpaca}\n"
    (tmp_path / "a.yaml").write_text(f"base_model: m\nsequence_len: 512\n{text}")
    assert import_config(tmp_path / "a.yaml").keys["train_file"] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("text", "expected", "left"),
    [
        ("swift sft --model m --train_type adalora --dataset hf::org/ds#5 /data/x.jsonl",
         {"adapter": "lora", "train_file": ["hf:org/ds", "/data/x.jsonl"]}, {"train_type", "dataset"}),
        ("megatron sft --model m --dataset a.jsonl --train_iters 5", {"train_file": "a.jsonl"}, {"train_iters"}),
        ("trl sft --model_name_or_path m --dataset_name org/ds --assistant_only_loss false "
         "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'",
         {"min_lr_ratio": 0.1}, {"assistant_only_loss"}),
        ("llamafactory-cli train there.yaml --learning_rate 1e-3",
         {"learning_rate": 1e-3, "max_seq_length": 77, "zero_stage": 2, "offload_optimizer": "cpu"}, set()),
        ("trl sft --config there.yaml --max_length 5", {"max_seq_length": 5, "zero_stage": 2}, {"stage", "cutoff_len"}),
    ],
)  # fmt: skip
def test_a_command_in_a_script(text: str, expected: dict[str, Any], left: set[str], tmp_path: Path) -> None:
    """With a config that it names; and a mapping in place of the path of DeepSpeed's."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    theirs = {"stage": "sft", "cutoff_len": 77, "learning_rate": 1, "deepspeed": {"zero_optimization": zero}}
    (tmp_path / "there.yaml").write_text(json.dumps(theirs))
    (tmp_path / "a.sh").write_text(f"{text}\n")
    imported = import_config(tmp_path / "a.sh")
    ours = {**imported.groups, **imported.keys}
    assert {key: ours.get(key) for key in expected} == expected and imported.left.keys() == left
    with pytest.raises(UserError, match="its command reads nowhere.yaml, which is not there; give that file"):
        (tmp_path / "b.sh").write_text("llamafactory-cli train nowhere.yaml\n")
        import_config(tmp_path / "b.sh")


def test_fields_of_llama_factorys_data_sets_are_never_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {
        "one": {"file_name": "a.json", "num_samples": 100, "columns": {"messages": "turns", "system": "preface"}},
        "two": {"file_name": "b.json", "columns": {"messages": "chat"},
                "tags": {"role_tag": "role", "user_tag": "who", "assistant_tag": "gpt"}},
    }  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "a.yaml").write_text("stage: sft\nfinetuning_type: full\ndataset: one,two\n")
    imported = import_config(tmp_path / "a.yaml")
    assert imported.keys["data.messages_field"] == "turns"
    assert imported.left.keys() == {
        "dataset one: columns.system", "dataset one: num_samples", "dataset two: chat", "dataset two: tags.user_tag"
    }  # fmt: skip
    for content, message in (('{"one": ', "is not valid JSON"), ('{"one": 5, "two": {}}', "is not understood")):
        (tmp_path / "data" / "dataset_info.json").write_text(content)
        with pytest.raises(UserError, match=message):
            import_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("schedule", "cycles", "expected"), [("cosine", 0.5, (None, False)), ("cosine", 2, (None, True)),
                                         ("cosine_with_restarts", 3, (3, False)), ("linear", 1.5, (None, True))],
)  # fmt: skip
def test_cycles_of_a_schedule(schedule: str, cycles: float, expected: tuple[int | None, bool], tmp_path: Path) -> None:
    keys = f"lr_scheduler_type: {schedule}\nlr_scheduler_kwargs: {{num_cycles: {cycles}}}\n"
    (tmp_path / "a.yaml").write_text(f"stage: sft\nmodel_name_or_path: m\n{keys}")
    imported = import_config(tmp_path / "a.yaml")
    is_left = "lr_scheduler_kwargs.num_cycles" in imported.left
    assert (imported.keys.get("lr_scheduler_kwargs.num_cycles"), is_left) == expected


def test_the_result_is_checked_as_a_run_is(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base_model: m\nsequence_len: 512\nmicro_batch_size: 2\nwarmup_ratio: 3\n")
    assert find_refusal(import_config(file)) == "warmup_ratio=3.0: a share between 0 and 1"
    file.write_text("base_model: m\nsequence_len: 512\nmicro_batch_size: two\n")
    with pytest.raises(UserError, match="^micro_batch_size=two: must be a whole number$"):
        find_refusal(import_config(file))


def test_a_layout_is_taken_with_its_batch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: m\nsequence_len: 512\ndatasets: [{path: a.jsonl}]\n")
    found = ["num_stages=2", "micro_batch_size=4", "gradient_accumulation_steps=null", "global_batch_size=32"]
    imported = take_layout(import_config(tmp_path / "a.yaml"), found)
    config = compose(imported, tmp_path)
    assert (config.num_stages, config.micro_batch_size, config.global_batch_size) == (2, 4, 32)
    assert config.gradient_accumulation_steps is None and find_refusal(imported) == ""


@pytest.mark.parametrize("name", SHORT)
def test_a_run_of_an_example_is_not_refused(name: str, tmp_path: Path) -> None:
    assert find_refusal(convert(tmp_path, name)) == ""


def test_what_is_left_is_said_with_the_nearest_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "stage: ppo\nfinetuning_type: full\nuse_galore: true\nlearning_rte: 1\nval_size: 0\n"
    )
    left = import_config(tmp_path / "a.yaml").left
    assert left["learning_rte"] == "none; the nearest key here is learning_rate"
    assert left["stage"] == "none: no training on generated answers; task=dpo learns from pairs"
    assert left["use_galore"] == "none: optimizer=adamw_8bit or optimizer.state_dtype=bf16 save memory"
    assert explain("zzz", ()) == "none; docs/configure.md lists every key"
    assert explain("mix_strategy", ("From LLaMA-Factory",)).endswith("data.mixture_by")


def test_a_template_that_pairs_of_texts_do_not_get_is_named(tmp_path: Path) -> None:
    for text, key in (
        ("stage: dpo\nfinetuning_type: full\ntemplate: qwen\n", "template"),
        ("base_model: a\nrl: dpo\ndatasets: [{path: a.jsonl, type: chatml.intel}]\n", "datasets.type: chatml.intel"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        assert import_config(tmp_path / "a.yaml").left[key] == TEMPLATE_OF_PAIRS
    (tmp_path / "a.yaml").write_text(text.replace("chatml.intel", "chat_template.default"))
    assert not any("type" in key for key in import_config(tmp_path / "a.yaml").left)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cutoff_len: 8\nfinetuning_type: lora\npissa_init: true\n", "pissa_niter_16"),
        ("cutoff_len: 8\nfinetuning_type: lora\npissa_init: true\npissa_iter: -1\npissa_convert: true\n", "pissa"),
        ("tuner_type: lora\nlora_rank: 4\ninit_weights: olora\nsystem: a\n", "olora"),
        ("base_model: a\nadapter: lora\nlora_r: 4\npeft_init_lora_weights: gaussian\n", "gaussian"),
        ("base_model: a\nadapter: lora\nlora_r: 4\npeft_init_lora_weights: loftq\n", None),
    ],
)
def test_the_start_of_an_adapter_is_carried_over(text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    imported = import_config(tmp_path / "a.yaml")
    assert imported.keys.get("adapter.init_lora_weights") == expected
    assert ("peft_init_lora_weights" in imported.left) == (expected is None)


@pytest.mark.parametrize("project", PROJECTS)
def test_what_has_no_counterpart_has_a_reason_or_a_nearest_key(project: str) -> None:
    rows = [row for heading in PROJECTS[project].HEADINGS for row in read_rows(heading)]
    assert rows and [left for left, right in rows if right.strip("; ") == "none"] == []


def test_the_written_file_names_its_source_and_what_is_left(tmp_path: Path) -> None:
    text = convert(tmp_path, "axolotl/lora_8b").render("-cn mine", "lora-8b.yml")
    assert text.startswith("# deepspeed trainer_base_ds_mp.py -cn mine\n# Made of lora-8b.yml (axolotl) by ")
    assert "#   special_tokens.pad_token: data.special_tokens, convert2ckpt.py --pad_token\n" in text
    loaded = yaml.safe_load(text)
    assert {"override adapter": "lora"} in loaded["defaults"] and loaded["adapter"]["r"] == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"x: 1\na: b: c", "cannot be read: line 2: mapping values are not allowed here; give a config"),
        (b"- a", "holds no keys with values; give a config"),
        (b"some words", "holds no keys with values; give a config"),
        (b"PK\x03\x04\xff\xfe", "cannot be read: .*; give a config"),
        (b"a: \x00", "cannot be read: .*; give a config"),
        (b"swift sft --model 'a", "cannot be read: No closing quotation; give a config"),
        (b"x: 1", "none of llama-factory, axolotl, trl, ms-swift, paddlenlp has these keys"),
    ],
)  # fmt: skip
def test_what_is_not_a_config_is_said_in_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(text)
    with pytest.raises(UserError, match=message):
        import_config(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="there is no such file"):
        import_config(tmp_path / "b.yaml")
