"""Families without a file in models/, which are most of `transformers`.

Their decoder layers are those of `transformers`, and what a model does around them is read from its own forward pass
(`models/generic/backbone.py`). That may miss something: an operation between two layers, or in the wrapper of a
backbone. So such a model is proven before it is used: a small one of the same config with random weights, run here and
by `transformers`, must give the same loss and the same gradients. A model that differs is refused, and the message
gives the difference. Tensor parallelism follows the plan that `transformers` publishes (`base_model_tp_plan`).
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from errors import UserError
from models.generic.assembly import assemble, read_backbone_spec
from models.generic.backbone import Backbone
from models.generic.obstacles import list_obstacles
from models.generic.packing import compare_with_documents_alone
from models.generic.padding import compare_with_rows_alone
from models.generic.proof import BOUND, compare_with_transformers, run_layers
from models.generic.shrink import build_small, shrink
from models.layers.layer import Layer
from models.layers.packed_attention import FLASH, VARLEN
from models.layers.sharding_styles import read_published_plan

tensor_parallel_plan = read_published_plan
_proven: dict[str, str | None] = {}  # a config -> why a pipeline of its layers does not compute what the model does
_packs: dict[str, str | None] = {}  # a config -> evidence that documents of a packed row see each other


def build_layers(config: PretrainedConfig) -> list[Layer]:
    """Return the layers of a family without a file. Raises UserError with the reason for a family whose layers in a
    pipeline do not compute what the model does."""
    if (fault := _recall_fault(config)) is not None:
        raise UserError(
            f"model_type '{config.model_type}' has no file in models/, "
            f"and a pipeline of its layers does not compute what the model does: {fault}. "
            "docs/add_a_model.md says how to write the file"
        )
    return assemble(config)


def _recall_fault(config: PretrainedConfig) -> str | None:
    key = config.to_json_string(use_diff=False)
    if key not in _proven:
        _proven[key] = find_fault(config)
    return _proven[key]


def count_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions of the smallest position table, before the layers or in one; None where there is
    none, or `build_layers` refuses the model."""
    if _recall_fault(config) is not None:
        return None
    backbone = Backbone(config)
    tables = [
        part for name in read_backbone_spec(config).before if isinstance(part := backbone.parts[name], nn.Embedding)
    ]
    counts = [
        table.num_embeddings - getattr(table, "offset", 0) for table in tables
    ]  # OPT's begins with two extra rows
    length: int = getattr(config, "max_position_embeddings", 0)
    buffers = [buffer for part in (backbone.layers[0], *backbone.parts.values()) for buffer in part.buffers()]
    counts += [length for buffer in buffers if buffer.dim() > 1 and length in buffer.shape]
    return min(counts, default=None)


def is_published(config: PretrainedConfig) -> bool:
    """Return whether `transformers` has a causal language model for this config."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def list_attention(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the attention implementations that the family can use, the default first."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kernels = ["sdpa", VARLEN] if model_class._supports_sdpa else []
    flash = FLASH if model_class._supports_flash_attn else ()
    return *kernels, "eager", *flash, *(["flex_attention"] if model_class._supports_flex_attn else [])


def passes_documents(config: PretrainedConfig) -> bool:
    """Return whether the layers pass on to their attention what it needs to keep packed documents apart without a mask:
    a small model gives the same loss with it as with the mask."""
    small = shrink(config)
    position_ids = torch.cat([torch.arange(9), torch.arange(15)]).repeat(2, 1)
    losses = []
    for small._attn_implementation in (list_attention(config)[0], VARLEN):
        try:
            model, input_ids = build_small(small)
            losses.append(run_layers(assemble(small), model.state_dict(), input_ids, small, position_ids)[0])
        except (KeyError, TypeError, ValueError):
            # Its layers do not know the name (falcon), or `models.layers.packed_attention.attend` lacks its keyword, or
            # got one that it refuses
            return False
    return abs(losses[1].item() / losses[0].item() - 1) < BOUND


def find_leak(config: PretrainedConfig) -> str | None:
    """Return evidence that documents of a packed row see each other; None where they do not."""
    key = config.to_json_string(use_diff=False)
    if key not in _packs:
        _packs[key] = _find_leak(config)
    return _packs[key]


def _find_leak(config: PretrainedConfig) -> str | None:
    small = shrink(config)
    small._attn_implementation = list_attention(config)[0]
    try:
        worst, name = compare_with_documents_alone(small)
    except Exception as error:  # other people's code, which may take rows of one document alone
        return f"a small model of this config cannot be run on packed rows ({_locate(error)})"
    if worst < BOUND:
        return None
    return f"'{name}' of a small model differs by {worst:.0e} from that of each document alone"


def find_fault(config: PretrainedConfig) -> str | None:
    """Return why a pipeline of a model's layers does not compute what the model does, as its config says, or a small
    model of the same config shows; None where it does."""
    if obstacles := list_obstacles(config):
        return f"it has {'; '.join(obstacles)}"
    try:
        small = shrink(config)
        small._attn_implementation = list_attention(config)[0]
        worst, name = compare_with_transformers(small)
        padded = compare_with_rows_alone(small)
    except UserError as error:
        return str(error)
    except Exception as error:  # other people's code, on a config it was not made for
        return f"a small model of this config cannot be run by its layers alone ({_locate(error)})"
    if worst < BOUND and padded >= BOUND:
        return f"padding after a row changes the row's loss, by {padded:.0e} in a small model"
    if worst < BOUND:
        return None
    return f"it does something more, since '{name}' of a small model differs by {worst:.0e} from that of transformers"


def _locate(error: Exception) -> str:
    """Return the error in words, and the line of the model's own code that raised it."""
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if "/models/" in frame.filename]
    own = [frame for frame in lines if frame.filename.endswith(f"/modeling_{Path(frame.filename).parent.name}.py")]
    return f"in {own[-1].name}, '{own[-1].line}': {words}" if own else words
