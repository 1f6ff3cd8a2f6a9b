"""The forms in which engines take the adapters of a mixture's experts, and the way there from a peft folder.

- stacked: peft's own. One pair of A and B for all experts of a stack, named by the wrappers around their module:
  `experts.base_layer.lora_A` is of gate_up_proj, `experts.lora_A` of down_proj.
- pairs: one pair for each expert and each of its three matrices, `experts.5.gate_proj.lora_A`. gate_proj and up_proj
  share the A of gate_up_proj, and each has its rows of B.

The tables hold what the releases of `ENGINES` take; benchmarks/engines.py runs their code on exports and holds the
tables against it. Only numbers are moved: nothing is rounded.

E experts, r the rank of an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any

import torch

from errors import UserError
from models.adapters.stacks import StackAdapter, join_experts, split_experts

PEFT_PREFIX = "base_model.model."
STACKS = GATE_UP, DOWN = "gate_up_proj", "down_proj"
PATTERNS = ("rank_pattern", "alpha_pattern")


class Form(Enum):
    stacked = "stacked"
    pairs = "pairs"


@dataclass(frozen=True)
class ModelClass:
    """A class of models with experts.

    model_type: of its config.json. projections: the other modules of a layer that an adapter may be on, by their names
    in `transformers`. router: the router's. names: of one expert's gate, up and down projection. hub_block: what the
    block of the experts is called in the weights on the hub, and in engines; it is "mlp" in `transformers`.
    is_interleaved: whether the rows of gate_proj and up_proj take turns in gate_up_proj, in place of one half each.
    is_transposed: whether peft takes its stacks for [E, in, out].
    """

    model_type: str
    projections: tuple[str, ...]
    router: str
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    hub_block: str = "mlp"
    is_interleaved: bool = False
    is_transposed: bool = False


def _attention(*names: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}" for name in names)


def _dense(*blocks: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for block in blocks for name in ("gate_proj", "up_proj", "down_proj"))


_QKVO = _attention("q_proj", "k_proj", "v_proj", "o_proj")
MODEL_CLASSES = {
    "Qwen3MoeForCausalLM": ModelClass("qwen3_moe", (*_QKVO, *_dense("mlp")), "mlp.gate"),
    "MixtralForCausalLM": ModelClass(
        "mixtral",
        _QKVO,
        "mlp.gate",
        names=("w1", "w3", "w2"),
        hub_block="block_sparse_moe",
    ),
    "DeepseekV3ForCausalLM": ModelClass(
        "deepseek_v3",
        (
            *_attention("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            *_dense("mlp", "mlp.shared_experts"),
        ),
        "mlp.gate",
    ),
    "GptOssForCausalLM": ModelClass(
        "gpt_oss",
        _QKVO,
        "mlp.router",
        is_interleaved=True,
        is_transposed=True,
    ),
}


@dataclass(frozen=True)
class Engine:
    """The adapters that the loader of one release of an engine takes.

    forms: by the name of a model class. ranks: the values that its limit of ranks may have, rising; empty where any
    rank loads. default_rank: its limit where none is given. takes_router: whether routers get adapters. saved: the
    modules of `modules_to_save` that it loads. inits: the values of `init_lora_weights` that are texts and that it
    accepts; None where it does not read the field. reads_patterns: whether it reads use_rslora, rank_pattern and
    alpha_pattern. reads_paths: whether a module is known by its whole name; otherwise by its layer, its expert and the
    last part. together: groups of modules that it fuses, and loads together or not at all. in_hub_names: whether
    modules have their names on the hub. unread: further fields that it refuses where they are set.
    """

    release: str
    forms: Mapping[str, Form]
    ranks: tuple[int, ...] = ()
    default_rank: int | None = None
    takes_router: bool = True
    saved: tuple[str, ...] | None = None
    inits: tuple[str, ...] | None = None
    unread: tuple[str, ...] = ()
    reads_patterns: bool = True
    reads_paths: bool = True
    together: tuple[tuple[str, ...], ...] = ()
    in_hub_names: bool = True


_PAIRS = dict.fromkeys(("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"), Form.pairs)
ENGINES = {
    "peft": Engine("0.21.2", dict.fromkeys(MODEL_CLASSES, Form.stacked), in_hub_names=False),
    # lora/peft_helper.py, lora/lora_model.py, lora/model_manager.py, config/lora.py
    "vllm": Engine(
        "0.33.0",
        {**_PAIRS, "GptOssForCausalLM": Form.stacked},
        ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        default_rank=16,
        saved=("classifier", "score"),
        inits=("gaussian", "eva", "orthogonal", "mica", "lora_ga"),
        unread=("lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora"),
    ),
    # srt/lora/lora.py, lora_config.py, lora_manager.py, mem_pool.py
    "sglang": Engine(
        "0.5.23",
        dict.fromkeys(MODEL_CLASSES, Form.pairs),
        takes_router=False,
        saved=(),
        reads_patterns=False,
        reads_paths=False,
        together=(("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa")),
    ),
}


def find_engine(name: str, release: str | None = None) -> Engine:
    """Return the engine's table. Raises UserError for another release than the one that the table was held against."""
    engine = ENGINES[name]
    if release not in (None, engine.release):
        raise UserError(f"{name} {release} is not a release that the table of adapters is of; that is {engine.release}")
    return engine


