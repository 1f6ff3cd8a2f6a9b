"""The config group `adapter`; members and fields are named as a user names them.

The schema of a run imports this before torch is loaded, so nothing imported here may be slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class AdapterName(Enum):
    none = "none"
    lora = "lora"


@dataclass
class AdapterOptions:
    """Each field is described in `conf/adapter/lora.yaml`."""

    name: AdapterName = AdapterName.none
    r: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.0
    target_modules: Any = "all-linear"
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Any = True
    loraplus_lr_ratio: float | None = None
    load_in_4bit: bool = False
    name_or_path: str | None = None
