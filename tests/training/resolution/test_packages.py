"""A run refuses to start without the packages that its keys need; a plan needs none of them."""

from __future__ import annotations

import pytest
from support.configs import build_config

from errors import UserError
from training.resolution.packages import check_packages
from training.resolution.resolve import check_keys


@pytest.mark.parametrize(
    ("overrides", "missing", "message"),
    [
        (
            ["attn_implementation=flash_attention_2"],
            "flash_attn",
            "flash_attention_2 needs the package flash_attn",
        ),
        (
            ["adapter=lora", "adapter.load_in_4bit=true"],
            "bitsandbytes",
            "load_in_4bit=true needs the package bits",
        ),
        (["flash_kernels=fa3"], "flash_attn_interface", "flash_kernels=fa3 needs the package flash_attn_interface"),
        (["logger=wandb"], "wandb", "logger=wandb needs the package wandb"),
        (["optimizer=adamw_8bit"], "bitsandbytes", "optimizer=adamw_8bit needs the package bitsandbytes"),
    ],
)
def test_a_missing_package_is_named_by_its_key(
    overrides: list[str], missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.resolution.packages.has_package", lambda name: name != missing)
    monkeypatch.setattr("training.resolution.resolve.has_package", lambda name: name != missing)
    monkeypatch.setattr("training.trackers.build.find_spec", lambda name: None if name == missing else name)
    config = build_config("precision=bf16", "micro_batch_size=1", "global_batch_size=1", *overrides)
    with pytest.raises(UserError, match=message):
        check_packages(config)
    check_keys(config, has_accelerator=True)
    check_packages(build_config())
