"""From a list of layers to DeepSpeed's pipeline module: split, built without initialisation, loaded layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch.utils.checkpoint import checkpoint

from errors import UserError
from models.architecture import Layer
from models.loss import causal_lm_loss
from models.weights import WeightSource
from training.ranks import raise_together


def build_layer_specs(layers: Sequence[Layer]) -> list[LayerSpec]:
    """DeepSpeed's description of the layers; those that share weights become `TiedLayerSpec`s."""
    return [
        TiedLayerSpec(layer.tied_key, layer.module_class, *layer.args, forward_fn=layer.forward_fn)
        if layer.tied_key
        else LayerSpec(layer.module_class, *layer.args)
        for layer in layers
    ]


class StageModule(PipelineModule):
    """This rank's stage of the model.

    DeepSpeed's class builds each layer in fp32 with random weights and casts it later. Here a layer is built on the meta device and
    takes over the tensors that are read for it, in the training dtype and on this rank's device: nothing is initialised that will be
    loaded, and no rank touches a layer that is not its own.
    """

    def __init__(
        self, layers: Sequence[Layer], bounds: Sequence[int], source: WeightSource, dtype: torch.dtype, activation_checkpoint_interval: int
    ) -> None:
        """bounds: see `training.partition`. Needs an initialised process group.

        Raises UserError when a tensor is missing or has another shape than config.json makes it.
        """
        self._layers, self._source, self._dtype = list(layers), source, dtype
        super().__init__(
            layers=build_layer_specs(layers),
            num_stages=len(bounds) - 1,
            loss_fn=causal_lm_loss,
            partition_method=list(bounds),
            activation_checkpoint_interval=activation_checkpoint_interval,
            # torch's own, non-reentrant: it takes integer inputs and restores the random state for dropout
            activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
        )

    def _partition_layers(self, method: list[int]) -> None:
        """Takes the bounds as they are (DeepSpeed has no manual split, and its own counts parameters by building every layer)."""
        self.parts = method
        self._set_bounds(start=method[self.stage_id], stop=method[self.stage_id + 1])

    def _build(self) -> None:
        with torch.device("meta"):
            super()._build()
        mistake = None
        try:
            self._load_layers()
        except UserError as error:  # in a file that no other rank may have opened
            mistake = error
        raise_together(mistake)
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False  # set by DeepSpeed's _build on the meta parameters that are gone now

    def _load_layers(self) -> None:
        for index, _, module in self.local_layers():
            self._load(module, index)

    def _module_of(self, index: int) -> torch.nn.Module:
        layer = self._layers[index]
        return self.tied_modules[layer.tied_key] if layer.tied_key else self.forward_funcs[index - self._local_start]

    def _owner_of(self, index: int) -> int:
        """The layer whose file holds the weights that layer `index` uses."""
        key = self._layers[index].tied_key
        if key is None:
            return index
        return next(i for i, layer in enumerate(self._layers) if layer.tied_key == key and layer.owns_weights)

    def _load(self, module: torch.nn.Module, index: int) -> None:
        device = get_accelerator().device_name(self.local_rank)
        tensors = self._source.read_layer(index, self._layers[index])
        copies = {name: tensor.to(device=device, dtype=self._dtype, copy=True) for name, tensor in tensors.items()}
        module.load_state_dict(copies, strict=True, assign=True)
        if stray := [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]:
            raise UserError(f"layer {index} ({type(module).__name__}): '{stray[0]}' is in no file and cannot be loaded")

    def local_layers(self) -> Iterator[tuple[int, Layer, torch.nn.Module]]:
        """The layers of this stage: number, description, module. A shared module comes once, as the layer that owns its weights."""
        seen: set[int] = set()
        for index in range(self._local_start, self._local_stop):
            module, owner = self._module_of(index), self._owner_of(index)
            if id(module) not in seen:
                yield owner, self._layers[owner], module
                seen.add(id(module))

    def owns(self, index: int) -> bool:
        """False for a layer of another stage whose weights this stage shares."""
        return self._local_start <= index < self._local_stop

    def named_hf_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
        """Hugging Face name, parameter, and whether this stage owns it; those of `local_layers`."""
        for index, layer, module in self.local_layers():
            for name, parameter in module.named_parameters():
                yield layer.hf_prefix + name, parameter, self.owns(index)

    @property
    def has_first_layer(self) -> bool:
        return self._local_start == 0

    @property
    def has_loss(self) -> bool:
        return self._local_stop == len(self._layers)
