"""What is refused before anything is touched."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from support.configs import build_config
from transformers import LlamaConfig

from errors import UserError
from training.config.validate import MIN_DEEPSPEED, check_config, check_deepspeed_version, check_model_fields
from training.setup import check_compiler, check_packed_attention


@pytest.mark.parametrize("installed", ["0.16.9", "0.18.9", "0.19.2", "0.19.3", "0.9.0", "0.19.4rc1"])
def test_a_deepspeed_with_wrong_gradients_is_refused(installed: str) -> None:
    with pytest.raises(
        UserError, match=f"deepspeed {installed} computes wrong gradients .*; install deepspeed>={MIN_DEEPSPEED}"
    ):
        check_deepspeed_version(installed)


@pytest.mark.parametrize("installed", ["0.19.4", "0.19.8", "0.19.10", "0.20.0", "1.0", "0.19.8+cu128"])
def test_a_newer_deepspeed_is_taken(installed: str) -> None:
    check_deepspeed_version(installed)


def test_the_installed_deepspeed_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    check_deepspeed_version()
    monkeypatch.setattr("training.config.validate.version", lambda name: {"deepspeed": "0.18.2"}[name])
    with pytest.raises(UserError, match=r"deepspeed 0\.18\.2"):
        check_deepspeed_version()
    assert version("deepspeed") != "0.18.2"


def test_fp16_needs_a_gpu() -> None:
    check_config(build_config("precision=fp16"), has_accelerator=True)
    with pytest.raises(UserError, match="precision=fp16 needs a GPU .*; use precision=bf16 or fp32"):
        check_config(build_config("precision=fp16"), has_accelerator=False)


def test_the_defaults_pass() -> None:
    check_config(build_config(), has_accelerator=False)
    check_config(
        build_config("train_file=[a,b]", "eval_file=c", "eval_steps=1", "warmup_ratio=0", "min_lr_ratio=1"),
        has_accelerator=False,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("logging_steps=0", "logging_steps=0: at least 1"),
        ("max_seq_length=0", "max_seq_length=0: at least 1"),
        ("save_steps=0", "save_steps=0: at least 1; null turns it off"),
        ("max_steps=-1", "max_steps=-1: at least 1"),
        ("stop_after_steps=0", "stop_after_steps=0: at least 1"),
        ("warmup_ratio=1.5", "warmup_ratio=1.5: a share between 0 and 1"),
        ("min_lr_ratio=-0.1", "min_lr_ratio=-0.1: a share between 0 and 1"),
        ("learning_rate=-1e-4", "learning_rate=-0.0001: 0 or more"),
        ("learning_rate=nan", "learning_rate=nan: 0 or more"),
        ("max_grad_norm=inf", "max_grad_norm=inf: 0 or more"),
        ("weight_decay=-1", "weight_decay=-1.0: 0 or more"),
        ("num_workers=-1", "num_workers=-1: 0 or more"),
        ("activation_checkpoint_interval=-1", "activation_checkpoint_interval=-1: 0 or more"),
        (
            "activation_checkpoint_mode=every activation_checkpoint_interval=0",
            "activation_checkpoint_mode=every recomputes nothing",
        ),
        (
            "activation_checkpoint_mode=selective compile=true",
            "activation_checkpoint_mode=selective cannot look into compiled layers; set compile=false",
        ),
        ("num_train_epochs=0", "num_train_epochs=0.0: more than 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: two numbers"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1.0]: two numbers from 0 to below 1"),
        ("optimizer.eps=0", "optimizer.eps=0.0: more than 0"),
        ("train_file=null", "train_file=None: give a path"),
        ("train_file=[]", "train_file=[]: give a path"),
        ("train_file=3", "train_file=3: give a path"),
        ("eval_file={a:1}", "eval_file={'a': 1}: give a path"),
    ],
)
def test_a_value_out_of_range(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config(build_config(*override.split(" ")), has_accelerator=False)
    assert message in str(caught.value)


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        UserError, match="compile=true needs a C.. compiler, and no-such-compiler is not there; .* or set compile=false"
    ):
        check_compiler(has_accelerator=False)
    monkeypatch.setattr("training.setup.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="compile=true needs the package triton on a GPU; install it, or set compile=false"
    ):
        check_compiler(has_accelerator=True)


def test_resume_and_overwrite_contradict_each_other() -> None:
    with pytest.raises(UserError, match="resume and overwrite_output_dir=true contradict each other; give one"):
        check_config(build_config("resume=latest", "overwrite_output_dir=true"), has_accelerator=False)


def test_the_model_group_must_agree_with_the_weights() -> None:
    config = LlamaConfig(hidden_size=48, num_attention_heads=4)
    check_model_fields({"model_type": "llama", "hidden_size": 48}, config, "/model")
    with pytest.raises(
        UserError, match="model.hidden_size=64, but /model/config.json says 48; .* or model=from_checkpoint"
    ):
        check_model_fields({"hidden_size": 64}, config, "/model")
    with pytest.raises(UserError, match="model.hiden_size is no field of a 'llama' config"):
        check_model_fields({"hiden_size": 48}, config, "/model")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("eval_file=null",), "evaluate_only=true needs eval_file"),
        (
            ("eval_file=a.jsonl", "overwrite_output_dir=true"),
            "evaluate_only=true writes no checkpoint, and overwrite_output_dir=true would delete those there are",
        ),
    ],
)
def test_an_evaluation_needs_a_file_and_deletes_nothing(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(
            build_config("evaluate_only=true", "micro_batch_size=1", "global_batch_size=2", *overrides),
            has_accelerator=False,
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "init=random: model=from_checkpoint states no architecture; choose one of conf/model"),
        (("model=llama_7b",), "init=random needs tokenizer_name_or_path"),
        (
            ("model=llama_7b", "tokenizer_name_or_path=t", "adapter=lora"),
            "init=random and adapter=lora contradict each other",
        ),
        (
            ("model=llama_7b", "tokenizer_name_or_path=t", "data=preference"),
            "init=random and task=dpo contradict each other",
        ),
        (
            ("model=llama_7b", "tokenizer_name_or_path=t", "evaluate_only=true"),
            "init=random and evaluate_only=true contradict each other",
        ),
    ],
)
def test_training_from_scratch_needs_an_architecture_and_a_tokenizer(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(
            build_config("init=random", "micro_batch_size=1", "global_batch_size=2", *overrides), has_accelerator=False
        )


def test_flash_kernels_keep_packed_samples_apart_in_one_row_only() -> None:
    config = build_config("attn_implementation=flash_attention_2", "data.packing=true")
    check_packed_attention(config, 1)
    check_packed_attention(build_config("data.packing=true"), 2)
    check_packed_attention(build_config("attn_implementation=flash_attention_2"), 2)
    with pytest.raises(
        UserError, match="flash_attention_2 keeps packed samples apart in micro-batches of one row only, not 2"
    ):
        check_packed_attention(config, 2)
