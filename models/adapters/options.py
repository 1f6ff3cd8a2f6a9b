"""The config group `adapter`; members and fields are named as a user names them.

The schema of a run imports this before torch is loaded, so nothing imported here may be slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any


class AdapterName(Enum):
    none = "none"
    lora = "lora"


# Other methods of peft, and why stages cannot run its code of them as it is
UNSUPPORTED = {
    "vera": "all layers of the model share its two random matrices, and a stage holds only its own layers",
    "prefix_tuning": "it goes through the cache of a whole model, and a stage holds only its own layers",
}


def starts_from_base(init: object) -> bool:
    """Returns whether an adapter with this `init_lora_weights` starts as a part of the base weights."""
    return re.fullmatch(r"pissa(_niter_[1-9]\d*)?|olora", str(init)) is not None


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
    keep_quantized: bool = False
    name_or_path: str | None = None

    @property
    def quantizes(self) -> bool:
        """Whether the frozen projections are kept in nf4."""
        return self.name is AdapterName.lora and self.load_in_4bit
