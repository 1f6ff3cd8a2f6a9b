"""The pipeline layers that are made from the parts of a `Backbone`. B micro-batch, T sequence, D hidden."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from models.generic.backbone import Backbone
from models.layers.context import Activations, MicroBatchContext
from models.layers.decoder import BiasedLMHead, Embedding, LMHead, PipelineDecoderLayer, hand_to_loss
from models.layers.documents import build_packed_mask
from models.layers.packed_attention import FLASH, VARLEN


class BackboneContext(MicroBatchContext):
    """Passes each layer the arguments that its model would call it with."""

    def __init__(self, config: PretrainedConfig, backbone: Backbone) -> None:
        super().__init__(config)
        self.backbone = backbone
        # Set where inputs have a fourth tensor, int64 [B, T, 3]: of each token the frame, the row and the column by
        # which angles are computed
        self.takes_spatial_ids = False
        self._spatial_ids: torch.Tensor | None = None
        self._arguments: list[dict[str, Any]] = []

    def __call__(self, inputs: Activations, attention_type: str, layer_idx: int) -> dict[str, Any]:
        self._spatial_ids = inputs[3] if self.takes_spatial_ids else None  # type: ignore[misc]
        return super().__call__(inputs, attention_type, layer_idx)

    def derive_shared(self, inputs: Activations) -> dict[str, Any]:
        masks: dict[tuple[str, bool], Any] = {}

        def make_mask(kind: str, always: bool) -> Any:
            if (kind, always) not in masks:
                masks[kind, always] = self._make_mask(inputs, kind, always)
            return masks[kind, always]

        position_ids = inputs[1]
        if self._spatial_ids is not None:  # [4, B, T], as the models of `transformers` take both
            position_ids = torch.cat([position_ids.unsqueeze(0), self._spatial_ids.permute(2, 0, 1)])
        self._arguments = self.backbone.read_arguments(inputs[0], position_ids, make_mask)
        return {}

    def give(self, inputs: Activations, attention_type: str, layer_idx: int) -> dict[str, Any]:
        given = self._arguments[layer_idx]
        placeholders = [value for value in given.values() if isinstance(value, _NoMask)]
        without = {name: None if isinstance(value, _NoMask) else value for name, value in given.items()}
        return without if not placeholders else without | placeholders[0].instead

    def _make_mask(self, inputs: Activations, kind: str, always: bool) -> Any:
        """Return the mask of a kind of attention, or a placeholder for a kernel that takes something else instead of a
        mask."""
        derived = self.derive_by_type(inputs, kind)
        mask = derived.pop("attention_mask")
        takes_none = self.config._attn_implementation in (VARLEN, *FLASH)
        if takes_none and always:
            raise ValueError(f"attn_implementation={self.config._attn_implementation} makes no mask")
        if mask is None and always:
            return build_packed_mask(self.config, inputs[0], torch.ones_like(inputs[1]), None)
        return _NoMask(derived) if takes_none else mask


class _NoMask:
    """A placeholder for the mask of one kind of attention. instead: keywords of an attention that takes no mask."""

    def __init__(self, instead: dict[str, Any]) -> None:
        self.instead = instead


class BackboneDecoderLayer(PipelineDecoderLayer):
    """Mixin before a decoder layer of `transformers`, which may return a tuple with hidden states first."""

    def __init__(self, config: PretrainedConfig, layer_idx: int, context: BackboneContext) -> None:
        """Copy the backbone's layer, which its model may have built with further arguments (bamba), and given buffers
        (falcon_h1)."""
        nn.Module.__init__(self)
        backbone = context.backbone
        vars(self).update(vars(copy.deepcopy(backbone.layers[layer_idx], {id(backbone.model.config): config})))
        materialize(self)
        self.attach_context(config, layer_idx, context)

    def transform(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        outputs: Any = super().transform(hidden_states, **given)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


class _Copy(nn.Module):
    """Mixin before the class of `template`, which has no storage: a copy of the module with storage."""

    def __init__(self, template: nn.Module) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(copy.deepcopy(template)))
        materialize(self)


def materialize(module: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by ones on the default device: parameters of the default dtype,
    initialized as torch's own modules are, and NaN where a model of `transformers` initializes them (init=random)."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            unknown = torch.full(parameter.shape, torch.nan)
            setattr(part, name, nn.Parameter(unknown, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        reset: Any = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()


class BackboneEmbedding(_Copy, Embedding):
    """Mixin before the class of a model's embedding. backbone: given where it changes embeddings without weights."""

    def __init__(self, template: nn.Module, backbone: Backbone | None) -> None:
        super().__init__(template)
        self.backbone = backbone

    def forward(self, inputs: Activations) -> Activations:
        outputs = super().forward(inputs)
        if self.backbone is None:
            return outputs
        return self.backbone.prepare(outputs[0], outputs[1], {}, self.training), *outputs[1:]


class BackboneParts(nn.Module):
    """Parts of a backbone that have weights, under their own names."""

    sees_positions = True  # of all tokens of a row

    def __init__(self, templates: Mapping[str, nn.Module], backbone: Backbone) -> None:
        super().__init__()
        for name, template in templates.items():
            self.add_module(name, copy.deepcopy(template))
        materialize(self)
        self.backbone = backbone


class Preparation(BackboneParts):
    """A layer for the backbone's operations on embeddings before its layers: position tables, norms, projections."""

    def forward(self, inputs: Activations) -> Activations:
        return self.backbone.prepare(inputs[0], inputs[1], dict(self.named_children()), self.training), *inputs[1:]


class Finish(BackboneParts):
    """A layer for the backbone's operations on hidden states after its layers, where they are more than a norm."""

    def forward(self, inputs: Activations) -> Activations:
        return self.backbone.finish(inputs[0], inputs[1], dict(self.named_children()), self.training), *inputs[1:]


def runs_backbone(module: nn.Module) -> bool:
    """Return whether a module's forward pass runs code of `transformers` beyond its own parts: a decoder layer's, or
    what a backbone does before or after them."""
    if isinstance(module, BackboneEmbedding):
        return module.backbone is not None
    return isinstance(module, BackboneDecoderLayer | BackboneParts)


class FinalNorm(_Copy):
    """Mixin before the class of a model's final norm."""

    def forward(self, inputs: Activations) -> Activations:
        return super().forward(inputs[0]), *inputs[1:]  # type: ignore[misc]  # the norm's


class BackboneHead(_Copy, LMHead):
    """A model's head. factor: by which its logits are multiplied; hidden states are multiplied instead."""

    def __init__(self, template: nn.Module, factor: float) -> None:
        super().__init__(template)
        self.factor = factor

    def forward(self, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward((inputs[0] * self.factor, *inputs[1:]) if self.factor != 1 else inputs)


class BackboneBiasedHead(_Copy, BiasedLMHead):
    pass


def hand_scaled_to_loss(factor: float, module: nn.Module, inputs: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `hand_to_loss` for logits that are multiplied by `factor`."""
    return hand_to_loss(module, (inputs[0] * factor, *inputs[1:]))
