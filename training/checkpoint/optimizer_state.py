"""The optimizer's state, in files that fit any layout.

Under ZeRO-1 a data-parallel rank holds one slice, its *partition*, of each concatenated parameter group of its stage:
the fp32 weights, and as many values again for each of AdamW's moments. The part of one parameter in a partition is a
*fragment*: a range of elements of the flattened parameter. Each fragment is saved under the parameter's Hugging Face
name and the position of its first element,

    exp_avg/model.layers.3.mlp.up_proj.weight@4096      fp32 [number of elements]

so a rank of any layout, the same one included, reads what overlaps with its own fragments. With tensor parallelism a
rank has a shard of the parameter, and the name states the position of its elements in the whole one:
`[stride:first+length]` means, in each `stride` elements of the whole, `length` elements from `first` on (columns 40 to
79 of a matrix with 80 columns),

    exp_avg/model.layers.3.mlp.down_proj.weight[80:40+40]@0

and, of a tensor of experts that are divided and sharded, `[4+4/stride:...]` that it has four of the strides, from the
fifth on.

The state that an optimizer keeps is declared (`training/optim/state_kinds.py`, `optimizer.py`);
training/checkpoint/coverage.py checks that all of it is saved. Master weights are omitted where the weights themselves
are in fp32: they are restored from the layer's file. Parameter groups need not match: they follow from the parameters
when the optimizer is built. A tied weight is in the partitions of two stages, with equal values; the owner's are saved
and both read them.

Why not DeepSpeed's universal checkpoint: it is a second format that one process per host has to convert to, unpickling
every file, before any rank can load, and it takes the size of the checkpoint once more on the disk. Here every byte is
read once, memory-mapped, by the rank that needs it, nothing is unpickled, and one path serves all layouts, so the tests
of one are the tests of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from errors import UserError
from models.parallel.shard import ShardLayout
from training.checkpoint.blockwise_state import SCALE_MARK, BlockRestore, BlockRun, name_scales
from training.distributed.topology import PIPE, Topology
from training.engine.engine import Engine, Partition, PartitionSlice
from training.optim.state_kinds import DeclaredState, StateKind, StateTensor, check_state, count_blocks
from training.pipeline.placement import parse_shard, render_shard

WEIGHT = "weight"  # the kind of state that every optimizer has: the fp32 master weights
SCALAR = "scalar"  # the kind of values that a whole run has once, such as Adam's step count
FILE_PATTERN = "optimizer-*.safetensors"


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter in this rank's optimizer."""

    name: str  # the parameter's, in Hugging Face's naming
    owned: bool  # this rank saves it; False for the other end of a tie, and on all but one of the ranks with replicas
    shard: ShardLayout | None  # the parameter's position in the whole one, where it is a shard
    start: int  # the first element, in the flattened parameter
    states: dict[str, torch.Tensor | BlockRun]  # kind -> view of the partition, [number of elements]
    held: PartitionSlice
    is_weight: bool  # the master weights are the parameter itself, in fp32, as saved in the layer's file

    @property
    def label(self) -> str:
        """Return the name in a file, without the kind."""
        return f"{self.name}{render_shard(self.shard)}@{self.start}"


def file_name(topology: Topology, rank: int) -> str:
    """Return the name of a rank's file: its stage, its index among the ranks with the same weights, and its index on
    each other axis that splits weights."""
    stage_id, replica = topology.index(rank, PIPE), topology.index(rank, *topology.weight_replica_axes)
    shards = "".join(
        f"-{axis.label}_{topology.index(rank, axis.name):02d}"
        for axis in topology.axes
        if axis.splits_weights and axis.name != PIPE and topology.size(axis.name) > 1
    )
    return f"optimizer-stage_{stage_id:02d}-dp_{replica:02d}{shards}.safetensors"


def collect_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank has to save, by their names in the file: views where they are large. Empty when
    nothing here is trained. Raises UserError when the optimizer's state differs from its declaration."""
    for partition in engine.list_partitions():
        if partition.state:
            check_state(partition.weights, partition.state, partition.declared)
    tensors: dict[str, torch.Tensor] = {}
    declared = {name: kept for partition in engine.list_partitions() for name, kept in partition.declared.items()}
    for fragment in list_fragments(engine):
        for kind, state in fragment.states.items() if fragment.owned else ():
            if kind == WEIGHT and fragment.is_weight:  # restored from the weights
                continue
            if isinstance(state, BlockRun):
                tensors[f"{kind}/{fragment.label}"] = state.codes
                tensors[f"{name_scales(declared[kind].scales, state.phase)}/{fragment.label}"] = state.scales
            else:
                tensors[f"{kind}/{fragment.label}"] = state
    scalars = {name: torch.as_tensor(value, dtype=torch.float64).cpu() for name, value in _read_scalars(engine).items()}
    return tensors | {f"{SCALAR}/{name}@0": value.reshape(1) for name, value in scalars.items()}


