"""DeepSpeed's own `load_checkpoint` reads a converted folder, at one stage and at two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.model_folders import convert
from support.tiny import save_llama
from support.workers import WorkerGroup

from models.architecture.lookup import build_layers
from models.weights.sources import open_weights


class StageWeights(NamedTuple):
    parameters: list[str]
    equal: bool


def load_with_deepspeed(hf_dir: Path, checkpoint: Path, num_stages: int) -> StageWeights:
    """On every rank: a stock PipelineModule with random weights, stock loading, and the comparison with the source."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = build_layers(open_weights(str(hf_dir)).config)
    specs = [
        TiedLayerSpec(layer.tied_key, layer.module_class, *layer.args, forward_fn=layer.forward_fn)
        if layer.tied_key
        else LayerSpec(layer.module_class, *layer.args)
        for layer in layers
    ]
    module = PipelineModule(
        layers=specs, num_stages=num_stages, partition_method="uniform", loss_fn=lambda output, _: output[0]
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    source = open_weights(str(hf_dir))
    path, _ = engine.load_checkpoint(str(checkpoint), load_module_only=True)
    assert path is not None
    names, equal = [], True
    for index, function in enumerate(module.forward_funcs, start=module._local_start):
        if isinstance(function, torch.nn.Module):
            for name, tensor in source.read_layer(index, layers[index]).items():
                names.append(layers[index].hf_prefix + name)
                equal &= torch.equal(function.state_dict()[name], tensor)
    if layers[-1].tied_key and num_stages > 1 and module._local_stop == len(layers):  # the tied head has the embedding
        names.append("tied head")
        embedding = source.read_layer(0, layers[0])["weight"]
        equal &= torch.equal(module.tied_modules[layers[-1].tied_key].weight, embedding)
    return StageWeights(names, equal)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_stock_deepspeed_loads_it(
    num_stages: int, tied: bool, tmp_path: Path, workers: Callable[[int], WorkerGroup]
) -> None:
    expected = save_llama(tmp_path / "hf", tied=tied).state_dict()
    convert(tmp_path / "hf", tmp_path / "pipeline")
    stages = workers(num_stages).run(load_with_deepspeed, tmp_path / "hf", tmp_path / "pipeline", num_stages)
    assert all(stage.equal for stage in stages)
    loaded = [name for stage in stages for name in stage.parameters if name != "tied head"]
    assert sorted(loaded) == sorted(name for name in expected if not tied or name != "lm_head.weight")
    assert tied == ("tied head" in stages[-1].parameters) or num_stages == 1
