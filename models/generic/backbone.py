"""Reads what a model does around its decoder layers from its own forward pass.

The *backbone* is the module that runs the decoder layers: it scales or normalizes embeddings, adds positions, derives
masks and rotary angles, passes each layer its arguments, and has a norm at the end. Instead of encoding this for each
family, its own `forward` is called with stubs in place of its layers and of everything that holds weights.

B micro-batch, T sequence, D hidden.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel, masking_utils

from errors import UserError
from models.generic.module_stubs import BackboneOutputs, ModuleStub, StopForward, replace_child, substitute, with_others
from models.losses.cross_entropy import get_softcap

# The functions of `transformers` (5.23) that make masks, and the kind of attention that each is for. None: recurrent
# layers, which need none, since padding comes after the tokens.
_MASK_KINDS: dict[str, str | None] = {
    "create_causal_mask": "full_attention",
    "create_sliding_window_causal_mask": "sliding_attention",
    "create_chunked_causal_mask": "chunked_attention",
    "create_recurrent_attention_mask": None,
}
# Takes a kind of attention, and whether the mask must be a tensor even where it is only causal
MakeMask = Callable[[str, bool], Any]
_MOST_OUTPUTS = 4  # more than any layer of transformers returns
Parts = Mapping[str, Callable[..., Any]]  # the children of a backbone that have weights, by name


class Backbone:
    """The backbone of the model that `config` describes, on the meta device: it has no weights.

    Buffers that follow from the config alone, such as rotary frequencies, are real, and move to the device of the
    inputs.
    name: the backbone's name in the model.
    layers: its decoder layers.
    parts: its other children, by name.
    embedding: the name of the token embedding.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """Build the model on the meta device. Raises UserError for a model without a list of layers between embeddings
        and a head."""
        built_from = copy.deepcopy(config)
        built_from._attn_implementation = "eager"  # `config` chooses the kernel; its package may be missing here
        with torch.device("meta"):
            self.model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](built_from)
        _take_defaults(config, built_from)
        self.name, self.list_name = _find_layers(self.model)
        self.module: Any = self.model.get_submodule(self.name)
        self.module.config = config
        self.layers: list[nn.Module] = list(getattr(self.module, self.list_name))
        self.parts = {name: part for name, part in self.module.named_children() if name != self.list_name}
        compute_buffers(self.model, self.layers)
        self.embedding = find_name(self.model, self.model.get_input_embeddings()).removeprefix(f"{self.name}.")
        self._make_mask: MakeMask = _make_none
        self._forward = self._use_our_masks(inspect.unwrap(type(self.module).forward))
        if "inputs_embeds" not in inspect.signature(self._forward).parameters:
            raise UserError(f"'{self.name}', which runs its layers, does not take token embeddings")
        self._num_outputs = self._count_outputs()

    def prepare(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, parts: Parts, training: bool
    ) -> torch.Tensor:
        """Return the input of the first layer, [B, T, D].

        embeddings: token embeddings [B, T, D]. position_ids: [B, T]. training: with dropout. The embeddings come from a
        stub of the embedding module, since a backbone may scale the embeddings that it looked up itself (falcon_h1).
        """

        def stop(hidden_states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            raise StopForward(hidden_states)

        looked_up = {self.embedding: lambda input_ids: embeddings}
        return self._run(embeddings, position_ids, [stop], {**parts, **looked_up}, looks_up=True, training=training)

    def read_arguments(self, inputs: torch.Tensor, position_ids: torch.Tensor, make_mask: MakeMask) -> list[Any]:
        """Return the arguments of each layer other than hidden states: one dict per layer, by parameter name.

        inputs: a tensor with the shape [B, T, ...], dtype and device of the hidden states; its values do not matter.
        Arguments that depend on weights or on hidden states are NaN.
        """
        arguments: list[dict[str, Any]] = []

        def record(hidden_states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            arguments.append(given)
            if len(arguments) == len(self.layers):
                raise StopForward(hidden_states)
            return hidden_states

        unknown = inputs.new_full((*inputs.shape[:2], 1), torch.nan)
        self._run(unknown, position_ids, [record] * len(self.layers), {}, make_mask)
        return arguments

    def finish(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, parts: Parts, training: bool
    ) -> torch.Tensor:
        """Return the backbone's output for the hidden states [B, T, D] after its last layer."""
        unknown = hidden_states.new_full((*hidden_states.shape[:2], 1), torch.nan)
        layers = [lambda other, given: hidden_states] * len(self.layers)
        return self._run(unknown, position_ids, layers, parts, training=training)

    def read_head(self) -> tuple[float, float]:
        """Return the factors by which the model multiplies hidden states before its head, and logits after it.

        A cap that `get_softcap` finds is left to the loss. Raises UserError for any other operation.
        """
        head: Any = self.model.get_output_embeddings()
        hidden_states = torch.linspace(0.5, 2, 2 * head.in_features, dtype=torch.float64).view(1, 2, -1)
        product = torch.tensor([[[1.0, 2.0, 4.0], [-1.0, 0.25, -8.0]]], dtype=torch.float64)
        arrived: list[torch.Tensor] = []

        def stub_backbone(*args: Any, **given: Any) -> BackboneOutputs:
            return BackboneOutputs(last_hidden_state=hidden_states)

        def stub_head(inputs: torch.Tensor) -> torch.Tensor:
            arrived.append(inputs)
            return product

        with (
            substitute(self.model, self.name, stub_backbone),
            substitute(self.model, find_name(self.model, head), stub_head),
        ):
            logits = self.model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
        if len(arrived) != 1 or logits.shape != product.shape:
            raise UserError("it makes its logits without calling its head")
        cap = get_softcap(self.model.config)
        logits = logits.double() if cap is None else cap * torch.atanh(logits.double() / cap)
        factors = _read_factor(arrived[0].double(), hidden_states), _read_factor(logits, product)
        if factors[0] is None or factors[1] is None:
            raise UserError("it makes its logits in another way than as a product with its head, scaled or capped")
        return factors[0], factors[1]

    def _run(
        self,
        embeddings: torch.Tensor,
        position_ids: torch.Tensor,
        layers: Sequence[Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]],
        parts: Parts,
        make_mask: MakeMask | None = None,
        looks_up: bool = False,
        training: bool = False,
    ) -> torch.Tensor:
        """Run the backbone's own forward pass, with `layers` in place of the first of its layers, and `parts` in place
        of those with weights.

        A layer gets hidden states and its arguments, and returns hidden states. looks_up: whether the backbone is
        called with (meaningless) token ids instead of embeddings. Returns the backbone's output, or the hidden states
        of StopForward.
        """

        def make_unknown(*args: Any, **given: Any) -> torch.Tensor:
            return torch.full_like(embeddings, torch.nan)

        for name, part in self.parts.items():
            if name in parts:
                replace_child(self.module, name, ModuleStub(part, parts[name]))
            elif has_weights(part):
                replace_child(self.module, name, ModuleStub(part, make_unknown))
            else:
                part.to(embeddings.device)
        places = [
            ModuleStub(original, self._take_arguments(original, layer))
            for original, layer in zip(self.layers, layers, strict=False)
        ]
        replace_child(self.module, self.list_name, places)
        self._make_mask = make_mask or _make_none
        self.module.train(training)
        inputs = {"input_ids": torch.zeros_like(position_ids)} if looks_up else {"inputs_embeds": embeddings}
        given = {**inputs, "position_ids": position_ids, "use_cache": False, "return_dict": True}
        known = inspect.signature(self._forward).parameters
        try:
            outputs = self._forward(self.module, **{name: value for name, value in given.items() if name in known})
        except StopForward as stopped:
            return stopped.hidden_states
        finally:  # they hold on to activations
            replace_child(self.module, self.list_name, [])
        return outputs[0]

    def _take_arguments(self, original: nn.Module, layer: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        signature = inspect.signature(original.forward)
        first, *_ = signature.parameters

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            hidden_states = given.pop(first)
            for name, parameter in signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given |= given.pop(name, {})
            outputs = layer(hidden_states, given)
            return with_others(outputs, self._num_outputs)

        return call

    def _count_outputs(self) -> int:
        """Return the length of the tuple that a layer returns, hidden states first; 0 where it returns a tensor."""
        sent, arrived = torch.zeros(1, 2, 1), []

        def send(hidden_states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            arrived.append(hidden_states)
            if len(arrived) == 2:
                raise StopForward(hidden_states)
            return sent

        for count in range(_MOST_OUTPUTS if len(self.layers) > 1 else 0):
            self._num_outputs = count
            arrived.clear()
            with suppress(ValueError):  # it unpacks another number
                self._run(torch.zeros(1, 2, 1), torch.arange(2).unsqueeze(0), [send, send], {})
                if arrived[1] is sent:
                    return count
        return 0

    def _use_our_masks(self, forward: FunctionType) -> FunctionType:
        """Return a copy of `forward` in which the names of `transformers`' mask functions refer to ours."""
        ours: dict[str, Any] = {
            name: self._answer(kind) for name, kind in _MASK_KINDS.items() if name in forward.__globals__
        }
        if "create_masks_for_generate" in forward.__globals__:
            ours["create_masks_for_generate"] = self._make_all_masks
        copied = FunctionType(
            forward.__code__, forward.__globals__ | ours, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        return copied

    def _answer(self, kind: str | None) -> Callable[..., Any]:
        def make(*args: Any, allow_is_causal_skip: bool = True, **given: Any) -> Any:
            if any(given.get(name) is not None for name in ("or_mask_function", "and_mask_function")):
                raise UserError("its attention sees more, or less, than the preceding tokens of the same document")
            return None if kind is None else self._make_mask(kind, not allow_is_causal_skip)

        return make

    def _make_all_masks(self, config: PretrainedConfig, **given: Any) -> Any:
        """Stand in for `create_masks_for_generate`: one mask, or one per type of layer."""
        functions = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        types = getattr(config, "layer_types", None)
        if not types:
            return self._make_mask("full_attention", False)

        def answer(function: Any) -> Any:
            if isinstance(function, dict):
                return {name: answer(inner) for name, inner in function.items()}
            given = getattr(function, "keywords", {})  # of a partial
            return self._answer(_MASK_KINDS[getattr(function, "func", function).__name__])(**given)

        return {name: answer(functions[name]) for name in set(types)}


def _take_defaults(config: PretrainedConfig, built_from: PretrainedConfig) -> None:
    """Copy the fields that a model fills in while it is built, and that its layers read (falcon's
    num_ln_in_parallel_attn)."""
    for name, value in vars(built_from).items():
        if not name.startswith("_") and value is not None and vars(config).get(name) is None:
            setattr(config, name, value)


def _make_none(kind: str, always: bool) -> None:
    return None


def _find_layers(model: nn.Module) -> tuple[str, str]:
    """Return the name of the backbone and the name of its list of layers: the list with the most parameters."""
    sizes = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList)
    }
    if not sizes:
        raise UserError("it has no list of decoder layers")
    backbone, _, own_name = max(sizes, key=lambda name: sizes[name]).rpartition(".")
    return backbone, own_name


def compute_buffers(model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
    """Compute the buffers that follow from the config alone, of modules on the meta device; not those of layers that
    are stored in files. `transformers` computes them as it does initial weights, since it loads that way too; a module
    may compute the buffers of its children."""
    layer_parts = {id(part) for layer in layers for part in layer.modules()}
    stored = model.state_dict().keys()
    computed = False
    for prefix, part in model.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta and (id(part) not in layer_parts or f"{prefix}.{name}" not in stored):
                setattr(part, name, torch.empty_like(buffer, device="cpu"))
                computed = True
    if computed:
        with torch.random.fork_rng(devices=[]):  # weights on the meta device draw too
            for part in model.modules():
                model._init_weights(part)


def _read_factor(outputs: torch.Tensor, inputs: torch.Tensor) -> float | None:
    """Return the factor by which all of `inputs` was multiplied; None where there is no single factor."""
    ratios = outputs / inputs
    factor = ratios.flatten()[0].item()
    return factor if torch.allclose(ratios, torch.full_like(ratios, factor), rtol=1e-6, atol=0) else None


def has_weights(part: nn.Module) -> bool:
    return any(True for _ in part.parameters())


def find_name(model: nn.Module, part: nn.Module) -> str:
    """Return the dotted name of a part of a model."""
    return next(name for name, child in model.named_modules() if child is part)
