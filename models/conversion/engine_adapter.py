"""Write a peft folder in the form in which an engine serves its adapter (`models/adapters/engines.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from errors import UserError
from models.adapters.adapter import check_all_taken, list_adapter_shapes
from models.adapters.engine_check import check_adapter, find_limit, find_rank, read_dimensions
from models.adapters.engines import ENGINES, find_model_class, write_for_engine
from models.adapters.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    load_adapter_tensors,
    load_lora_config,
    read_fingerprint,
)
from models.adapters.peft_export import export_adapter, installed_peft
from models.adapters.stacks import StackAdapter, list_stack_adapters, restore_order
from models.architecture.lookup import build_layers
from models.storage.folders import check_output_dir
from models.storage.tensor_files import load_json
from models.weights.sources import open_weights


def export_for_engine(
    folder: str, output_dir: Path, engine_name: str, trust_remote_code: bool = False, trust_checkpoint: bool = False
) -> list[str]:
    """Write the adapter of a peft folder as a folder that the engine loads. Its base model is opened for its shapes; no
    weight of it is read.

    engine_name: a key of `ENGINES`. Returns lines about what the engine needs to be told. Raises UserError for a folder
    without an adapter or with a damaged one, for a family without a table, and for an adapter of which the engine would
    refuse a part or leave it out.
    """
    path, engine = Path(folder).expanduser(), ENGINES[engine_name]
    if not all((path / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        raise UserError(
            f"--engine: {path} is not a peft folder ({ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}); give the export of a "
            "LoRA run, OUTPUT_DIR/hf"
        )
    source = open_weights(str(path), trust_remote_code, trust_checkpoint)
    check_output_dir(output_dir, True, path, source.files())
    layers, lora = build_layers(source.config, source.wrapper), load_lora_config(path)
    class_name = find_model_class(source.config.model_type)
    tensors = restore_order(load_adapter_tensors(path), layers, lora)
    check_all_taken(tensors.keys(), lora, layers)
    stacks = list_stack_adapters(layers, lora)
    _check_shapes(path, tensors, list_adapter_shapes(lora, layers), stacks)
    own = {"r": lora.r, "lora_alpha": lora.lora_alpha}  # which engines need, and peft has defaults for
    fields = {**load_json(path / ADAPTER_CONFIG), **own, "peft_version": installed_peft()}
    written = write_for_engine(tensors, fields, stacks, engine, class_name)
    shapes = {name: tuple(tensor.shape) for name, tensor in written.tensors.items()}
    dimensions = read_dimensions(source.config.to_dict())
    assert dimensions is not None  # its class has experts
    findings = check_adapter(shapes, written.fields, engine_name, class_name, dimensions)
    if problem := next((found for found in findings if found.problem), None):
        raise UserError(
            f"{engine_name} {engine.release} cannot serve this adapter: {problem.name} is {problem.problem} "
            f"({problem.reason})"
        )
    export_adapter(path, written.tensors, layers, output_dir, read_fingerprint(path), written.fields)
    limit = find_limit(find_rank(written.fields), engine)
    return [] if limit is None else [f"start {engine_name} with --max-lora-rank {limit}"]


def _check_shapes(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Size],
    stacks: Sequence[StackAdapter],
) -> None:
    """Raise UserError for a matrix of the adapter in `path` that is missing or has another shape than expected. The
    ranks of stacked experts are compared, as they are split by them; others are left to `check_adapter`: peft matches
    rank_pattern with "down_proj.weight" where `name_for_peft` has named a module so."""
    stacked = {name for adapter in stacks for name in (adapter.first, adapter.second)}
    for name, shape in expected.items():
        found = tensors.get(name)
        free = None if name in stacked else 0 if ".lora_A." in name else 1  # the dimension of the rank
        if found is None or not _are_alike(found.shape, shape, free):
            state = "missing" if found is None else f"of shape {list(found.shape)}, not {list(shape)}"
            raise UserError(
                f"{path / ADAPTER_WEIGHTS} does not fit the {ADAPTER_CONFIG} and the base model: '{name}' is {state}; "
                "export the run again"
            )


def _are_alike(found: Sequence[int], shape: Sequence[int], free: int | None) -> bool:
    """Return whether two shapes are equal, but for the dimension `free`."""
    return len(found) == len(shape) and all(
        dim == free or size == wanted for dim, (size, wanted) in enumerate(zip(found, shape, strict=True))
    )