def load_state(engine: Engine, step_dir: Path, with_moments: bool = True) -> None:
    """Fill this rank's partitions from a checkpoint of any layout.

    with_moments: False loads the fp32 weights alone, when another optimizer continues.
    Raises UserError when a parameter's state is missing or incomplete.
    """
    files = sorted(step_dir.glob(FILE_PATTERN))
    kinds, scalars = _survey(files)
    kinds = kinds if with_moments else kinds & {WEIGHT}
    restores: Restores = {}
    for number, partition in enumerate(engine.list_partitions()):
        if kinds - {WEIGHT}:
            state = _make_state(partition, kinds, scalars, step_dir)
            engine.restore_state(number, state)
            for name in _list_names(partition.declared, StateKind.blockwise, state):
                kept = partition.declared[name]
                restores[number, name] = BlockRestore(
                    state[name], state[kept.scales], state[kept.table], scales_name=kept.scales
                )
    wanted: dict[tuple[str, str], Fragment] = {}
    for fragment in list_fragments(engine):
        here = kinds & fragment.states.keys() - ({WEIGHT} if fragment.is_weight else set())
        wanted |= {(kind, fragment.name): fragment for kind in here}
    missing = {key: fragment.states[key[0]].numel() for key, fragment in wanted.items()}
    for file in files:
        _read_overlaps(file, wanted, missing, restores)
    for restore in restores.values():
        restore.finish()
    if lacking := sorted(name for (_, name), count in missing.items() if count):
        raise UserError(
            f"resume: {step_dir} holds no optimizer state for '{lacking[0]}' ({len(lacking)} such); it was saved with "
            "other parameters trained. Give the same adapter and freeze, or start a new run with "
            f"model_name_or_path={step_dir}"
        )
    engine.restore_loss_scaler(scalars)


def _make_state(partition: Partition, kinds: Set[str], scalars: Mapping[str, float], step_dir: Path) -> dict[str, Any]:
    """The state of a partition: scalars as they were saved, the rest zeros, to be filled. kinds, scalars: in the files.
    Raises UserError when they are not those that the optimizer needs."""
    needed = {
        name: kept.kind in (StateKind.scalar, StateKind.number)
        for name, kept in partition.declared.items()
        if kept.kind is not StateKind.table
    }
    found = dict.fromkeys(kinds - {WEIGHT}, False) | {name: True for name in scalars if name in needed}
    if found != needed:
        raise UserError(
            f"resume: the optimizer needs {', '.join(sorted(needed)) or 'nothing'}, and {step_dir} holds "
            f"{', '.join(sorted(found)) or 'nothing'}; it is of another version of the project or of its optimizer. "
            f"Start a new run with model_name_or_path={step_dir}"
        )
    return {
        name: _make_scalar(kept, scalars[name], partition.weights.device)
        if needed.get(name)
        else _make_empty(kept, partition.weights)
        for name, kept in partition.declared.items()
    }


def _make_empty(kept: StateTensor, weights: torch.Tensor) -> torch.Tensor:
    if kept.kind is StateKind.scales:
        return torch.zeros(count_blocks(weights.numel()), dtype=kept.dtype, device=weights.device)
    if kept.kind is StateKind.table:
        assert kept.build_table is not None
        return kept.build_table().to(weights.device)
    return torch.zeros_like(weights, dtype=kept.dtype, requires_grad=False)


def _make_scalar(kept: StateTensor, value: float, device: torch.device) -> torch.Tensor | int | float:
    if kept.kind is StateKind.number:
        return int(value) if value == int(value) else value
    return torch.tensor(value, dtype=kept.dtype, device=device)


def is_own_master(engine: Engine, parameter: torch.Tensor) -> bool:
    """Return whether the master weights of a parameter are not saved, since the layer's file has the same numbers: in a
    run in fp32. A parameter that stays in fp32 in a run in 16 bits may have been, or become, one of 16 bits there."""
    return parameter.dtype is torch.float32 and not any(parameter is each for each in engine.module.in_fp32)


