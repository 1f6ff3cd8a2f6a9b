"""The weights of a model that is trained from scratch, drawn layer by layer as `transformers` draws them.

Each layer has random numbers of its own, from the seed and its index in the model: so a model is the same at every
layout, and a rank draws its own layers only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.architecture.disk_names import wrap_module
from models.layers.layer import Layer
from models.layers.wrapped import Wrapper
from models.storage.safetensors_writer import TensorInfo


class RandomWeights:
    """A `WeightSource` without files."""

    form = ""
    unconverted: tuple[str, ...] = ()

    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        self.path = self.config_dir = Path("random weights")
        self.config, self._seed = config, seed
        self.wrapper: Wrapper | None = None

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((self._seed, index)) % 2**63)
            module = layer.module_class(*layer.args)
            model = wrap_module(self.config, module)
            for part in reversed(list(model.modules())):  # a module after those in it, the model last
                model._init_weights(part)
        tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        if unknown := [name for name, tensor in tensors.items() if tensor.isnan().any()]:
            raise UserError(
                f"init=random: transformers does not define how '{layer.hf_prefix}{unknown[0]}' is initialized"
            )
        return tensors

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return dict(layer.build_on_meta().state_dict()) if layer.owns_weights else {}

    def count_held(self, index: int, layer: Layer) -> int:
        return sum(tensor.nbytes for tensor in self.describe_layer(index, layer).values())

    def check_complete(self, layers: list[Layer]) -> None:
        """Do nothing: every layer can be drawn."""

    def files(self) -> list[Path]:
        return []

    def list_passthrough(self) -> list[TensorInfo]:
        return []

    def read_passthrough(self, name: str) -> torch.Tensor:
        raise KeyError(name)
