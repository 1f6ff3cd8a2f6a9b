"""What an engine's loader makes of a peft folder: which keys it takes, in which orientation and shape, what it refuses,
and what it would load wrongly or not at all without a message. Read from the tables of `models/adapters/engines.py` and
the header of the file; no tensor is loaded.

E experts, r the rank of an adapter, H the hidden size, I an expert's intermediate size.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.adapters.engines import (
    MODEL_CLASSES,
    PEFT_PREFIX,
    Engine,
    Form,
    ModelClass,
    find_engine,
    to_hub_name,
)
from models.adapters.stacks import is_exchanged

Shape = tuple[int, ...]
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of config.json, of the number of experts
_IN_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<path>.+)")


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
    """Of the base model, from its config.json."""

    layers: int
    hidden: int
    experts: int
    width: int


def read_dimensions(config: Mapping[str, Any]) -> Dimensions | None:
    """config: the fields of a base model's config.json, or of the part of it that is a text model. None where it has no
    experts."""
    count = next((config[key] for key in _COUNTS if config.get(key)), None)
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if count is None or width is None:
        return None
    return Dimensions(config["num_hidden_layers"], config["hidden_size"], count, width)


def check_adapter(
    shapes: Mapping[str, Shape],
    fields: Mapping[str, Any],
    engine_name: str,
    class_name: str,
    dimensions: Dimensions,
    release: str | None = None,
) -> list[Finding]:
    """Return a finding for each key and for each field of the config that the engine refuses.

    shapes: of the tensors, by their names in the folder. fields: of adapter_config.json. release: of the engine.
    Raises UserError for a release that the table is not of.
    """
    engine, model_class = find_engine(engine_name, release), MODEL_CLASSES[class_name]
    check = _Check(shapes, fields, engine_name, engine, model_class, engine.forms[class_name], dimensions)
    return [*check.check_fields(), *check.check_keys(), *check.find_missing()]


def find_rank(fields: Mapping[str, Any]) -> int:
    """Return the largest rank of the adapter."""
    return max([fields["r"], *(fields.get("rank_pattern") or {}).values()])


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
        if fields.get("use_dora") and self.name != "peft":
            yield _refuse("use_dora", f"{self.name} does not load DoRA")
        if engine.ranks and find_rank(fields) > engine.ranks[-1]:
            yield _refuse("r", f"rank {find_rank(fields)} is above its largest limit, {engine.ranks[-1]}")
        saved = set(fields.get("modules_to_save") or ())
        if engine.saved is not None and (others := sorted(saved - set(engine.saved))):
            problem = "refused" if self.name == "vllm" else "dropped"
            yield _refuse("modules_to_save", f"{', '.join(others)}: not loaded", problem)
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
            for key in ("use_rslora", "rank_pattern", "alpha_pattern"):
                if fields.get(key):
                    yield _refuse(key, "not read: every module gets the scale lora_alpha / r", "dropped")

    def check_keys(self) -> Iterator[Finding]:
        for name, shape in sorted(self.shapes.items(), key=lambda item: _sort_numbers(item[0])):
            yield self._check_key(name, tuple(shape))

    def find_missing(self) -> Iterator[Finding]:
        """Yield the keys that the loader needs next to those that are there."""
        names, layers = set(self.shapes), self._list_layers()
        needed: set[str] = set()
        for layer, paths in layers.items():
            prefix = f"{PEFT_PREFIX}model.layers.{layer}."
            if any(self._is_expert(path) for path in paths):
                needed |= {prefix + path for path in self._list_expert_modules()}
            for group in self.engine.together:
                parents = {path.rpartition(".")[0] for path in paths if path.rpartition(".")[2] in group}
                needed |= {f"{prefix}{parent}.{leaf}" for parent in parents for leaf in group}
            needed |= {prefix + path for path in paths if path in self._list_projections()}
        for module in sorted(needed, key=_sort_numbers):
            for side in "AB":
                if (name := f"{module}.lora_{side}.weight") not in names:
                    yield Finding(name, problem="missing", reason=self._explain_missing(module))

    def _explain_missing(self, module: str) -> str:
        if self._is_expert(module.partition("model.layers.")[2].partition(".")[2]):
            if self.name == "sglang":
                return "the expert's matrix would be served without its adapter"
            return "an adapter of one expert or matrix needs those of all in its layer"
        return "the loader needs both matrices, and of a fused projection all parts"

    def _check_key(self, name: str, shape: Shape) -> Finding:
        key = _KEY.fullmatch(name.removeprefix(PEFT_PREFIX))
        if key is None:
            return self._check_other(name, shape)
        place = _IN_LAYER.fullmatch(key["module"])
        path = "" if place is None else place["path"]
        if name.startswith(PEFT_PREFIX) and place is not None and int(place["layer"]) < self.dimensions.layers:
            if path in self._expert_modules:
                return self._check_expert(name, shape, key["module"], key["side"])
            if path in self._list_projections():
                return self._check_projection(name, shape, key["side"])
        return self._check_misnamed(name, shape, key["module"])

    def _check_other(self, name: str, shape: Shape) -> Finding:
        """Return the finding for a tensor that is neither A nor B of an adapter."""
        saved = set(self.fields.get("modules_to_save") or ())
        module = name.removeprefix(PEFT_PREFIX).rpartition(".")[0]
        if module.rpartition(".")[2] in saved & set(self.engine.saved if self.engine.saved is not None else saved):
            return Finding(name, shape, "whole weight")
        if self.name == "peft" and self.fields.get("use_dora") and "lora_magnitude_vector" in name:
            return Finding(name, shape, "DoRA's lengths")
        problem = "refused" if self.name == "vllm" else "dropped"
        return Finding(name, shape, problem=problem, reason="neither A nor B of an adapter")

    def _check_misnamed(self, name: str, shape: Shape, module: str) -> Finding:
        """Return the finding for an adapter of a module that the engine's model does not have."""
        leaf = module.rpartition(".")[2]
        if ".experts" in f".{module}" and self.form is Form.pairs and ".experts." not in f"{module}.".replace(
            ".experts.base_layer.", "."
        ):
            reason = "stacked experts, and the engine takes one pair for each expert"
            dropped = self.name == "sglang" or module.endswith("base_layer")
            return Finding(name, shape, problem="dropped" if dropped else "refused", reason=reason)
        if ".experts." in f".{module}." and self.form is Form.stacked and re.search(r"\.experts\.\d+\.", module):
            problem = "dropped" if self.name == "peft" else "refused"
            reason = f"one pair for each expert, and {self.name} takes all experts of this class stacked"
            return Finding(name, shape, problem=problem, reason=reason)
        known = {path.rpartition(".")[2] for path in self._list_projections()}
        if leaf in known:
            silent = " (loaded by no module, without a message)" if self.name == "vllm" else ""
            return Finding(name, shape, problem="misnamed", reason=f"the model has no module of this name{silent}")
        if self.name == "vllm" and leaf != "base_layer":
            return Finding(name, shape, problem="refused", reason=f"'{leaf}' is not a module that takes adapters")
        return Finding(name, shape, problem="dropped", reason=f"'{leaf}' is not a module that takes adapters")

    def _check_projection(self, name: str, shape: Shape, side: str) -> Finding:
        ranks = {self.fields["r"], *(self.fields.get("rank_pattern") or {}).values()}
        orientation = "[r, in]" if side == "A" else "[out, r]"
        dim = 0 if side == "A" else 1
        if len(shape) == 2 and shape[dim] in ranks:
            return Finding(name, shape, orientation)
        if len(shape) == 2 and shape[1 - dim] in ranks:
            return Finding(name, shape, problem="transposed", reason=f"it has to be {orientation}")
        return Finding(name, shape, problem="wrong shape", reason=f"{orientation}, with r in {sorted(ranks)}")

    def _check_expert(self, name: str, shape: Shape, module: str, side: str) -> Finding:
        """Return the finding for a pair of the experts, whose shape the base model determines."""
        is_down, (inputs, outputs) = self._find_expert_dims(module)
        stacked = self.form is Form.stacked
        total = "E r" if stacked else "r"
        inner, outer = ("I", "H") if is_down else ("H", "2I" if stacked else "I")
        orientation = f"[{total}, in={inner}]" if side == "A" else f"[out={outer}, {total}]"
        ranks = {self.fields["r"], *(self.fields.get("rank_pattern") or {}).values()}
        totals = {rank * (self.dimensions.experts if stacked else 1) for rank in ranks}
        found, size = ((shape[0], shape[1:]) if side == "A" else (shape[-1], shape[:-1])) if shape else (0, ())
        right, wrong = ((inputs,), (outputs,)) if side == "A" else ((outputs,), (inputs,))
        if found in totals and size == right and not self._is_from_older_peft(name, shape, side, found, module):
            return Finding(name, shape, orientation)
        reason = f"it has to be {orientation} = {self._describe(side, totals, inputs, outputs)}"
        if found in totals and size in (right, wrong):
            older = ", as peft before 0.19.1 wrote it" if stacked else ""
            return Finding(name, shape, problem="transposed", reason=f"{reason}{older}")
        if tuple(reversed(shape)) in {(total, *right) if side == "A" else (*right, total) for total in totals}:
            return Finding(name, shape, problem="transposed", reason=reason)
        return Finding(name, shape, problem="wrong shape", reason=reason)

    def _is_from_older_peft(self, name: str, shape: Shape, side: str, total: int, module: str) -> bool:
        """Return whether the file's peft has exchanged A and B of square matrices, which shapes do not tell."""
        if self.form is Form.pairs:
            return False
        _, (inputs, outputs) = self._find_expert_dims(module)
        first, second = (total, outputs), (inputs, total)
        version = self.fields.get("peft_version")
        square = ((total, inputs), (outputs, total))
        return is_exchanged(first, second, square, version, self.model_class.is_transposed) and inputs == outputs

    def _find_expert_dims(self, module: str) -> tuple[bool, tuple[int, int]]:
        """Return whether the module is a down projection, and its inputs and outputs."""
        hidden, width = self.dimensions.hidden, self.dimensions.width
        if self.form is Form.stacked:
            is_down = not module.endswith(".base_layer")
            return is_down, (width, hidden) if is_down else (hidden, 2 * width)
        is_down = module.rpartition(".")[2] == self.model_class.names[2]
        return is_down, (width, hidden) if is_down else (hidden, width)

    def _describe(self, side: str, totals: Iterable[int], inputs: int, outputs: int) -> str:
        total = "/".join(map(str, sorted(totals)))
        return f"[{total}, {inputs}]" if side == "A" else f"[{outputs}, {total}]"

    @property
    def _expert_modules(self) -> set[str]:
        return set(self._list_expert_modules())

    def _list_expert_modules(self) -> list[str]:
        """Return the names in a layer of the modules of its experts that have adapters."""
        if self.form is Form.stacked:
            return [self._rename("mlp.experts.base_layer"), self._rename("mlp.experts")]
        return [
            self._rename(f"mlp.experts.{expert}.{name}")
            for expert in range(self.dimensions.experts)
            for name in self.model_class.names
        ]

    def _list_projections(self) -> set[str]:
        """Return the names in a layer of the other modules that take adapters."""
        routers = (self.model_class.router,) if self.engine.takes_router else ()
        return {self._rename(path) for path in (*self.model_class.projections, *routers)}

    def _rename(self, path: str) -> str:
        if not self.engine.in_hub_names:
            return path
        return to_hub_name(f".layers.0.{path}", self.model_class).removeprefix(".layers.0.")

    def _is_expert(self, path: str) -> bool:
        return f".{path}.".find(".experts.") >= 0 and path in self._expert_modules

    def _list_layers(self) -> dict[int, set[str]]:
        """Return the modules that have an adapter, by layer."""
        layers: dict[int, set[str]] = defaultdict(set)
        for name in self.shapes:
            key = _KEY.fullmatch(name.removeprefix(PEFT_PREFIX))
            place = _IN_LAYER.fullmatch(key["module"]) if key else None
            if place is not None and name.startswith(PEFT_PREFIX):
                layers[int(place["layer"])].add(place["path"])
        return layers


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
