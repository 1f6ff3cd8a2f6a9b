"""Models that have a text model inside, such as one that also sees images: which part is trained, and its names.

Their config.json wraps the text model's (`text_config`). The text model becomes layers; every other tensor, of the
vision tower, the projector and the like, is passed through unchanged. All names are those of the wrapping class of
`transformers`, so an export, or an adapter, belongs to it. The names of its folders on disk, now and in earlier
versions, follow from `transformers` too (`conversion_mapping`, 5.23).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)
from transformers.modeling_outputs import CausalLMOutput

from errors import UserError
from models.layers.layer import Layer

TEXT_CONFIG = "text_config"  # its key in config.json
_MAPPINGS = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)


@dataclass(frozen=True, eq=False)
class Wrapper:
    """A model that has a text model as a part.

    model: the whole model, on the meta device. base, head: the prefixes of the text model's parts in it. own_base: the
    prefix of its base in the text model alone.
    """

    model: PreTrainedModel
    base: str
    head: str
    own_base: str

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def name(self) -> str:
        """The model's class in transformers."""
        return type(self.model).__name__

    @property
    def ignored(self) -> Collection[str]:
        """Patterns of names that folders of this model may hold though no part of it reads them."""
        return self.model._keys_to_ignore_on_load_unexpected or ()

    def rename(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the text model's layers under their names in this model."""
        return [
            replace(layer, hf_prefix=self.base + layer.hf_prefix.removeprefix(self.own_base))
            if layer.hf_prefix.startswith(self.own_base)
            else replace(layer, hf_prefix=self.head)
            for layer in layers
        ]

    def is_text(self, name: str) -> bool:
        """Return whether a tensor, by its name in the model, belongs to the text model."""
        return name.startswith((self.base, self.head))

    def count_outside(self) -> int:
        """Return the elements of the tensors outside the text model, such as a vision tower's."""
        return sum(tensor.numel() for name, tensor in self._tensors.items() if not self.is_text(name))

    def has(self, name: str) -> bool:
        """Return whether the model has this tensor."""
        return name in self._tensors

    def name_alone(self, name: str) -> str:
        """Return the name in the text model alone of a tensor that belongs to it; another's is unchanged."""
        return self.own_base + name.removeprefix(self.base) if name.startswith(self.base) else name

    def name_in_memory(self, disk_name: str) -> str:
        """Return the name that `from_pretrained` gives a tensor of a folder; the pieces of a tensor keep separate
        names.

        Folders have had other names over the years: all that `transformers` reads map to the same ones.
        """
        return self._rename(disk_name)

    def list_missing(self, names: Collection[str]) -> list[str]:
        """Return the tensors outside the text model that a folder lacks. names: the tensors that it
        has, as in memory."""
        targets = [rename_source_key(name, [], self._converters) for name in names if not self.is_text(name)]
        if any(pattern for _, pattern in targets):  # rearranged: a target may combine several
            return []
        expected = {name for name in self._tensors if not self.is_text(name)} - set(self.model.all_tied_weights_keys)
        return sorted(expected - {target for target, _ in targets})

    def may_be_transposed(self, name: str) -> bool:
        """Return whether folders may hold the tensor transposed; its shape shows which."""
        return any(converter.rename_source_key(name)[1] for converter in self._converters if _transposes(converter))

    @cached_property
    def _rename(self) -> Any:
        renamings = [step for step in get_model_conversion_mapping(self.model) if isinstance(step, WeightRenaming)]
        prefix, tensors = self.model.base_model_prefix, self._tensors
        return cache(lambda name: rename_source_key(name, renamings, [], prefix, tensors)[0])

    @cached_property
    def _converters(self) -> list[WeightConverter]:
        return [step for step in get_model_conversion_mapping(self.model) if isinstance(step, WeightConverter)]

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


def unwrap(config: PretrainedConfig) -> tuple[PretrainedConfig, Wrapper | None]:
    """Return the config of the text model, and the model around it; the config itself and None where nothing is
    wrapped.

    Raises UserError where the text model cannot be found.
    """
    text = getattr(config, TEXT_CONFIG, None)
    if not isinstance(text, PretrainedConfig):
        return config, None
    text = copy.deepcopy(text)
    try:
        wrapper = _build_wrapper(config, text)
        text.tie_word_embeddings = _is_tied(wrapper.model)  # of the two configs the model knows which one applies
    except UserError:
        raise
    except Exception as error:  # other people's code, on a config it was not made for
        words = " ".join(str(error).split())[:160]
        raise UserError(f"a '{config.model_type}' cannot be built ({type(error).__name__}: {words})") from None
    return text, wrapper


def _build_wrapper(config: PretrainedConfig, text: PretrainedConfig) -> Wrapper:
    model = _build_on_meta(config)
    base_class = MODEL_MAPPING.get(type(text), None) or type(model.get_decoder())
    bases = [name for name, part in model.named_modules() if name and type(part) is base_class]
    heads = [name for name, part in model.named_modules() if part is model.get_output_embeddings()]
    own_bases = []
    if bases and heads:
        with torch.device("meta"):
            alone = find_text_class(text, base_class)(copy.deepcopy(model.get_submodule(bases[0]).config))
        own_bases = [name for name, part in alone.named_modules() if type(part) is base_class]
    if len(bases) != 1 or len(own_bases) != 1:
        raise UserError(
            f"the '{text.model_type}' in a '{config.model_type}' cannot be trained by itself: "
            f"{type(model).__name__} has {len(bases)} text models and {len(heads)} heads, and one of each is needed"
        )
    return Wrapper(model, f"{bases[0]}.", f"{heads[0]}.", f"{own_bases[0]}.")


def _build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    for described in (config, config.text_config):
        if not hasattr(described, "tie_word_embeddings"):
            described.tie_word_embeddings = False
    with torch.device("meta"):
        model = _find_class(config)(config)
    model.tie_weights()
    model._weight_conversions = [  # undone when it is saved: all but those that depend on the folder that was read
        step
        for step in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(step, PrefixChange) and not _transposes(step)
    ]
    return model


def _transposes(step: WeightTransform) -> bool:
    """Return whether the step only transposes a tensor that a folder stores the other way."""
    return isinstance(step, WeightConverter) and all(
        isinstance(operation, Transpose) and operation.check_dims for operation in step.operations
    )


def _find_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that config.json names, if transformers has it for such a config; else its
    class for the config."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None and getattr(named, "config_class", None) is type(config):
            return named
    for mapping in _MAPPINGS:
        if type(config) in mapping:
            return mapping[type(config)]
    raise UserError(f"transformers has no class that generates text for a '{config.model_type}'")


def _is_tied(model: PreTrainedModel) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(embedding, "weight", None) is head.weight


def find_text_class(config: PretrainedConfig, base_class: type[PreTrainedModel] | None = None) -> type[PreTrainedModel]:
    """Return the class of a text model alone: transformers' own; where it has none (Qwen-VL's), `base_class` and a head
    combined, which is registered with `AutoModelForCausalLM`."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        assert base_class is not None
        fields = {
            "config_class": type(config),
            "_base_class": base_class,
            "base_model_prefix": "model",
            "__module__": base_class.__module__,  # read by transformers to find what a class supports
        }
        name = f"{base_class.__name__}WithHead"
        text_class = type(name, (_WithHead, base_class.__bases__[0], GenerationMixin), fields)
        AutoModelForCausalLM.register(type(config), text_class, exist_ok=True)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


class _WithHead:
    """Mixin before a class of `transformers`: a text model with a head. Its logits are multiplied, then capped, where
    the config says so, as the model around it does (Muse, Mistral Large 4)."""

    _base_class: type[PreTrainedModel]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers reads it)

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self._base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids, **options).last_hidden_state)
        config, size = self.config, logits.shape[-1]  # type: ignore[attr-defined]
        logits = logits * getattr(config, "output_multiplier", 1.0)
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=size)  # type: ignore[attr-defined]
        return CausalLMOutput(loss=loss, logits=logits)