def find_model_class(model_type: str) -> str:
    """Return the name of the class of models. Raises UserError for one that no table has."""
    for name, model_class in MODEL_CLASSES.items():
        if model_class.model_type == model_type:
            return name
    known = ", ".join(model_class.model_type for model_class in MODEL_CLASSES.values())
    raise UserError(f"adapters of '{model_type}' in the forms of engines are not in the tables; those are of {known}")


@dataclass(frozen=True)
class EngineAdapter:
    """An adapter as an engine takes it. tensors: by their names in the folder. fields: of adapter_config.json."""

    tensors: dict[str, torch.Tensor] = field(repr=False)
    fields: dict[str, Any]


def write_for_engine(
    tensors: Mapping[str, torch.Tensor],
    fields: Mapping[str, Any],
    stacks: Sequence[StackAdapter],
    engine: Engine,
    class_name: str,
) -> EngineAdapter:
    """Bring an adapter into the form that the engine takes for a class of models.

    tensors, fields: of a peft folder, in today's order (`models/adapters/stacks.py`). stacks: its adapters of stacked
    experts. A matrix of the experts without an adapter gets one of zeros where the other one of its layer has one: the
    engines load both or neither.

    Raises UserError for ranks and scales by name where the engine reads one of each.
    """
    model_class, form = MODEL_CLASSES[class_name], engine.forms[class_name]
    if not engine.reads_patterns:
        fields = _use_one_scale(fields)
    written, patterns = dict(tensors), {key: dict(fields.get(key) or {}) for key in PATTERNS}
    for _, group in groupby(stacks, key=lambda adapter: adapter.layer):
        pair = {adapter.stack: adapter for adapter in group}
        for name in [name for adapter in pair.values() for name in (adapter.first, adapter.second)]:
            del written[name]
        factors = {stack: _read_factors(tensors, adapter) for stack, adapter in pair.items()}
        gate_up, down = factors.get(GATE_UP), factors.get(DOWN)
        module = next(f"{adapter.layer}{adapter.experts}" for adapter in pair.values())
        ranks = {stack: find_pattern(patterns["rank_pattern"], f"{module}.{stack}", fields["r"]) for stack in STACKS}
        gate_up = gate_up or _make_zeros(down, 2, ranks[GATE_UP])
        down = down or _make_zeros(gate_up, 1, ranks[DOWN])
        base = f"{PEFT_PREFIX}{module}"
        if form is Form.stacked:
            written |= _name_pair(f"{base}.base_layer", *join_experts(*gate_up))
            written |= _name_pair(base, *join_experts(*down))
            continue
        written |= _write_pairs(base, gate_up, down, model_class)
        for stack, names in ((GATE_UP, model_class.names[:2]), (DOWN, model_class.names[2:])):
            if stack in pair and engine.reads_patterns:
                _add_patterns(patterns, pair[stack], fields, names)
    changed: dict[str, Any] = {"target_parameters": _name_both_stacks(fields), **patterns}
    if form is Form.pairs:
        leaves = sorted({_to_projection(leaf, model_class) for leaf in list_leaves(written)})
        changed |= {"target_parameters": None, "target_modules": leaves}
    if engine.in_hub_names and model_class.hub_block != "mlp":
        written = {to_hub_name(name, model_class): tensor for name, tensor in written.items()}
        changed |= {key: {_escape_block(k, model_class): v for k, v in patterns[key].items()} for key in PATTERNS}
    return EngineAdapter(written, {**fields, **changed})


def to_hub_name(name: str, model_class: ModelClass) -> str:
    """Return a name in which the block of the experts is called as on the hub."""
    return re.sub(r"(\.layers\.\d+\.)mlp\.", rf"\g<1>{model_class.hub_block}.", name)


