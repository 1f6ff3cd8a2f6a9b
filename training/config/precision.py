"""The dtype of parameters and activations for each `precision`."""

from __future__ import annotations

import torch

from training.config.schema import Precision

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
