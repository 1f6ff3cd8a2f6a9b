"""The config of an adapter that somebody else has written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from errors import UserError
from models.adapters.folder import load_lora_config

VALID = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"r": -1}, "r=-1; it has to be a whole number from 1"),
        ({"r": "four"}, "r='four'; it has to be a whole number from 1"),
        ({"r": True}, "r=True; it has to be a whole number from 1"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj=0; it has to be a whole number from 1"),
        ({"lora_alpha": "x"}, "lora_alpha='x'; it has to be a number above 0"),
        ({"alpha_pattern": {"q_proj": -2}}, "alpha_pattern.q_proj=-2; it has to be a number above 0"),
        ({"lora_alpha": math.nan}, "lora_alpha=nan; it has to be a number above 0"),
        ({"lora_alpha": math.inf}, "lora_alpha=inf; it has to be a number above 0"),
        ({"rank_pattern": ["a"]}, "rank_pattern=['a']; it has to be a mapping of names to numbers"),
        ({"alpha_pattern": "x"}, "alpha_pattern='x'; it has to be a mapping"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head'; write a list of names there"),
        ({"target_modules": [1]}, "target_modules=[1]; write a list of names there"),
        ({"use_dora": "no"}, "use_dora='no'; it has to be true or false"),
        ({"peft_version": 19}, "peft_version=19; write it in quotes, or null"),
        ({"lora_dropout": 1}, "lora_dropout=1; it has to be a number from 0 to below 1"),
        (
            {"megatron_config": {"a": 1}},
            "megatron_config={'a': 1}, which is not supported",
        ),  # peft imports megatron_core
    ],
)
def test_numbers_that_no_adapter_can_have_are_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(VALID | {"megatron_core": "megatron.core"}))
    assert load_lora_config(tmp_path).r == 4
    file.write_text(json.dumps(VALID | changed))
    with pytest.raises(UserError) as raised:
        load_lora_config(tmp_path)
    assert str(raised.value).startswith(f"{file} has {message}")
