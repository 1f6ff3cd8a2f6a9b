"""The weights of a model that is trained from scratch, drawn layer by layer as `transformers` draws them.

Each layer has random numbers of its own, by the seed and its place in the model: so a model is the same at every
layout, and a rank draws its own layers only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from models.layer import Layer


class RandomWeights:
    """A `WeightSource` without files."""

    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        self.path, self.config, self._seed = Path("random weights"), config, seed

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((self._seed, index)) % 2**63)
            module = layer.module_class(*layer.args)
            model = self._wrap(module)
            for part in reversed(list(model.modules())):  # a module after those in it, the model last
                model._init_weights(part)
        return {name: tensor.detach() for name, tensor in module.state_dict().items()}

    def _wrap(self, module: nn.Module) -> PreTrainedModel:
        """A model of this family that has `module` and nothing else: its class knows how its parts are initialised."""
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        model = model_class.__new__(model_class)
        nn.Module.__init__(model)
        model.config = self.config
        model.add_module("layer", module)
        return model

    def check_complete(self, layers: list[Layer]) -> None:
        """All of them can be drawn."""

    def files(self) -> list[Path]:
        return []
