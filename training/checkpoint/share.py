"""A rank's share of a checkpoint: layers of its stage, which are divided among its replicas, and its partition of the
optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError
from models.adapters.base_inits import join_starts
from models.sharding.expert_parallel import list_expert_specs
from models.weights.pipeline_checkpoint import layer_file
from training.checkpoint import optimizer_state
from training.checkpoint.coverage import check_coverage
from training.checkpoint.share_file import ShareFile
from training.distributed.ranks import raise_together
from training.engine.engine import Engine
from training.pipeline.module import StageModule
from training.pipeline.weight_sharding import whole_weights


def plan_share(engine: Engine, weights_only: bool = False) -> list[ShareFile]:
    """Return the files that this rank writes, with the engine's own tensors. All ranks call it: a layer or a weight
    that is sharded over ranks is gathered, one at a time, in the host memory of the rank that writes it."""
    module, topology, num_replicas = engine.module, engine.layout.topology, engine.layout.num_weight_replicas
    files = []
    for layer in module.local_layers:
        writer = LayerWriter(layer.index % num_replicas, layer.index // num_replicas % module.ranks.parallel.size)
        if not layer.is_own or not _takes_part(module, layer.module, writer):
            continue
        name = layer_file(Path(), layer.index).name
        if _holds_whole(module, layer.module):
            files.append(ShareFile(name, _list_saved(module, layer.module)))
        elif (tensors := _gather(module, layer.module, writer)) is not None:
            files.append(ShareFile(name, tensors, is_copy=True))
    if not weights_only and (state := optimizer_state.collect_state(engine)):
        files.append(ShareFile(optimizer_state.file_name(topology, engine.rank), state))
    return files


def plan_whole_share(
    engine: Engine, step: int, group: dist.ProcessGroup | None, weights_only: bool = False
) -> list[ShareFile]:
    """Return `plan_share` for a save of this step. Raises UserError, together on all ranks, where it would omit state
    of a trained parameter."""
    share: list[ShareFile] = []
    error = None
    try:
        share = plan_share(engine, weights_only)
    except UserError as mistake:
        error = mistake
    raise_together(error)
    if weights_only:
        return share
    state = {name: tensor for file in share if file.is_optimizer_state for name, tensor in file.tensors.items()}
    check_coverage(engine, state, step, group)
    return share


@dataclass(frozen=True)
class LayerWriter:
    """The rank that writes a layer's file: the replica with this index, and its index among the ranks that share the
    layer."""

    replica: int
    tensor_rank: int


def _takes_part(module: StageModule, layer_module: torch.nn.Module, writer: LayerWriter) -> bool:
    """Return whether this rank has a share of a layer that another rank writes: of its weights, or its experts."""
    ranks = module.ranks
    size = ranks.expert_parallel.size if list_expert_specs(layer_module) else 1
    return module.options.shards_weights or ranks.replica // size == writer.replica // size


def _holds_whole(module: StageModule, layer_module: torch.nn.Module) -> bool:
    """Return whether this rank has all of a layer's weights, on its device."""
    is_shared = module.ranks.parallel.size > 1 or bool(list_expert_specs(layer_module))
    return not (is_shared or module.options.shards_weights)


def _list_saved(module: StageModule, layer_module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer that a checkpoint keeps: all of them, or the adapter's alone."""
    state = layer_module.state_dict()
    trained = [name for name, parameter in layer_module.named_parameters() if parameter.requires_grad]
    has_adapter = module.options.adapter is not None
    tensors = {name: state[name].detach() for name in (trained if has_adapter else state.keys())}
    return join_starts(layer_module, tensors) if has_adapter else tensors


def _gather(module: StageModule, layer_module: torch.nn.Module, writer: LayerWriter) -> dict[str, torch.Tensor] | None:
    """Return `_list_saved`, whole and in the host's memory, on the rank that writes them; None on the others that take
    part, which call it too: those that share the layer, its weights or its experts.
    """
    ranks, gathered = module.ranks, {}
    shards, is_tensor_rank = ranks.read_shards(layer_module), ranks.parallel.rank == writer.tensor_rank
    keeps = ranks.replica == writer.replica and is_tensor_rank
    with whole_weights(layer_module):
        for name, tensor in _list_saved(module, layer_module).items():
            found: torch.Tensor | None = shards.gather(name, tensor)
            if found is not None and name in shards.expert_specs:
                owner = writer.replica % ranks.expert_parallel.size
                found = shards.gather_experts(name, found, owner) if is_tensor_rank else None
            if keeps:
                assert found is not None
                gathered[name] = found.to("cpu", copy=True)
    return gathered if keeps else None
