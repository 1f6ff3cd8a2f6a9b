"""Say what an engine's loader makes of a peft folder: which keys it takes, in which orientation and shape, what it
refuses, and what it would load wrongly or not at all without a message. This follows from the tables of
`models/adapters/engines.py` and the header of the file; no tensor is loaded.

E experts, r the rank of an adapter, H the hidden size, I an expert's intermediate size.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from models.adapters.engines import (
    GATE_UP,
    MODEL_CLASSES,
    PATTERNS,
    PEFT_PREFIX,
    STACKS,
    Engine,
    Form,
    ModelClass,
    find_engine,
    to_hub_name,
)
from models.adapters.folder import ADAPTER_WEIGHTS, DEFAULT_RANK
from models.adapters.stacks import has_exchanged

Shape = tuple[int, ...]
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_IN_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<path>.+)")
_ANYWHERE = re.compile(r"layers\.(?P<layer>\d+)\.(?P<path>.+)")
_EXPERT = re.compile(r"(?<!shared_)experts\.(?P<number>\d+)\.")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of config.json, of the number of experts
# Modules, by the last part of their names, whose inputs are of the hidden size, and those whose outputs are
_FROM_HIDDEN = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "gate_proj",
    "up_proj",
    "gate",
    "router",
)
_TO_HIDDEN = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Finding:
    """One key of the folder, or one field of its config.

    name: of the key, or "adapter_config.json: r". shape: of a key that is there. orientation: what its dimensions are,
    of a key that is taken. problem: "" if the loader takes it, otherwise "refused" (the loader ends with an error),
    "dropped" (it is left out, perhaps with a warning), "missing", "misnamed", "transposed" or "wrong shape". reason: of
    a problem.
    """

    name: str
    shape: Shape = ()
    orientation: str = ""
    problem: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Dimensions:
    """The sizes of the base model, by its config.json: its layers, its hidden size, the experts of a layer, and an
    expert's intermediate size."""

    layers: int
    hidden: int
    experts: int
    width: int


def read_dimensions(config: Mapping[str, Any]) -> Dimensions | None:
    """config: the fields of a base model's config.json, or of the part of it that is a text model. None where it has no
    experts, or one of the sizes is not a whole number from 1."""
    count = next((config[key] for key in _COUNTS if config.get(key)), None)
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    sizes: list[Any] = [config.get("num_hidden_layers"), config.get("hidden_size"), count, width]
    if not all(type(size) is int and size > 0 for size in sizes):
        return None
    return Dimensions(*sizes)


def check_adapter(
    shapes: Mapping[str, Shape],
    fields: Mapping[str, Any],
    engine_name: str,
    class_name: str,
    dimensions: Dimensions,
    release: str | None = None,
) -> list[Finding]:
    """Return a finding for each key and for each field of the config that the engine refuses.

    shapes: of the tensors, by their names in the folder. fields: of adapter_config.json, which `check_fields`
    (`models/adapters/folder.py`) has accepted. release: of the engine. Raises UserError for a release that the table is
    not of.
    """
    engine, model_class = find_engine(engine_name, release), MODEL_CLASSES[class_name]
    check = _Check(shapes, fields, engine_name, engine, model_class, engine.forms[class_name], dimensions)
    return [*check.check_fields(), *check.check_keys(), *check.find_missing(), *check.find_empty()]


def find_rank(fields: Mapping[str, Any]) -> int:
    """Return the largest rank of the adapter."""
    return max(_list_ranks(fields))


def _list_ranks(fields: Mapping[str, Any]) -> set[int]:
    return {fields.get("r", DEFAULT_RANK), *(fields.get("rank_pattern") or {}).values()}


def find_limit(rank: int, engine: Engine) -> int | None:
    """Return the value that the engine's limit of ranks needs for this rank; None if the default is enough, or if there
    is no limit or none large enough."""
    if engine.default_rank is None or rank <= engine.default_rank:
        return None
    return next((limit for limit in engine.ranks if limit >= rank), None)


