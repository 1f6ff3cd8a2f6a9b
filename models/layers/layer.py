"""The parts of a model: layers, the pieces in which their tensors are stored, and how tensor parallelism shards their
modules.

Below every family, so that a family imports this and nothing that looks families up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.layers.recurrent import find_mixers

_UNTRAINED = "is_untrained"  # an attribute of modules


@contextmanager
def explain_config(what: str) -> Iterator[None]:
    """Raise UserError for any other exception while `what` is built from a config: classes of transformers raise
    whatever a wrong value leads to."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"config.json: {what} cannot be built from it ({reason}); one of its fields is wrong, or of another release"
        ) from error


@dataclass(frozen=True)
class TensorPiece:
    """A Hugging Face tensor, by its whole name, that is a part of one of the module's tensors: `tensor[index]`."""

    hf_name: str
    index: tuple[int | slice, ...] = ()


class Style(Enum):
    """How tensor parallelism shards a part of a layer; the words of transformers' `base_model_tp_plan`, and of
    `models/sharding/tensor_parallel.py`."""

    COLUMN = "colwise"  # a projection cut by its outputs: each rank has some heads, or some of the inner neurons
    ROW = "rowwise"  # a projection cut by its inputs, after COLUMN ones: the ranks' outputs are summed
    # whole on each rank, in a block that is cut after it: the gradients are summed
    SUMMED = "replicated_with_grad_allreduce"
    # transformers' stacked ones, `gate_up_proj` and `down_proj`: each cut as a gate, an up and a down projection
    EXPERTS = "experts"
    HEADS = "heads"  # a parameter with one number for each head
    NORM = "norm"  # over the outputs of a COLUMN projection, cut like them: the mean of squares is over all ranks
    VOCABULARY = "vocabulary"  # an embedding or a head cut by its tokens


@dataclass(frozen=True)
class Fused:
    """Several projections sharded by their outputs (COLUMN) that are one matrix: `sizes` outputs each, end to end, each
    sharded by itself."""

    sizes: tuple[int, ...]


Styles = Mapping[str, Style | Fused]


@dataclass(frozen=True)
class Layer:
    """One layer of the pipeline.

    hf_prefix: the Hugging Face name of a parameter is this prefix plus its name in `module_class(*args)`.
    tied_key: layers that share one module have the same key; the first of them owns the weights (and their file).
    forward_fn: how a layer uses a module that it shares: `forward_fn(module, inputs)`; None means `module(inputs)`.
    pieces: for tensors that Hugging Face stores in several, or under another name.
    styles: the parts that tensor parallelism shards, by their names in the module ("" is the module itself); empty
    without it. experts: of the module's stacks of experts, by their names in it, those experts that are read where each
    has tensors of its own on disk; all of a stack that is not named. kept: weights that are not read with the layer's
    tensors, since they stay as the files hold them (`models/weights/published.py`). fp32: the names of
    the module's parameters that stay in fp32 in a model of 16 bits (`models/architecture/fp32.py`). fp32_in_fp16: of
    all that do in fp16, where `transformers` keeps some that it rounds to bf16. is_further: a layer that predicts
    further tokens, or looks their embeddings up (`models/further/`). num_blocks: blocks of hidden states that go in,
    end to end along the rows: one for each token that is predicted. is_joined: whether the layer takes more from the
    one before it than a stage sends, so that one chunk has both.
    """

    hf_prefix: str
    module_class: type[nn.Module]
    args: tuple[Any, ...]
    tied_key: str | None = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None
    pieces: Mapping[str, Sequence[TensorPiece]] = field(default_factory=dict)
    styles: Styles = field(default_factory=dict)
    experts: Mapping[str, range] = field(default_factory=dict)
    kept: Set[str] = frozenset()
    fp32: Set[str] = frozenset()
    fp32_in_fp16: Set[str] = frozenset()
    is_further: bool = False
    num_blocks: int = 1
    is_joined: bool = False

    @property
    def owns_weights(self) -> bool:
        return self.forward_fn is None

    @property
    def is_tied_head(self) -> bool:
        """Whether the layer multiplies with the token embedding, where others look tokens up."""
        return not self.owns_weights and not self.is_further

    def build_on_meta(self) -> nn.Module:
        """Return the module without storage: its parameter names, shapes and counts cost nothing. Raises UserError for
        a config that its class cannot be built from."""
        with torch.device("meta"), explain_config(f"layer '{self.hf_prefix}'"):
            return self.module_class(*self.args).to("meta")  # buffers that follow from the config have storage

    def with_pieces(self, pieces: Mapping[str, Sequence[TensorPiece]]) -> Layer:
        """Return the layer with other pieces."""
        return replace(self, pieces=pieces)

    def shapes(self) -> dict[str, torch.Size]:
        """Return parameter name (as in the layer file) -> shape; without those that are `kept`."""
        tensors = self.build_on_meta().state_dict()
        return {name: tensor.shape for name, tensor in tensors.items() if name not in self.kept}

    def buffer_names(self) -> set[str]:
        """Return the names of the layer file's tensors that are not trained and keep their own dtype. Not the factors
        that a mixer multiplies activations with (the decays of minimax): they have the dtype of those."""
        module = self.build_on_meta()
        mixers = find_mixers(module, getattr(module, "attention_type", ""))
        factors = {id(factor) for mixer in mixers for factor in mixer.buffers()}
        stored = module.state_dict().keys() - {name for name, _ in module.named_parameters()}
        return stored - {name for name, buffer in module.named_buffers() if id(buffer) in factors}

    def list_fp32(self, dtype: torch.dtype) -> Set[str]:
        """Return the names of the module's parameters that stay in fp32 in a model of `dtype`, one of 16 bits."""
        return self.fp32_in_fp16 if dtype is torch.float16 else self.fp32

    def get_pieces(self, name: str) -> list[TensorPiece]:
        """Return the Hugging Face tensors, named in full, that make up the module's tensor `name`; usually a single
        one."""
        return list(self.pieces.get(name, (TensorPiece(self.hf_prefix + name),)))

    def reads(self, name: str, piece: TensorPiece) -> bool:
        """Return whether a piece of the module's tensor `name` is read: not one of an expert that another rank has."""
        expert = piece.index[0] if piece.index else None
        return name not in self.experts or not isinstance(expert, int) or expert in self.experts[name]


def leave_untrained(module: nn.Module) -> None:
    """Freeze a part of a layer that the loss of tokens has no gradient for, such as an indexer. Adapters leave it out
    too."""
    module.requires_grad_(False)
    setattr(module, _UNTRAINED, True)


def list_untrained(layer: nn.Module) -> set[str]:
    """Return the names of the modules in the parts of a layer that `leave_untrained` has frozen."""
    parts = [name for name, part in layer.named_modules() if getattr(part, _UNTRAINED, False)]
    return {name for name, _ in layer.named_modules() if any(f"{name}.".startswith(f"{part}.") for part in parts)}


def refuse_sharding(config: PretrainedConfig, reason: str) -> UserError:
    """Return the error for a family that tensor parallelism cannot shard; the caller raises it."""
    return UserError(
        f"tensor_parallel_size: a '{config.model_type}' cannot be sharded: {reason}; "
        "give tensor_parallel_size=1 and more num_stages"
    )


def list_layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the config of each layer, or the model's alone where layers have the same (Gemma 4's have different
    heads)."""
    configs: Sequence[PretrainedConfig] = config.per_layer_config if config.is_heterogeneous else [config]
    return configs