def list_fragments(engine: Engine) -> Iterator[Fragment]:
    """Yield the fragments of this rank's trained parameters."""
    partitions = engine.list_partitions()
    for name, parameter, placement in engine.module.named_hf_parameters():
        held = engine.find_slice(parameter)
        if held is None:
            continue
        partition = partitions[held.partition]
        states: dict[str, torch.Tensor | BlockRun] = {
            WEIGHT: partition.weights.detach().narrow(0, held.start, held.length)
        }
        for kind in _list_names(partition.declared, StateKind.elementwise, partition.state):
            states[kind] = partition.state[kind].narrow(0, held.start, held.length)
        for kind in _list_names(partition.declared, StateKind.blockwise, partition.state):
            whole = BlockRun(partition.state[kind], partition.state[partition.declared[kind].scales], phase=0)
            states[kind] = whole.narrow(held.start, held.length)
        owned = engine.saves_state and placement.is_saved_by(engine.rank)
        yield Fragment(
            name, owned, placement.shard, held.parameter_start, states, held,
            is_weight=is_own_master(engine, parameter),
        )  # fmt: skip


def _read_scalars(engine: Engine) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    for partition in engine.list_partitions():
        for kind in (StateKind.scalar, StateKind.number):
            names = _list_names(partition.declared, kind, partition.state)
            scalars |= {name: partition.state[name] for name in names}
    return scalars | engine.read_loss_scaler()


def _list_names(declared: DeclaredState, kind: StateKind, state: Mapping[str, Any]) -> list[str]:
    """The names of one kind in a state; empty before the optimizer's first step."""
    return [name for name, kept in declared.items() if kept.kind is kind and name in state]


def _survey(files: list[Path]) -> tuple[set[str], dict[str, float]]:
    """The kinds of state that the files hold, and the scalars. Reads headers only."""
    kinds: set[str] = set()
    scalars: dict[str, float] = {}
    for file in files:
        with safe_open(file, framework="pt") as saved:
            for key in saved.keys():
                kind, name, _, _ = parse_key(key)
                if kind == SCALAR:
                    scalars[name] = saved.get_tensor(key).item()
                else:
                    kinds.add(kind.partition(SCALE_MARK)[0])
    return kinds, scalars


def _read_overlaps(
    file: Path, wanted: dict[tuple[str, str], Fragment], missing: dict[tuple[str, str], int], restores: Restores
) -> None:
    """Copy what `file` holds of the wanted fragments, and subtract it from `missing`."""
    with safe_open(file, framework="pt") as saved:
        keys = list(saved.keys())
        scales = {(key.partition(SCALE_MARK)[0], key.partition("/")[2]): key for key in keys if SCALE_MARK in key}
        for key in keys:
            kind, name, shard, start = parse_key(key)
            fragment = wanted.get((kind, name))
            if fragment is None:
                continue
            source, target = saved.get_tensor(key), fragment.states[kind]  # mapped: only what is copied is read
            here, there = (shard, start, source.numel()), (fragment.shard, fragment.start, target.numel())
            for low, to, length in list_overlaps(here, there):
                if isinstance(target, torch.Tensor):
                    target[to : to + length].copy_(source[low : low + length])
                else:
                    restore = restores[fragment.held.partition, kind]
                    scale_key = scales[restore.scales_name, key.partition("/")[2]]
                    phase = int(scale_key.partition("/")[0].partition(SCALE_MARK)[2])
                    run = BlockRun(source, saved.get_tensor(scale_key), phase)
                    restore.put(fragment.held.start + to, run.narrow(low, length))
                missing[kind, name] -= length


Restores = dict[tuple[int, str], BlockRestore]  # (partition, name of its blockwise state) ->
# A parameter's shard; the first element of a run in the flattened parameter; the number of elements
Run = tuple[ShardLayout | None, int, int]


def list_overlaps(first: Run, second: Run) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of the whole tensor that two fragments have in common, run by run: their position in the
    first and in the second, and their number."""
    one, other = (_list_runs(*fragment, is_same=first[0] == second[0]) for fragment in (first, second))
    mine, its = next(one, None), next(other, None)
    while mine is not None and its is not None:
        start, stop = max(mine[1], its[1]), min(mine[1] + mine[2], its[1] + its[2])
        if start < stop:
            yield mine[0] + start - mine[1], its[0] + start - its[1], stop - start
        if mine[1] + mine[2] <= its[1] + its[2]:
            mine = next(one, None)
        else:
            its = next(other, None)


def _list_runs(shard: ShardLayout | None, start: int, count: int, is_same: bool) -> Iterator[tuple[int, int, int]]:
    """(first in the fragment, first in the whole, length); where both are the same shard, it counts as the whole."""
    if shard is None or is_same:
        yield 0, start, count
        return
    for low, whole, length in shard.list_runs(start, start + count):
        yield low - start, whole, length


def parse_key(key: str) -> tuple[str, str, ShardLayout | None, int]:
    """Return kind, parameter's name, shard and first element of a key in a file."""
    kind, _, rest = key.partition("/")
    label, _, start = rest.rpartition("@")
    name, bracket, described = label.partition("[")
    return kind, name, parse_shard(bracket + described), int(start)
