"""From the config of another trainer to one of ours."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from errors import UserError
from training.migration import axolotl, llama_factory, ms_swift, paddlenlp, trl
from training.migration.draft import Draft, Rule
from training.migration.explain import explain

PROJECTS: dict[str, ModuleType] = {
    "llama-factory": llama_factory, "axolotl": axolotl, "trl": trl, "ms-swift": ms_swift, "paddlenlp": paddlenlp,
}  # fmt: skip
# Keys that only one of them has; the first project of which one is there.
SIGNS: dict[str, set[str]] = {
    "axolotl": {"base_model", "sequence_len", "micro_batch_size"},
    "paddlenlp": {"pipeline_parallel_degree", "tensor_parallel_degree", "dataset_name_or_path", "train_dataset_path",
                  "unified_checkpoint", "fp16_opt_level"},
    "llama-factory": {"finetuning_type", "cutoff_len", "stage", "lora_target"},
    "ms-swift": {"train_type", "tuner_type", "sft_type", "rlhf_type", "split_dataset_ratio", "quant_bits", "model"},
    "trl": {"use_peft", "dataset_name", "lora_target_modules", "max_length", "packing"},
}  # fmt: skip
PROGRAMS = {"swift": "ms-swift", "megatron": "ms-swift", "llamafactory-cli": "llama-factory"}
COMMAND = re.compile(r"^\s*(?:[A-Za-z_]\w*=\S*\s+)*(swift|trl|llamafactory-cli|megatron)\s+(\w+)\s+(.*)$", re.M)
EXPECTED = "give a config in YAML or JSON, or a script with the command of swift, trl, llamafactory-cli or megatron"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


_NOT_UNDERSTOOD = (TypeError, ValueError, AttributeError, LookupError)  # by a rule: a value of another kind


@dataclass(frozen=True)
class Imported:
    """groups, keys: as in `Draft`. left: key of theirs -> what takes its place here, in words."""

    project: str
    groups: Mapping[str, str]
    keys: Mapping[str, Any]
    left: Mapping[str, str]

    def list_overrides(self) -> Iterator[str]:
        """Yield what a command line of ours would say."""
        yield from (f"{group}={choice}" for group, choice in self.groups.items())
        yield from (f"{key}={json.dumps(value)}" for key, value in self.keys.items())

    def render(self, chosen: str, source: str) -> str:
        """Return the text of a config. chosen: the words of a command that choose it, such as "-cn mine". source: the
        name of their file."""
        lines = [
            f"# deepspeed trainer_base_ds_mp.py {chosen}",
            f"# Made of {source} ({self.project}) by scripts/import_config.py.",
        ]
        if self.left:
            lines.append("# Not carried over, and what takes its place:")
            lines += [f"#   {key}: {why}" for key, why in self.left.items()]
        overrides = [f"  - override {group}: {choice}" for group, choice in self.groups.items()]
        nested: dict[str, Any] = {}
        for key, value in self.keys.items():
            *above, last = key.split(".")
            place = nested
            for part in above:
                place = place.setdefault(part, {})
            place[last] = value
        body = yaml.safe_dump(nested, sort_keys=False, default_flow_style=None, width=110)
        return "\n".join([*lines, "defaults:", "  - base", *overrides, "  - _self_", "", body])


def import_config(file: Path, project: str | None = None) -> Imported:
    """Read the config of another trainer: YAML, JSON, or a script with its command. project: a name of PROJECTS; None
    finds it by the keys. Raises UserError for a file that is none of these."""
    their, command, program = read_theirs(file)
    found = project or PROGRAMS.get(program, program) or find_project(their)
    if found not in PROJECTS:
        raise UserError(f"{file}: none of {', '.join(PROJECTS)} has these keys; name the project with --project")
    module = PROJECTS[found]
    draft = Draft(their, keys=dict(module.DEFAULTS))
    for key, value in their.items():
        if rule := module.RULES.get(key):
            _apply(rule, draft, key, value)
        else:
            draft.leave(str(key))
    try:
        module.finish(draft, file.parent, command)
    except _NOT_UNDERSTOOD as error:
        raise UserError(
            f"{file}: what it says of its task, data or batch is not understood ({type(error).__name__}: {error}); "
            "remove those keys there, and give ours"
        ) from None
    if "adapter" not in draft.groups:
        draft.drop(*[key for key in draft.keys if key.startswith("adapter.")])
    draft.keys.setdefault("output_dir", f"outputs/{file.stem}")
    left = {key: why or explain(key, module.HEADINGS) for key, why in draft.left.items()}
    return Imported(found, draft.groups, draft.keys, left)


def _apply(rule: Rule, draft: Draft, key: str, value: Any) -> None:
    """Apply a rule. A value of a kind that it does not know leaves the key."""
    try:
        rule(draft, key, value)
    except _NOT_UNDERSTOOD:
        draft.leave(key, f"its value, {value!r}, is none that is known here")


def write_config(imported: Imported, folder: str) -> list[str]:
    """Write the imported config into a folder, and return the words of a command line that choose it."""
    (Path(folder) / "imported.yaml").write_text(imported.render("-cn imported", "theirs"))
    return ["--config-dir", folder, "-cn", "imported"]


def take_layout(imported: Imported, overrides: Sequence[str]) -> Imported:
    """Return the imported config at another layout, of the same global batch. overrides: as `plan=search` says them."""
    layout = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in overrides)}
    batch = {"gradient_accumulation_steps", "micro_batch_size", "global_batch_size"}
    kept = {key: value for key, value in imported.keys.items() if not (batch & layout.keys() and key in batch)}
    return replace(imported, keys=kept | layout)


def find_project(their: Mapping[str, Any]) -> str | None:
    """Return the project whose keys these are, None if there is none."""
    return next((name for name, signs in SIGNS.items() if signs & their.keys()), None)


def read_theirs(file: Path) -> tuple[dict[str, Any], str, str]:
    """Return (keys and values, the command after the program's name, the program) of a file; the last two are empty
    where it is not a script. Raises UserError."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    try:
        text = file.read_text(encoding="utf-8")
        if match := COMMAND.search(re.sub(r"\\\s*\n", " ", text)):
            program, command, arguments = match.groups()
            words = split_words(arguments)
            given = parse_arguments(words)
            given.pop("config", None)
            return read_named(file, words) | given, command, program
        their = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a file that is not text, or a quotation mark without its pair, too
        raise UserError(f"{file} cannot be read: {_describe(error)}; {EXPECTED}") from None
    if not isinstance(their, dict):
        raise UserError(f"{file} holds no keys with values; {EXPECTED}")
    return {key: convert(value) for key, value in their.items()}, "", ""


def split_words(arguments: str) -> list[str]:
    """Return the words of a shell's command line, up to a comment. Raises ValueError for a quotation mark without its
    pair."""
    try:
        words = shlex.split(arguments)
    except ValueError:  # in a comment; `comments` would take `NAME#COUNT` for the begin of one
        words = shlex.split(arguments, comments=True)
    return list(takewhile(lambda word: not word.startswith("#"), words))


def read_named(script: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of the config that a command in a script names: its first word, or `--config`. Raises
    UserError for a file that does not exist."""
    words = [part for word in words for part in word.split("=", 1)]
    named = words[0] if words and not words[0].startswith("--") else None
    if "--config" in words[:-1]:
        named = words[words.index("--config") + 1]
    if named is None:
        return {}
    found = [place for place in (Path(named), script.parent / named) if place.is_file()]
    if not found:
        raise UserError(
            f"{script}: its command reads {named}, which is not there; give that file in place of the script"
        )
    return read_theirs(found[0])[0]


def _describe(error: Exception) -> str:
    """Return an error in one line, with the line of the file where it is known."""
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return said if mark is None else f"line {mark.line + 1}: {said}"


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Return `--key value` words as keys and values; several values become a list, and none a switch."""
    found: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            found[key] = [value] if equals else []
        elif key is not None:
            found[key].append(word)
    return {
        key: convert(values[0]) if len(values) == 1 else [convert(value) for value in values] if values else True
        for key, values in found.items()
    }


def convert(value: Any) -> Any:
    """Return a text that is a number or a truth value as one: YAML 1.1 reads 1e-4 as text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if NUMBER.fullmatch(value):
        return int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)
    return value