@dataclass(frozen=True)
class _Check:
    shapes: Mapping[str, Shape]
    fields: Mapping[str, Any]
    name: str
    engine: Engine
    model_class: ModelClass
    form: Form
    dimensions: Dimensions

    def check_fields(self) -> Iterator[Finding]:
        """Yield the fields of the config that the engine refuses, or does not read where it should."""
        fields, engine = self.fields, self.engine
        if self.name != "peft":
            for key in ("r", "lora_alpha"):
                if key not in fields:
                    yield _refuse(key, "it has no default", "missing")
        if fields.get("use_dora") and self.name != "peft":
            yield _refuse("use_dora", f"{self.name} does not load DoRA")
        if engine.ranks and find_rank(fields) > engine.ranks[-1]:
            yield _refuse("r", f"rank {find_rank(fields)} is above its largest limit, {engine.ranks[-1]}")
        saved = set(fields.get("modules_to_save") or ())
        if engine.saved is not None and (others := sorted(saved - set(engine.saved))):
            yield _refuse("modules_to_save", f"{', '.join(others)}: not loaded", self._name_unknown(""))
        init = fields.get("init_lora_weights")
        if engine.inits is not None and isinstance(init, str) and init.lower() not in engine.inits:
            yield _refuse("init_lora_weights", f"{init} changes the base weights")
        if fields.get("bias", "none") != "none" and self.name == "vllm":
            yield _refuse("bias", "biases are not loaded")
        for key in engine.unread:
            if fields.get(key):
                yield _refuse(key, "not supported")
        if self.name != "peft" and not isinstance(fields.get("target_modules"), list):
            yield _refuse("target_modules", "it has to be a list of names")
        if not engine.reads_patterns:
            for key in ("use_rslora", *PATTERNS):
                if fields.get(key):
                    yield _refuse(key, "not read: every module gets the scale lora_alpha / r", "dropped")

    def check_keys(self) -> Iterator[Finding]:
        """Yield the finding of each key that is there."""
        for name, shape in sorted(self.shapes.items(), key=lambda item: _sort_numbers(item[0])):
            yield self._check_key(name, tuple(shape))

    def find_missing(self) -> Iterator[Finding]:
        """Yield the keys that the loader needs next to those that are there."""
        found = {(layer, path, side) for layer, path, side in map(self._find_place, self.shapes) if path}
        modules = {(layer, path) for layer, path, _ in found}
        needed = set(modules)
        for layer, path in modules:
            parent, _, leaf = path.rpartition(".")
            if path in self._experts:
                needed |= {(layer, expert) for expert in self._experts}
            for group in self.engine.together:
                if leaf in group:
                    needed |= {(layer, f"{parent}.{other}") for other in group}
        for layer, path in sorted(needed, key=lambda place: (place[0], _sort_numbers(place[1]))):
            for side in "AB":
                if (layer, path, side) not in found:
                    name = f"{PEFT_PREFIX}model.layers.{layer}.{path}.lora_{side}.weight"
                    yield Finding(name, problem="missing", reason=self._explain_missing(path))

    def find_empty(self) -> Iterator[Finding]:
        """Yield the file of weights if it has no adapter, so that nothing of it would be served."""
        if not any(map(_KEY.fullmatch, self.shapes)):
            yield Finding(ADAPTER_WEIGHTS, problem="missing", reason="the file has neither A nor B of any adapter")

    def _explain_missing(self, path: str) -> str:
        if path not in self._experts:
            return "the loader needs both matrices, and of a fused projection all parts"
        if self.name == "sglang":
            return "the expert's matrix would be served without its adapter"
        return "an adapter of one expert or matrix needs those of all in its layer"

    def _find_place(self, name: str) -> tuple[int, str, str]:
        """Return the layer of a key, the module in it that the engine would load it for, and its side, "A" or "B". The
        module is "" for a key that the engine would load for none of those that take adapters."""
        key = _KEY.fullmatch(name)
        if key is None or (self.name == "peft" and not name.startswith(PEFT_PREFIX)):
            return -1, "", ""
        module = key["module"].removeprefix(PEFT_PREFIX)
        place = _IN_LAYER.fullmatch(module) if self.engine.reads_paths else _ANYWHERE.search(module)
        if place is None or int(place["layer"]) >= self.dimensions.layers:
            return -1, "", key["side"]
        path = place["path"] if self.engine.reads_paths else self._find_by_leaf(place["path"])
        known = path in self._experts or path in self._projections
        return int(place["layer"]), path if known else "", key["side"]

    def _find_by_leaf(self, path: str) -> str:
        """Return the module that an engine knows by the number of the expert and the last part of the name."""
        leaf = path.rpartition(".")[2]
        if (expert := _EXPERT.search(path)) is not None:
            leaf = dict(zip(("gate_proj", "up_proj", "down_proj"), self.model_class.names, strict=True)).get(leaf, leaf)
            return self._rename(f"mlp.experts.{expert['number']}.{leaf}")
        same = [known for known in self._projections if known.rpartition(".")[2] == leaf]
        return path if path in same else min(same, default="")

    def _check_key(self, name: str, shape: Shape) -> Finding:
        if _KEY.fullmatch(name) is None:
            return self._check_other(name, shape)
        _, path, side = self._find_place(name)
        if path in self._experts:
            return self._check_expert(name, shape, path, side)
        if path:
            return self._check_projection(name, shape, path, side)
        return self._check_misnamed(name, shape)

    def _check_other(self, name: str, shape: Shape) -> Finding:
        """Return the finding for a tensor that is neither A nor B of an adapter."""
        saved = set(self.fields.get("modules_to_save") or ())
        module = name.removeprefix(PEFT_PREFIX).rpartition(".")[0]
        if module.rpartition(".")[2] in saved & set(saved if self.engine.saved is None else self.engine.saved):
            return Finding(name, shape, "whole weight")
        if self.name == "peft" and self.fields.get("use_dora") and "lora_magnitude_vector" in name:
            return Finding(name, shape, "DoRA's lengths")
        return Finding(name, shape, problem=self._name_unknown(name), reason="neither A nor B of an adapter")

    def _check_misnamed(self, name: str, shape: Shape) -> Finding:
        """Return the finding for an adapter of a module that the engine's model does not have."""
        module, problem = name.partition(".lora_")[0], self._name_unknown(name)
        leaf = module.rpartition(".")[2]
        if module.endswith((".experts", ".experts.base_layer")) and self.form is Form.pairs:
            reason = "experts in peft's stacked form, and the engine takes one pair for each"
        elif _EXPERT.search(module) and self.form is Form.stacked:
            reason = f"one pair for each expert, and {self.name} takes those of this class stacked"
        elif leaf in {path.rpartition(".")[2] for path in (*self._projections, *self._experts)}:
            problem, reason = "misnamed", "the model has no module of this name"
        else:
            reason = f"'{leaf}' is not a module that takes adapters"
        return Finding(name, shape, problem=problem, reason=reason)

    def _check_projection(self, name: str, shape: Shape, path: str, side: str) -> Finding:
        """Return the finding for a matrix of another module. Its other dimension is compared where it is the hidden
        size; those that depend on heads, and an MLP's own, are not."""
        known = _FROM_HIDDEN if side == "A" else _TO_HIDDEN
        size = self.dimensions.hidden if path.rpartition(".")[2] in known else None
        orientation, rank_first = ("[r, in]", shape) if side == "A" else ("[out, r]", shape[::-1])
        if self._fits(rank_first, size):
            return Finding(name, shape, orientation)
        if self._fits(rank_first[::-1], size):
            return Finding(name, shape, problem="transposed", reason=f"it has to be {orientation}")
        reason = f"{orientation}, with r in {sorted(self._ranks)}" + (f" and the hidden size {size}" if size else "")
        return Finding(name, shape, problem="wrong shape", reason=reason)

    def _fits(self, shape: Shape, size: int | None) -> bool:
        """Return whether the shape is [r, size], or [r, any] without a size."""
        return len(shape) == 2 and shape[0] in self._ranks and size in (None, shape[1])

    def _check_expert(self, name: str, shape: Shape, path: str, side: str) -> Finding:
        """Return the finding for a pair of the experts, whose shape the base model determines."""
        inputs, outputs = self._find_expert_dims(path)
        totals = [rank * (self.dimensions.experts if self.form is Form.stacked else 1) for rank in sorted(self._ranks)]
        rows = "E r" if self.form is Form.stacked else "r"
        orientation = f"[{rows}, in]" if side == "A" else f"[out, {rows}]"
        right = [(total, inputs) if side == "A" else (outputs, total) for total in totals]
        exchanged = [(total, outputs) if side == "A" else (inputs, total) for total in totals]
        reason = f"it has to be {orientation}, {' or '.join(str(list(each)) for each in right)}"
        if shape in right and not self._is_from_older_peft(inputs, outputs):
            return Finding(name, shape, orientation)
        if shape in exchanged:
            older = ", not as peft before 0.19.1 wrote it" if self.form is Form.stacked else ""
            return Finding(name, shape, problem="transposed", reason=f"{reason}{older}")
        problem = "transposed" if shape[::-1] in right else "wrong shape"
        return Finding(name, shape, problem=problem, reason=reason)

    def _is_from_older_peft(self, inputs: int, outputs: int) -> bool:
        """Return whether the folder's peft has exchanged A and B of a square matrix, which shapes do not tell."""
        if self.form is Form.pairs or inputs != outputs:
            return False
        return has_exchanged(self.fields.get("peft_version"), self.model_class.is_transposed)

    def _find_expert_dims(self, path: str) -> tuple[int, int]:
        """Return the inputs and outputs of a module of `_experts`."""
        hidden, width = self.dimensions.hidden, self.dimensions.width
        if self.form is Form.stacked:
            is_gate_up = path.endswith(".base_layer") or self._single == GATE_UP
            return (hidden, 2 * width) if is_gate_up else (width, hidden)
        return (width, hidden) if path.endswith(f".{self.model_class.names[2]}") else (hidden, width)

    def _name_unknown(self, name: str) -> str:
        """Return what the loader does with a tensor that it does not know: vLLM ends with an error, peft leaves it out,
        SGLang either, depending on whether it is in a layer."""
        return "refused" if self.name == "vllm" or (self.name == "sglang" and ".layers." in name) else "dropped"

    @cached_property
    def _ranks(self) -> set[int]:
        return _list_ranks(self.fields)

    @cached_property
    def _experts(self) -> set[str]:
        """The names in a layer of the modules of its experts that have adapters."""
        if self.form is Form.stacked:
            names = ("mlp.experts",) if self._single else ("mlp.experts.base_layer", "mlp.experts")
            return set(map(self._rename, names))
        numbers = range(self.dimensions.experts)
        return {self._rename(f"mlp.experts.{number}.{name}") for number in numbers for name in self.model_class.names}

    @cached_property
    def _single(self) -> str:
        """The only one of a layer's two stacks that peft puts an adapter on, which then has the name "experts" of
        either; "" where it is both, and for engines that need both."""
        named = {name.rpartition(".")[2] for name in self.fields.get("target_parameters") or ()} & set(STACKS)
        return named.pop() if self.name == "peft" and len(named) == 1 else ""

    @cached_property
    def _projections(self) -> set[str]:
        """The names in a layer of the other modules that take adapters."""
        routers = (self.model_class.router,) if self.engine.takes_router else ()
        return {self._rename(path) for path in (*self.model_class.projections, *routers)}

    def _rename(self, path: str) -> str:
        if not self.engine.in_hub_names:
            return path
        return to_hub_name(f".layers.0.{path}", self.model_class).removeprefix(".layers.0.")


def _refuse(field: str, reason: str, problem: str = "refused") -> Finding:
    return Finding(f"adapter_config.json: {field}", problem=problem, reason=reason)


def _sort_numbers(name: str) -> list[tuple[bool, int, str]]:
    """A key by which "layers.10" comes after "layers.9"."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def describe_findings(findings: Sequence[Finding]) -> list[str]:
    """Return lines that show the findings, keys alike but for the numbers of layers and experts in one."""
    groups: dict[tuple[str, Shape, str, str, str], list[Finding]] = defaultdict(list)
    for found in findings:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", found.name)
        groups[pattern, found.shape, found.orientation, found.problem, found.reason].append(found)
    lines = []
    for (pattern, shape, orientation, problem, reason), members in groups.items():
        name = members[0].name if len(members) == 1 else f"{pattern} ({len(members)} keys)"
        size = f" {list(shape)}" if shape else ""
        lines.append(f"{problem or 'taken'}: {name}{size} {orientation or reason}".rstrip())
    return lines


def count_problems(findings: Sequence[Finding]) -> Counter[str]:
    """Return how many keys and fields have each problem."""
    return Counter(found.problem for found in findings if found.problem)
