"""Build a run's adapter from the config group `adapter`, and check what it cannot do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.adapters.adapter import Adapter, check_all_taken
from models.adapters.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    has_own_head,
    load_adapter_tensors,
    load_lora_config,
    name_for_peft,
)
from models.adapters.options import AdapterName, AdapterOptions, starts_from_base
from models.adapters.quantized import list_held
from models.adapters.stacks import restore_order
from models.adapters.targets import (
    build_lora_config,
    is_named,
    list_full_names,
    list_projections,
    list_targets,
)
from models.architecture.alike import map_alike
from models.heads.head import Head
from models.layers.layer import Layer
from models.storage.hub import split_revision

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

HEAD = "lm_head"
INITS = (True, "gaussian", "orthogonal")  # of peft, with B A = 0 at the start and the base weights unchanged
CHANGE_BASE = ("loftq", "corda", "eva", "lora_ga")


def build_adapter(
    options: AdapterOptions,
    layers: Sequence[Layer],
    *,
    seed: int,
    base_name: str,
    is_part: bool = False,
    head: Head | None = None,
    form: str = "",
    unconverted: tuple[str, ...] = (),
) -> Adapter | None:
    """Build the adapter that `options` describe; None where they ask for none.

    seed: of the random matrices. base_name: the base model's name or path, which peft's config names. is_part: the
    layers belong to a wrapped model, which may have other modules of the same names. head: of the model in place of its
    LM head; it is trained and saved whole. form: of the quantized weights in the model's files, a name in `FORMS` of
    `models/layers/frozen.py`; empty where there are none. unconverted: names of modules that are not in that form.
    Raises UserError for targets that match nothing, values out of range, and a folder to start from that is not an
    adapter.
    """
    if options.name is AdapterName.none:
        return None
    _check_values(options)
    if options.load_in_4bit:
        check_4bit(layers)
    if options.keep_quantized:
        _check_kept(form, layers, base_name)
    if options.name_or_path:
        lora, tensors = _load_adapter(Path(options.name_or_path).expanduser(), layers)
    else:
        lora, tensors = _build_new_config(options, layers, head), {}
    lora.base_model_name_or_path, lora.revision = split_revision(base_name)
    check_experts(lora, layers)
    if lora.fan_in_fan_out and lora.init_lora_weights == "olora":
        raise UserError(
            "adapter.init_lora_weights=olora: peft does not know it for weights that are stored transposed, as this "
            "model's are; give adapter.init_lora_weights=pissa"
        )
    if is_part:
        lora.target_modules = list_full_names(layers, lora)
    if not options.keep_quantized:
        return Adapter(lora, seed, tensors, options.load_in_4bit)
    return Adapter(lora, seed, tensors, kept=form, unkept=unconverted)


def _check_values(options: AdapterOptions) -> None:
    ratio = options.loraplus_lr_ratio
    if ratio is not None and not 0 < ratio < math.inf:
        raise UserError(f"adapter.loraplus_lr_ratio={ratio}: a finite number of more than 0; null turns it off")
    if options.name_or_path:
        return  # its own config has the other values
    if options.r < 1:
        raise UserError(f"adapter.r={options.r}: at least 1")
    if not 0 < options.lora_alpha < math.inf:
        raise UserError(
            f"adapter.lora_alpha={options.lora_alpha}: a finite number of more than 0; at 0 nothing is trained"
        )
    if not 0 <= options.lora_dropout < 1:
        raise UserError(f"adapter.lora_dropout={options.lora_dropout}: from 0 to below 1")
    _check_init(options)


def _check_init(options: AdapterOptions) -> None:
    """Raises UserError for an initialization that is unknown, that needs other base weights than the model's, or that
    other keys exclude."""
    init = options.init_lora_weights
    if init in INITS:
        return
    if str(init).partition("_niter_")[0] in CHANGE_BASE:
        raise UserError(
            f"adapter.init_lora_weights={init} changes the weights of the base model, which is neither saved nor "
            "exported with the adapter; make such an adapter with peft, save the changed base next to it, and give "
            "both as model_name_or_path and adapter.name_or_path"
        )
    if not starts_from_base(init):
        raise UserError(
            f"adapter.init_lora_weights={init}: one of true, gaussian, orthogonal, pissa, pissa_niter_16 or another "
            "number, olora"
        )
    for key in ("load_in_4bit", "keep_quantized", "use_dora"):
        if getattr(options, key):
            raise UserError(
                f"adapter.init_lora_weights={init} is not tested with adapter.{key}=true; give adapter.{key}=false, or "
                "adapter.init_lora_weights=true"
            )


def _load_adapter(path: Path, layers: Sequence[Layer]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    if not all((path / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        raise UserError(
            f"adapter.name_or_path={path} is not a peft folder ({ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}); to "
            "continue a run, use resume"
        )
    lora = load_lora_config(path)
    tensors = restore_order(load_adapter_tensors(path), layers, lora)
    check_all_taken(tensors.keys(), lora, layers)
    if has_own_head(tensors, layers):
        raise UserError(
            f"adapter.name_or_path={path} has trained a head apart from the embedding, which is this model's head; "
            "merge the adapter first (convert2ckpt.py --to_hf) and train from the result"
        )
    lora.inference_mode = False
    lora.init_lora_weights = True  # its weights are loaded; pissa and its like would change the base again
    return lora, tensors


def _build_new_config(options: AdapterOptions, layers: Sequence[Layer], head: Head | None) -> LoraConfig:
    own = [] if head is None or not head.has_weights else [head.prefix.removesuffix(".")]
    saved = choose_saved(list(dict.fromkeys([*(options.modules_to_save or []), *own])), layers)
    return build_lora_config(
        layers,
        options.target_modules,
        options.target_parameters,
        r=options.r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        init_lora_weights=options.init_lora_weights,
        modules_to_save=saved or None,
        task_type="CAUSAL_LM" if head is None else head.peft_task,
        # peft would give a tied head the embedding of the base model
        ensure_weight_tying=bool(saved) and not layers[-1].owns_weights,
    )


def choose_saved(names: Sequence[str], layers: Sequence[Layer]) -> list[str]:
    """Returns the modules that `adapter.modules_to_save` names, except a tied head next to its embedding.

    Raises UserError for a name that matches no module around the decoder layers, and for a tied head alone: it would
    be trained as the embedding too.
    """
    known = [layer.hf_prefix.rstrip(".") for layer in layers if layer.owns_weights]
    around = [name for name in known if not re.search(r"\.\d+$", name)]
    is_tied, others = not layers[-1].owns_weights, [name for name in names if name != HEAD]
    for name in names:
        if not any(is_named(whole, [name]) for whole in around) and not (is_tied and name == HEAD):
            raise UserError(
                f"adapter.modules_to_save: no module around the decoder layers is named '{name}'; there are "
                f"{', '.join(whole.rsplit('.', 1)[-1] for whole in around)}"
            )
    if is_tied and HEAD in names and not any(is_named(known[0], [name]) for name in names):
        embedding = known[0].rsplit(".", 1)[-1]
        raise UserError(
            f"adapter.modules_to_save=[{','.join(names)}]: the head of this model is its embedding, so both are "
            f"trained; give adapter.modules_to_save=[{','.join([embedding, *names])}], or "
            f"adapter.modules_to_save=[{','.join(others)}] to continue a run of version 1.1, which trained neither"
        )
    return others if is_tied else list(names)


def check_added_tokens(options: AdapterOptions, added: Sequence[str], layers: Sequence[Layer]) -> None:
    """Raises UserError where LoRA would never train the rows of `added`, the tokens that the run adds to its
    tokenizer."""
    if options.name is AdapterName.none or not added:
        return
    if options.name_or_path:
        if not load_lora_config(Path(options.name_or_path).expanduser()).modules_to_save:
            raise UserError(
                f"adapter.name_or_path={options.name_or_path} would never train the rows of the tokens that the "
                f"tokenizer does not have yet ('{added[0]}', {len(added)} in all): it saves no embedding "
                "(modules_to_save); give a data.chat_template that adds no tokens (alpaca, llama2, mistral, vicuna, "
                "zephyr), or a new adapter with adapter.modules_to_save"
            )
        return
    if options.modules_to_save is not None:
        return
    names = dict.fromkeys([layers[0].hf_prefix.rstrip(".").rsplit(".", 1)[-1], HEAD])
    raise UserError(
        f"adapter=lora would never train the rows of the tokens that the tokenizer does not have yet ('{added[0]}', "
        f"{len(added)} in all); give adapter.modules_to_save=[{','.join(names)}] to train and save embedding and head "
        "too, a data.chat_template that adds no tokens (alpaca, llama2, mistral, vicuna, zephyr), or "
        "adapter.modules_to_save=[] to leave them as they are"
    )


def check_experts(lora: LoraConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for dropout or DoRA on experts or routers, which peft refuses too."""
    named = [
        layer.hf_prefix + name
        for layer in layers
        for name in list_targets(layer.build_on_meta(), layer, lora).parameters[:1]
    ]
    if named and (lora.init_lora_weights in INITS[1:] or starts_from_base(lora.init_lora_weights)):
        raise UserError(
            f"adapter.init_lora_weights={lora.init_lora_weights} is not tested on stacked parameters such as "
            f"'{named[0]}'; give adapter.init_lora_weights=true, or adapter.target_parameters=[] to leave the experts "
            "without adapters"
        )
    for key, value in (("lora_dropout", lora.lora_dropout), ("use_dora", lora.use_dora)):
        if value and named:
            raise UserError(
                f"adapter.{key}={str(value).lower()} cannot be used on stacked parameters such as '{named[0]}': B A is "
                f"added to the weight itself; give adapter.{key}={'0' if key == 'lora_dropout' else 'false'}, or "
                "adapter.target_parameters=[] to leave the experts without adapters"
            )


