"""The template of a run's prompts, which lies next to its tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.configs import build_config

from training.inputs.datasets import find_prompt_template


def test_data_without_prompts_has_none() -> None:
    tokenizer: Any = SimpleNamespace(chat_template=None)
    prompts = build_config("data=sft", "data.prompt_template='{prompt}:'")
    assert find_prompt_template(prompts, tokenizer, None) == "{prompt}:"
    assert find_prompt_template(build_config("data=pretrain"), tokenizer, None) is None
