"""Makes a config of this project from one of another trainer (`__main__.py`). In this folder "theirs" is
the other trainer's, and "ours" is this project's."""

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
from extensions.import_config import axolotl, llama_factory, ms_swift, paddlenlp, trl
from extensions.import_config.draft import Draft, Rule
from extensions.import_config.explain import explain

# The name of a project -> its module. A module has RULES (their key -> `Rule`), DEFAULTS (our keys with the values
# that they have there by default), HEADINGS (its sections of README.md) and `finish`, which sets task and data.
PROJECTS: dict[str, ModuleType] = {
    "llama-factory": llama_factory, "axolotl": axolotl, "trl": trl, "ms-swift": ms_swift, "paddlenlp": paddlenlp,
}  # fmt: skip
# The keys by which a config is recognized: the first project here of which the config has at least one key. Some of the
# keys exist in several projects, so the order matters.
SIGNS: dict[str, set[str]] = {
    "axolotl": {"base_model", "sequence_len", "micro_batch_size"},
    "paddlenlp": {"pipeline_parallel_degree", "tensor_parallel_degree", "dataset_name_or_path", "train_dataset_path",
                  "unified_checkpoint", "fp16_opt_level"},
    "llama-factory": {"finetuning_type", "cutoff_len", "stage", "lora_target"},
    "ms-swift": {"train_type", "tuner_type", "sft_type", "rlhf_type", "split_dataset_ratio", "quant_bits", "model"},
    "trl": {"use_peft", "dataset_name", "lora_target_modules", "max_length", "packing"},
}  # fmt: skip
# The first word of a command -> the project. A program that is not listed, such as trl, has the name of its project.
PROGRAMS = {"swift": "ms-swift", "megatron": "ms-swift", "llamafactory-cli": "llama-factory"}
# A command in a script, on one line, after any NAME=VALUE settings of the shell: (program, command such as "sft",
# arguments)
COMMAND = re.compile(r"^\s*(?:[A-Za-z_]\w*=\S*\s+)*(swift|trl|llamafactory-cli|megatron)\s+(\w+)\s+(.*)$", re.M)
# The end of the messages about a file that cannot be read
EXPECTED = "give a config in YAML or JSON, or a script with the command of swift, trl, llamafactory-cli or megatron"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")  # a text that is read as a number, such as 1e-4


# The exceptions that a rule raises for a value of a type that it does not expect
_NOT_UNDERSTOOD = (TypeError, ValueError, AttributeError, LookupError)


@dataclass(frozen=True)
class Imported:
    """A config of this project that was made from one of another trainer."""

    project: str  # the other trainer, a name in `PROJECTS`
    groups: Mapping[str, str]  # config group of ours -> the choice, such as "data" -> "chat"
    keys: Mapping[str, Any]  # key of ours, with dots, -> its value
    left: Mapping[str, str]  # key of theirs that is not carried over -> what takes its place here, in words

    def list_overrides(self) -> Iterator[str]:
        """Yield the config as words of a command line of ours: GROUP=CHOICE, then KEY=VALUE with the value in JSON."""
        yield from (f"{group}={choice}" for group, choice in self.groups.items())
        yield from (f"{key}={json.dumps(value)}" for key, value in self.keys.items())

    def render(self, chosen: str, source: str) -> str:
        """Return the text of the config, YAML for a file in `conf/` or in a folder of the user's. It begins with
        comments: a command that runs it, where it comes from, and the keys that are not carried over. chosen: the words
        of a command line that choose the config, such as "-cn mine". source: the name of their file."""
        lines = [
            f"# deepspeed trainer_base_ds_mp.py {chosen}",
            f"# Made of {source} ({self.project}) by extensions/import_config.",
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
    """Read a config of another trainer and return it as one of ours.

    file: YAML, JSON, or a script with a command of swift, trl, llamafactory-cli or megatron. project: a name in
    `PROJECTS`; None for the project of the command, or else the one that the keys belong to (`find_project`).

    Raises UserError if the file cannot be read as one of these, if the project is not known or cannot be found, or if
    the values for task, data or batch are of an unexpected type. A value of another key that is not understood is no
    error: the key is listed in `left`.
    """
    their, command, program = read_theirs(file)
    found = project or PROGRAMS.get(program, program) or find_project(their)
    if found not in PROJECTS:
        raise UserError(f"{file}: none of {', '.join(PROJECTS)} has these keys; name the project with --project")
    module = PROJECTS[found]
    draft = Draft(their, program, keys=dict(module.DEFAULTS))
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
    """Apply a rule to a key of theirs. If the rule does not understand the value, the key is not carried over."""
    try:
        rule(draft, key, value)
    except _NOT_UNDERSTOOD:
        draft.leave(key, f"its value, {value!r}, is none that is known here")


def write_config(imported: Imported, folder: str) -> list[str]:
    """Write the imported config to `imported.yaml` in an existing folder, and return the words of a command line that
    choose it."""
    (Path(folder) / "imported.yaml").write_text(imported.render("-cn imported", "theirs"))
    return ["--config-dir", folder, "-cn", "imported"]


def take_layout(imported: Imported, overrides: Sequence[str]) -> Imported:
    """Return the imported config with the layout that `plan=search` has found. overrides: words KEY=VALUE, the keys in
    which the layout differs from the config."""
    layout = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in overrides)}
    return replace(imported, keys={**imported.keys, **layout})


def find_project(their: Mapping[str, Any]) -> str | None:
    """Return the first project in `SIGNS` of which at least one key is in a config; None if there is none. their: their
    keys and values."""
    return next((name for name, signs in SIGNS.items() if signs & their.keys()), None)


def read_theirs(file: Path) -> tuple[dict[str, Any], str, str]:
    """Return (their keys and values, the command, the program) of a file of another trainer.

    Of a script with `swift sft ...` the program is "swift" and the command is "sft". Keys and values are those of the
    config that the command names, and those of its arguments, which win. Of a YAML or JSON file, command and program
    are empty.

    Raises UserError if the file does not exist, cannot be parsed or holds no keys, and for a script whose config does
    not exist.
    """
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a quotation mark without its pair
        raise UserError(f"{file} cannot be read: {_describe(error)}; {EXPECTED}") from None
    if not isinstance(their, dict):
        raise UserError(f"{file} holds no keys with values; {EXPECTED}")
    return {key: convert(value) for key, value in their.items()}, "", ""


def split_words(arguments: str) -> list[str]:
    """Return the words of a shell's command line, up to a comment. Raises ValueError for a quotation mark without its
    pair."""
    try:
        words = shlex.split(arguments)
    except ValueError:  # an apostrophe in a comment; not `comments` at first, which would cut NAME#COUNT at the "#"
        words = shlex.split(arguments, comments=True)
    return list(takewhile(lambda word: not word.startswith("#"), words))


def read_named(script: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of the config that a command in a script names, by its first word or by `--config`;
    empty if it names none. script: the path of the script. The path of the config may be relative to the current folder
    or to that of the script. words: the arguments of the command. Raises UserError if the config does not exist or
    cannot be read."""
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
    """Return an error in one line, with the line of the file if the error has it."""
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return said if mark is None else f"line {mark.line + 1}: {said}"


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Return the arguments of a command as keys and values. `--key value` and `--key=value` give a value, `--key a b` a
    list, and `--key` alone gives True. Words before the first `--key` are ignored."""
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
    """Return the number or the truth value that a text holds; any other value as it is. YAML 1.1 reads 1e-4 as text,
    and words of a command line are all texts."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if NUMBER.fullmatch(value):
        return int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)
    return value