def _check_kept(form: str, layers: Sequence[Layer], base_name: str) -> None:
    """Raises UserError for weights that are not quantized, and for a model without any of that form."""
    if not form:
        raise UserError(
            f"adapter.keep_quantized=true: {base_name} holds no weights in fp8, mxfp4 or int4 that could stay so; give "
            "the folder as it is published, or adapter.keep_quantized=false with adapter.load_in_4bit=true"
        )
    if not any(map_alike(lambda layer: bool(list_held(layer.build_on_meta(), form)), layers)):
        raise UserError(
            f"adapter.keep_quantized=true: in {form} it keeps the experts of a mixture, and this model has no stacks "
            "of experts; give adapter.keep_quantized=false, or adapter.load_in_4bit=true in its place"
        )


def check_4bit(layers: Sequence[Layer]) -> None:
    """Raises UserError for a projection that bitsandbytes cannot quantize."""
    for layer in layers:
        for name, projection in list_projections(layer.build_on_meta()).items():
            if not isinstance(projection, nn.Linear):
                raise UserError(
                    f"adapter.load_in_4bit=true: '{layer.hf_prefix}{name}' is a {type(projection).__name__}, which "
                    "cannot be quantized"
                )


def check_peft_names(adapter: Adapter | None, config: PretrainedConfig) -> None:
    """Raises UserError for an adapter that peft could not load on this model."""
    weights = name_for_peft(adapter.config, config).target_parameters if adapter and adapter.config.use_dora else None
    if weights:
        raise UserError(
            f"adapter.use_dora=true: in a '{config.model_type}' model peft takes "
            f"'{weights[0].removesuffix('.weight')}' for the experts' matrix and could not load the adapter; remove it "
            "from adapter.target_modules, or give adapter.use_dora=false"
        )
