"""What of a model is trained: all of it, all but what `freeze` names, or an adapter beside it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.adapters.adapter import Adapter, check_all_taken
from models.adapters.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TIED_HEAD,
    fold_weights,
    load_adapter_tensors,
    load_lora_config,
    name_for_peft,
    to_peft_name,
)
from models.adapters.targets import (
    build_lora_config,
    is_named,
    list_adaptable,
    list_full_names,
    list_projections,
    list_targets,
)
from models.layers.layer import Layer
from models.parallel.shard import NO_TP, TensorParallel
from models.storage.folders import copy_processor_files, copy_tokenizer_files, staged_folder
from models.weights.pipeline_checkpoint import PipelineCheckpoint
from training.config.schema import AdapterName, RunConfig

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

HEAD = "lm_head"


def build_adapter(config: RunConfig, layers: Sequence[Layer], is_part: bool = False) -> Adapter | None:
    """The adapter that `config.adapter` describes; None without one. is_part: the layers are of a wrapped model.

    Raises UserError for targets that match nothing, values out of range, and a folder to start from that is not an
    adapter.
    """
    options = config.adapter
    if options.name is AdapterName.none:
        return None
    for key, value, fits in (
        ("r", options.r, options.r >= 1),
        ("lora_dropout", options.lora_dropout, 0 <= options.lora_dropout < 1),
    ):
        if not fits:
            raise UserError(f"adapter.{key}={value}: " + ("at least 1" if key == "r" else "from 0 to below 1"))
    if options.load_in_4bit:
        check_4bit(layers)
    lora, tensors = _load_adapter(config, layers) if options.name_or_path else (_describe_adapter(config, layers), {})
    check_experts(lora, layers)
    if is_part:
        lora.target_modules = list_full_names(layers, lora)
    return Adapter(lora, config.seed, tensors, options.load_in_4bit)


def _load_adapter(config: RunConfig, layers: Sequence[Layer]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    assert config.adapter.name_or_path is not None
    path = Path(config.adapter.name_or_path).expanduser()
    if not (path / ADAPTER_CONFIG).is_file() or (path / "latest").is_file():
        raise UserError(
            f"adapter.name_or_path={path} is not a peft folder ({ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}); to "
            "continue a run, use resume"
        )
    lora, tensors = load_lora_config(path), load_adapter_tensors(path)
    check_all_taken(tensors.keys(), lora, layers)
    lora.inference_mode = False
    lora.base_model_name_or_path = config.model_name_or_path
    return lora, tensors


def _describe_adapter(config: RunConfig, layers: Sequence[Layer]) -> LoraConfig:
    options = config.adapter
    saved = choose_saved(options.modules_to_save or [], layers)
    return build_lora_config(
        layers,
        options.target_modules,
        options.target_parameters,
        r=options.r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        modules_to_save=saved or None,
        # peft would give a tied head the embedding of the base model
        ensure_weight_tying=bool(saved) and not layers[-1].owns_weights,
        base_model_name_or_path=config.model_name_or_path,
    )


def choose_saved(names: Sequence[str], layers: Sequence[Layer]) -> list[str]:
    """The modules that `adapter.modules_to_save` names, without a tied head, which is the embedding.

    Raises UserError for a name that none of the modules around the decoder layers bears.
    """
    known = [layer.hf_prefix.rstrip(".") for layer in layers if layer.owns_weights]
    around = [name for name in known if not re.search(r"\.\d+$", name)]
    is_tied = not layers[-1].owns_weights
    for name in names:
        if not any(is_named(whole, [name]) for whole in around) and not (is_tied and name == HEAD):
            raise UserError(
                f"adapter.modules_to_save: no module around the decoder layers is named '{name}'; there are "
                f"{', '.join(whole.rsplit('.', 1)[-1] for whole in around)}"
            )
    return [name for name in names if not (is_tied and name == HEAD)]


def check_added_tokens(config: RunConfig, added: Sequence[str], layers: Sequence[Layer]) -> None:
    """added: the tokens that the run brings to the tokenizer. Raises UserError for LoRA that would never train their
    rows."""
    options = config.adapter
    if options.name is AdapterName.none or options.modules_to_save is not None or options.name_or_path or not added:
        return
    names = dict.fromkeys([layers[0].hf_prefix.rstrip(".").rsplit(".", 1)[-1], HEAD])
    raise UserError(
        f"adapter=lora would never train the rows of the tokens that the tokenizer does not have yet ('{added[0]}', "
        f"{len(added)} in all); give adapter.modules_to_save=[{','.join(names)}] to train and save embedding and head "
        "too, a data.chat_template that adds no tokens (alpaca, llama2, mistral, vicuna, zephyr), or "
        "adapter.modules_to_save=[] to leave them as they are"
    )


def check_experts(lora: LoraConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for what LoRA on experts, or on a router, cannot do: peft refuses it too."""
    named = [
        layer.hf_prefix + name
        for layer in layers
        for name in list_targets(layer.build_on_meta(), layer, lora).parameters[:1]
    ]
    for key, value in (("lora_dropout", lora.lora_dropout), ("use_dora", lora.use_dora)):
        if value and named:
            raise UserError(
                f"adapter.{key}={str(value).lower()} cannot be used on stacked parameters such as '{named[0]}': B A is "
                f"added to the weight itself; give adapter.{key}={'0' if key == 'lora_dropout' else 'false'}, or "
                "adapter.target_parameters=[] to leave the experts without adapters"
            )


