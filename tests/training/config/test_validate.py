"""Values that are refused before a run starts."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from support.configs import build_config
from transformers import LlamaConfig

from errors import UserError
from training.config.validate import MIN_DEEPSPEED, check_config, check_deepspeed_version, check_model_fields
from training.setup import check_compiler


@pytest.mark.parametrize("installed", ["0.16.9", "0.18.9", "0.19.2", "0.19.3", "0.9.0", "0.19.4rc1"])
def test_a_deepspeed_that_is_too_old_is_refused(installed: str) -> None:
    with pytest.raises(UserError, match=f"deepspeed {installed} is too old: .*; install deepspeed>={MIN_DEEPSPEED},<0"):
        check_deepspeed_version(installed)


@pytest.mark.parametrize("installed", ["0.19.4", "0.19.8", "0.19.10", "0.20.0", "1.0", "0.19.8+cu128"])
def test_a_newer_deepspeed_is_accepted(installed: str) -> None:
    check_deepspeed_version(installed)


def test_the_installed_deepspeed_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    check_deepspeed_version()
    monkeypatch.setattr("training.config.validate.version", lambda name: {"deepspeed": "0.18.2"}[name])
    with pytest.raises(UserError, match=r"deepspeed 0\.18\.2"):
        check_deepspeed_version()
    assert version("deepspeed") != "0.18.2"


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
        ("sharding_parallel_size=0", "sharding_parallel_size=0: at least 1; null: all replicas"),
        ("max_steps=-1", "max_steps=-1: at least 1"),
        ("stop_after_steps=0", "stop_after_steps=0: at least 1"),
        ("warmup_ratio=1.5", "warmup_ratio=1.5: a share between 0 and 1"),
        ("label_smoothing=1", "label_smoothing=1.0: from 0 to below 1"),
        ("label_smoothing=-0.1", "label_smoothing=-0.1: from 0 to below 1"),
        ("neftune_noise_alpha=-5", "neftune_noise_alpha=-5.0: 0 or more"),
        ("warmup_steps=-1", "warmup_steps=-1: 0 or more"),
        ("lr_scheduler_kwargs.power=0", "lr_scheduler_kwargs.power=0.0: more than 0"),
        ("lr_scheduler_kwargs.num_cycles=0", "lr_scheduler_kwargs.num_cycles=0: at least 1"),
        ("lr_scheduler_kwargs.decay_ratio=2", "lr_scheduler_kwargs.decay_ratio=2.0: a share between 0 and 1"),
        ("min_lr_ratio=-0.1", "min_lr_ratio=-0.1: a share between 0 and 1"),
        ("learning_rate=-1e-4", "learning_rate=-0.0001: 0 or more"),
        ("learning_rate=nan", "learning_rate=nan: a finite number, 0 or more"),
        ("max_grad_norm=inf", "max_grad_norm=inf: a finite number, 0 or more"),
        ("weight_decay=-1", "weight_decay=-1.0: 0 or more"),
        ("num_workers=-1", "num_workers=-1: 0 or more"),
        ("activation_checkpoint_interval=-1", "activation_checkpoint_interval=-1: 0 or more"),
        (
            "activation_checkpoint_interval=often",
            "activation_checkpoint_interval=often: 0 or more, or auto",
        ),
        ("activation_checkpoint_interval=1.5", "activation_checkpoint_interval=1.5: 0 or more, or auto"),
        ("activation_checkpoint_interval=null", "activation_checkpoint_interval=null: 0 or more, or auto"),
        ("activation_checkpoint_interval=[1]", "activation_checkpoint_interval=[1]: 0 or more, or auto"),
        (
            "activation_checkpoint_interval={layers:1}",
            "activation_checkpoint_interval={'layers': 1}: 0 or more, or auto",
        ),
        ("num_train_epochs=0", "num_train_epochs=0.0: more than 0"),
        (
            "optimizer.betas=[0.9,0.999] optimizer.state_dtype=bf16",
            "optimizer.betas=[0.9, 0.999]: at most 0.996 with optimizer.state_dtype=bf16",
        ),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: two numbers"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1.0]: two numbers from 0 to below 1"),
        ("optimizer.eps=0", "optimizer.eps=0.0: more than 0"),
        ("zero_stage=4", "zero_stage=4: one of 1, 2, 3; 1 partitions the optimizer's state"),
        ("schedule_memory_limit=0", "schedule_memory_limit=0: at least 1; null derives it from num_stages"),
        ("moe.z_loss_coef=-1", "moe.z_loss_coef=-1.0: 0 or more; 0 turns it off"),
        ("orpo.beta=0", "orpo.beta=0.0: more than 0"),
        ("simpo.gamma=-1", "simpo.gamma=-1.0: 0 or more; 0 turns it off"),
        ("cpo.alpha=-1", "cpo.alpha=-1.0: 0 or more; 0 turns it off"),
        ("dpo.sft_coef=inf", "dpo.sft_coef=inf: a finite number, 0 or more; 0 turns it off"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing=0.5: from 0 to below 0.5; at 0.5 no preference is left"),
        ("kto.undesirable_weight=0", "kto.undesirable_weight=0.0: more than 0"),
        ("export_steps=[0,5]", "export_steps=[0, 5]: give steps from 1, such as [500,1000]"),
        ("train_file=null", "train_file=None: give a path"),
        ("train_file=[]", "train_file=[]: give a path"),
        ("train_file=3", "train_file=3: give a path"),
        ("eval_file=3", "eval_file=3: give a path"),
        ("eval_file={a:1}", "eval_file.a=1: give a path"),
        ("eval_file={}", "eval_file={}: name at least one file, or give null"),
        ("eval_file={a.b:x}", "eval_file: 'a.b' cannot name an evaluation file; give a path, or names of letters"),
        ("eval_file={path:x}", "eval_file: 'path' cannot name an evaluation file"),
        ("eval_epochs=0", "eval_epochs=0.0: more than 0"),
        ("save_epochs=-1", "save_epochs=-1.0: more than 0"),
        (
            "skip_data_intervals=[[0,2]]",
            "skip_data_intervals: [0, 2] is not a first and a last step; give steps from 1",
        ),
        ("skip_data_intervals=[[1,2],[4,3]]", "skip_data_intervals: [4, 3] is not a first and a last step"),
        ("skip_data_intervals=[[1,2,3]]", "skip_data_intervals: [1, 2, 3] is not a first and a last step"),
        (
            "skip_data_intervals=[[2,4]] profile_step=3",
            "profile_step=3 is in skip_data_intervals; give a step that is trained",
        ),
        ("early_stopping_patience=0", "early_stopping_patience=0: at least 1"),
        ("early_stopping_threshold=-1", "early_stopping_threshold=-1.0: 0 or more"),
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
        check_compiler(build_config("compile=true"), has_accelerator=False)
    monkeypatch.setattr("training.setup.find_triton_obstacle", lambda: "triton needs a C compiler")
    with pytest.raises(
        UserError, match="compile=true cannot be used here: triton needs a C compiler; install that, or set compile"
    ):
        check_compiler(build_config("compile=true"), has_accelerator=True)
    monkeypatch.setattr("training.setup.find_triton_obstacle", lambda: None)
    check_compiler(build_config("compile=true"), has_accelerator=True)
    check_compiler(build_config("compile=true", "offload_optimizer=cpu"), has_accelerator=True)
    updated_there = build_config("compile=true", "offload_optimizer=cpu", "optimizer.state_dtype=bf16")
    with pytest.raises(UserError, match="no-such-compiler is not there"):
        check_compiler(updated_there, has_accelerator=True)


def test_the_model_group_must_agree_with_the_weights() -> None:
    config = LlamaConfig(hidden_size=48, num_attention_heads=4)
    check_model_fields({"model_type": "llama", "hidden_size": 48}, config, "/model")
    with pytest.raises(
        UserError, match="model.hidden_size=64, but /model/config.json says 48; .* or model=from_checkpoint"
    ):
        check_model_fields({"hidden_size": 64}, config, "/model")
    with pytest.raises(UserError, match="model.hiden_size is not a field of a 'llama' config"):
        check_model_fields({"hiden_size": 48}, config, "/model")