def list_leaves(names: Iterable[str]) -> list[str]:
    """Return the names, without their parents, of the modules that have adapters among these tensors."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name})


def _to_projection(leaf: str, model_class: ModelClass) -> str:
    """Return what an expert's matrix is called in most families: SGLang knows "w1" in tensors, not as a target."""
    common = dict(zip(model_class.names, ("gate_proj", "up_proj", "down_proj"), strict=True))
    return common.get(leaf, leaf)


def _use_one_scale(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields whose lora_alpha / r is the scale of the whole adapter."""
    if any(fields.get(key) for key in PATTERNS):
        key = next(key for key in PATTERNS if fields.get(key))
        raise UserError(f"the adapter has a {key}, and this engine reads one rank and one lora_alpha for all modules")
    if not fields.get("use_rslora"):
        return dict(fields)
    return {**fields, "use_rslora": False, "lora_alpha": fields["lora_alpha"] * math.sqrt(fields["r"])}


Factors = tuple[torch.Tensor, torch.Tensor]  # A [E, r, in] and B [E, out, r]


def _read_factors(tensors: Mapping[str, torch.Tensor], adapter: StackAdapter) -> Factors:
    return split_experts(tensors[adapter.first], tensors[adapter.second], adapter.num_experts)


def _make_zeros(other: Factors | None, matrices: int, rank: int) -> Factors:
    """Return an adapter that changes nothing, for gate_up_proj (of two matrices) next to the one of down_proj, or the
    other way round. rank: of what is returned."""
    assert other is not None  # a layer is listed only if one of its stacks has an adapter
    first, second = other
    num_experts, _, inputs = first.shape
    outputs = second.shape[1] // (3 - matrices)  # of one matrix
    return first.new_zeros(num_experts, rank, outputs), second.new_zeros(num_experts, matrices * inputs, rank)


def _name_pair(module: str, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": first.contiguous(), f"{module}.lora_B.weight": second.contiguous()}


def _write_pairs(base: str, gate_up: Factors, down: Factors, model_class: ModelClass) -> dict[str, torch.Tensor]:
    """Return the tensors of each expert. base: the name of the module of the experts."""
    (shared, both), (down_first, down_second) = gate_up, down
    half = both.shape[1] // 2
    gate, up = (both[:, ::2], both[:, 1::2]) if model_class.is_interleaved else (both[:, :half], both[:, half:])
    written: dict[str, torch.Tensor] = {}
    for name, first, second in zip(
        model_class.names, (shared, shared, down_first), (gate, up, down_second), strict=True
    ):
        for expert in range(len(first)):
            # copies: a safetensors file has no two names for the same memory
            written |= _name_pair(f"{base}.{expert}.{name}", first[expert].clone(), second[expert].clone())
    return written


def _add_patterns(
    patterns: dict[str, dict[str, Any]], adapter: StackAdapter, fields: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Add the ranks and scales of a layer's experts that are not those which the engine would read for the names of
    pairs. They come first: a key for another module ("gate_proj", of dense layers) may match such a name too."""
    module = f"{adapter.layer}{adapter.experts}"
    for key, value, usual in (
        ("rank_pattern", adapter.rank, fields["r"]),
        ("alpha_pattern", adapter.alpha, fields["lora_alpha"]),
    ):
        wrong = [name for name in names if find_pattern(patterns[key], f"{module}.0.{name}", usual) != value]
        patterns[key] = {rf"{re.escape(module)}\.\d+\.{name}": value for name in wrong} | patterns[key]


def find_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Return the value of the first key that matches a module, as peft and vLLM read `rank_pattern` and
    `alpha_pattern`: at the end of its name, after a dot. usual: what is returned if none does."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def _escape_block(pattern: str, model_class: ModelClass) -> str:
    return re.sub(r"(?<![\w])mlp(\\?\.)", rf"{model_class.hub_block}\g<1>", pattern)


def _name_both_stacks(fields: Mapping[str, Any]) -> list[str] | None:
    """Return `target_parameters` with both matrices of the experts where it has one; a name may be that of one
    layer."""
    named = fields.get("target_parameters") or ()
    stacks = [name for name in named if name.rpartition(".")[2] in STACKS]
    both = {name.removesuffix(name.rpartition(".")[2]) + stack for name in stacks for stack in STACKS}
    return [*(name for name in named if name not in stacks), *sorted(both)] or None