def check_4bit(layers: Sequence[Layer]) -> None:
    """Raises UserError where bitsandbytes is missing, or a weight is none that it can quantize."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "adapter.load_in_4bit=true needs the package bitsandbytes (pip install bitsandbytes), or leave it false"
        )
    for layer in layers:
        module = layer.build_on_meta()
        for name, projection in list_projections(module).items():
            if not isinstance(projection, nn.Linear):
                raise UserError(
                    f"adapter.load_in_4bit=true: '{layer.hf_prefix}{name}' is a {type(projection).__name__}, which "
                    "cannot be quantized"
                )
        if stacks := list_adaptable(module).stacks:
            raise UserError(
                f"adapter.load_in_4bit=true: the experts of a layer are one tensor, '{layer.hf_prefix}{stacks[0]}', "
                "which would stay as it is; give adapter.load_in_4bit=false and more num_stages"
            )


def check_peft_names(adapter: Adapter | None, config: PretrainedConfig) -> None:
    """Raises UserError for an adapter that peft could not load on this model."""
    weights = name_for_peft(adapter.config, config).target_parameters if adapter and adapter.config.use_dora else None
    if weights:
        raise UserError(
            f"adapter.use_dora=true: of a '{config.model_type}' peft takes '{weights[0].removesuffix('.weight')}' for "
            "the experts' and could not load the adapter; leave it out of adapter.target_modules, or give "
            "adapter.use_dora=false"
        )


def choose_trained(
    module: nn.Module,
    index: int,
    layer: Layer,
    adapter: Adapter | None,
    freeze: Sequence[str],
    parallel: TensorParallel = NO_TP,
) -> None:
    """Makes trainable, of the module of layer `index`, what is to be trained: the adapter that it puts there, or all
    but what `freeze` names."""
    if adapter is not None:
        adapter.attach(module, index, layer, parallel)
    for name, parameter in module.named_parameters():
        if any(re.search(pattern, layer.hf_prefix + name) for pattern in freeze):
            parameter.requires_grad_(False)


def check_freeze(config: RunConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for a pattern that is none, matches nothing, or leaves nothing to train."""
    names = {layer.hf_prefix + name for layer in layers for name in layer.shapes()}
    frozen: set[str] = set()
    for pattern in config.freeze:
        try:
            matched = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise UserError(f"freeze: '{pattern}' is not a valid regular expression ({error})") from None
        if not matched:
            raise UserError(f"freeze: '{pattern}' matches no weight; they are named like '{min(names)}'")
        frozen |= matched
    if names == frozen:
        raise UserError(f"freeze={config.freeze} leaves nothing to train")


def check_same_adapter(config: RunConfig, adapter: Adapter | None, resume_from: Path | None) -> None:
    """Raises UserError when a run would continue from a checkpoint with another adapter than its own, or with none."""
    if resume_from is None:
        return
    saved_with = (resume_from.parent / ADAPTER_CONFIG).is_file()
    if saved_with != (adapter is not None):
        saved, now = ("adapter=lora", "adapter=none") if saved_with else ("adapter=none", "adapter=lora")
        raise UserError(
            f"resume: {resume_from} was saved with {saved}, this run has {now}; give {saved}, or start a new run"
        )
    if adapter is None:
        return
    saved_config = load_lora_config(resume_from.parent)
    before, after = _describe_resumed(saved_config), _describe_resumed(adapter.config)
    for key, value in before.items():
        if value != after[key]:
            raise UserError(
                f"resume: adapter.{key} was {_show(value)}, is {_show(after[key])}; give the same, or start a new run"
            )


def _describe_resumed(lora: LoraConfig) -> dict[str, object]:
    """What must stay when a run is continued."""
    modules, parameters = fold_weights(lora)
    same = {key: getattr(lora, key) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
    same["modules_to_save"] = sorted(lora.modules_to_save or ())
    return {**same, "target_modules": modules, "target_parameters": parameters}


def _show(value: object) -> object:
    return f"[{','.join(sorted(value))}]" if isinstance(value, (set, list)) else value


def read_trained_adapter(step_dir: Path, layers: Sequence[Layer]) -> dict[str, torch.Tensor]:
    """The adapter that a LoRA run has saved in `step_dir`, by peft's names. Raises UserError for a file that cannot
    be read."""
    checkpoint = PipelineCheckpoint(step_dir.parent, step_dir.name)
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        if layer.owns_weights:
            parameters = checkpoint.read_parameters(index)
            tensors |= {to_peft_name(name, layer): tensor.contiguous() for name, tensor in parameters.items()}
    return tensors


def save_adapter_config(adapter: Adapter, folder: Path, config: PretrainedConfig) -> None:
    """adapter_config.json, as peft writes it for this model."""
    name_for_peft(adapter.config, config).save_pretrained(str(folder))


def export_adapter(step_dir: Path, layers: Sequence[Layer], output_dir: Path) -> None:
    """A standard peft folder of the adapter that a checkpoint holds, with the tokenizer and the processor beside
    it."""
    checkpoints, tensors = step_dir.parent, read_trained_adapter(step_dir, layers)
    fields = json.loads((checkpoints / ADAPTER_CONFIG).read_text())
    embedding = tensors.get(to_peft_name("weight", layers[0]))
    if embedding is not None and not layers[-1].owns_weights:  # peft looks for a tied head under its own name too
        tensors[TIED_HEAD] = embedding.clone()
    with staged_folder(output_dir, overwrite=True) as folder:
        save_file(tensors, folder.path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        copy_tokenizer_files(checkpoints, folder.path)
        copy_processor_files(checkpoints, folder.path)
        for name in ("config.json", "generation_config.json"):  # as the tokenizer, perhaps not the base model's
            if (checkpoints / name).is_file():
                shutil.copyfile(checkpoints / name, folder.path / name)
        (folder.path / ADAPTER_CONFIG).write_text(json.dumps({**fields, "inference_mode": True}, indent=2) + "\n")
