"""A config of ours in the making, and the rules that write into it.

A rule takes the draft and the value of one key of the other trainer. README.md says in words what the rules do;
where a key has none, its row there says why (explain.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.adapters.options import starts_from_base

GROUPS = ("data", "adapter", "optimizer", "logger", "model")


@dataclass
class Draft:
    """groups: choice of each group. keys: dotted key -> value. left: key of theirs -> why it is not carried over; empty
    text: the page says it. their: what the other config holds. program: that of a script with a command, such as
    swift; empty for a file."""

    their: Mapping[str, Any]
    program: str = ""
    groups: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any) -> None:
        """Set a key, or choose a group."""
        if key in GROUPS and isinstance(value, str):
            self.groups[key] = value
        else:
            self.keys[key] = value

    def drop(self, *keys: str) -> None:
        for key in keys:
            self.keys.pop(key, None)

    def leave(self, key: str, why: str = "") -> None:
        """Note that a key of theirs is not carried over."""
        self.left[key] = why


# Why a template of theirs is left behind where preferences are learned
TEMPLATE_OF_PAIRS = (
    "lists of messages get the tokenizer's own chat template; a prompt and answers that are texts are trained as they "
    "stand, without a template: make them messages"
)
Rule = Callable[[Draft, str, Any], None]


def to(*keys: str) -> Rule:
    """The value of each of our keys is theirs."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        for ours in keys:
            draft.set(ours, value)

    return rule


def at_least_one(key: str) -> Rule:
    """A number that is off at 0 or below, as `max_steps: -1` is."""

    def rule(draft: Draft, theirs: str, value: Any) -> None:
        if value is not None and value > 0:
            draft.set(key, value)

    return rule


def when(choices: Mapping[Any, Mapping[str, Any]]) -> Rule:
    """Each of their values sets some of our keys. A value that is not listed is left."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not _is_hashable(value) or value not in choices:
            draft.leave(key, "")
            return
        for ours, chosen in choices[value].items():
            draft.set(ours, chosen)

    return rule


def if_true(**keys: Any) -> Rule:
    """A switch that sets some of our keys when it is on; a dot is written as two underscores."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value:
            for ours, chosen in keys.items():
                draft.set(ours.replace("__", "."), chosen)

    return rule


def unneeded(draft: Draft, key: str, value: Any) -> None:
    """A key that asks for what is always so here, or has no meaning here."""


def left(why: str = "") -> Rule:
    """A key without a counterpart. why: empty where README.md says it."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value not in (None, False, "", [], {}, 0):
            draft.leave(key, why)

    return rule


def usual(*values: Any, why: str = "") -> Rule:
    """A key whose usual values ask for what is always so here; any other is left. A list is usual where all of its
    words are. why: empty where README.md says it."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        words = value if isinstance(value, list) else [value]
        if not all(word is None or (_is_hashable(word) and word in values) for word in words):
            draft.leave(key, why)

    return rule


def read_list(value: Any) -> list[str]:
    """Return the words of a list, or of a text with commas."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else list(value or [])


def set_words(ours: str) -> Rule:
    """A list, or a text with commas."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if words := read_list(value):
            draft.set(ours, words)

    return rule


def set_targets(draft: Draft, key: str, value: Any) -> None:
    """The modules of an adapter: `all`, `all-linear`, names with commas, or a list."""
    words = read_list(value)
    if words:
        draft.set("adapter.target_modules", "all-linear" if words[0] in ("all", "all-linear") else words)


def set_init_weights(draft: Draft, key: str, value: Any) -> None:
    """peft's `init_lora_weights`, as far as it is one here."""
    if value in ("gaussian", "orthogonal") or starts_from_base(value):
        draft.set("adapter.init_lora_weights", value)
    elif str(value).lower() != "true":
        draft.leave(key, "adapter.init_lora_weights: true, gaussian, orthogonal, pissa, pissa_niter_16, olora")


def set_zero_stage(draft: Draft, key: str, value: Any) -> None:
    """The path of a DeepSpeed config, or ms-swift's name of one: the stage and the offload that its name states."""
    if isinstance(value, Mapping):
        zero = value.get("zero_optimization") or {}
        offloads = any((zero.get(f"offload_{what}") or {}).get("device") == "cpu" for what in ("optimizer", "param"))
        value = f"zero{zero.get('stage', 0)}{'_offload' if offloads else ''}"
    name = str(value).lower().rpartition("/")[2]
    stage = next((stage for stage in (3, 2) if re.search(f"z(ero_?)?{stage}|stage_?{stage}", name)), None)
    if stage is not None:
        draft.set("zero_stage", stage)
    if "offload" in name:
        # Optimizer state on the host is not for stage 3 here.
        draft.set(*(("offload_parameters", "cpu") if stage == 3 else ("offload_optimizer", "cpu")))
    if not name or (stage is None and not re.search(r"z(ero_?)?[01]|stage_?[01]", name)):
        draft.leave(key, f"zero_stage, offload_optimizer and precision as {value} has them")


def _is_hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)
