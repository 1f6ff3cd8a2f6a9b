"""The table of all keys in docs/configure.md: types from the schema, defaults and comments from `conf/`.

A key's comment is on its line, directly above it, or both. In `conf/base.yaml` a comment with a blank line after it is
the title of a section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from training.config.schema import CONF, build_schema

GROUP_SECTION = "Group `{}`"
MOST_CHOICES = 7  # of a group that are listed
_KEY = re.compile(r"(?P<indent> *)(?:- )?(?P<name>\w+):(?: (?P<default>[^#\s].*?))??(?: +# (?P<comment>.*))?")
_PAGE = re.compile(r"\bdocs/(\w+)\.md(#[\w-]+)?")


@dataclass(frozen=True)
class Key:
    """A key as a file of `conf/` states it. default: as written there. section: the title above it."""

    name: str
    default: str
    comment: str
    section: str


def read_keys(text: str) -> Iterator[Key]:
    """Yields the keys of a YAML file in block style by their dotted names, parents before their children."""
    section, comments, parents = "", list[str](), list[str]()
    for line in text.splitlines():
        if line.lstrip().startswith("# "):
            comments.append(line.lstrip(" #"))
        elif match := _KEY.fullmatch(line):
            parents[len(match["indent"]) // 2 :] = [match["name"]]
            comment = " ".join([*comments, match["comment"] or ""]).strip()
            yield Key(".".join(parents), match["default"] or "", comment, section)
            comments = []
        elif not line and comments:
            section, comments = " ".join(comments), []


def list_groups() -> dict[str, Key]:
    """Returns the entry of each group in the defaults list of `conf/base.yaml`."""
    return {key.name.rpartition(".")[2]: key for key in _read("base.yaml") if key.name.startswith("defaults.")}


def list_keys() -> dict[str, Key]:
    """Returns every key that `conf/` states by its dotted name: those of `conf/base.yaml`, then those of each group.

    Of a group's files the default choice wins, then what the choices share, then the others in alphabetical order.
    """
    keys = {key.name: key for key in _read("base.yaml") if key.name.partition(".")[0] not in ("defaults", "hydra")}
    types = list_types()
    for group, choice in list_groups().items():
        for file in _order_files(CONF / group, choice.default):
            for key in (_place(key, group) for key in _read(str(file)) if f"{group}.{key.name}" in types):
                first = keys.setdefault(key.name, key)
                keys[key.name] = replace(first, comment=first.comment or key.comment)
    return keys


def _read(file: str) -> list[Key]:
    return list(read_keys((CONF / file).read_text()))


def _place(key: Key, group: str) -> Key:
    return replace(key, name=f"{group}.{key.name}", section=GROUP_SECTION.format(group))


def _order_files(folder: Path, default: str) -> list[Path]:
    return sorted(folder.rglob("*.yaml"), key=lambda file: (file.stem != default, file.parent == folder, file.stem))


def list_types(schema: type | None = None, prefix: str = "") -> dict[str, Any]:
    """Returns the type of every key by its dotted name, without the groups and their names. schema: of the keys; None
    for all, those of extensions too."""
    schema = schema or build_schema()
    found: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for name in (field.name for field in fields(schema)):
        hint, is_group = hints[name], not prefix and (CONF / name).is_dir()
        if not is_group and not (prefix and name == "name"):
            found[prefix + name] = hint
        if isinstance(hint, type) and is_dataclass(hint):
            found |= list_types(hint, f"{prefix}{name}.")
    return found


def render_keys() -> str:
    """Returns the table as docs/configure.md has it, in Markdown: the groups, then the keys by section."""
    types = list_types()
    parts = [_render_groups()]
    for section, keys in groupby(list_keys().values(), lambda key: key.section):
        title, _, rest = section.partition(". ")
        rows = [_write_row(key, types[key.name]) for key in keys]
        table = ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join([f"### {title}", "", *([_write_text(rest), ""] if rest else []), *table]))
    return "\n\n".join(parts) + "\n"


def _render_groups() -> str:
    rows = [
        f"| `{group}` | {_list_choices(group)} | `{key.default}` | {_write_text(key.comment)} |"
        for group, key in list_groups().items()
    ]
    return "\n".join(["| group | choices | default | meaning |", "|---|---|---|---|", *rows])


def _list_choices(group: str) -> str:
    names = sorted(file.stem for file in (CONF / group).glob("*.yaml"))
    return ", ".join(f"`{name}`" for name in names[:MOST_CHOICES]) + (", ..." if len(names) > MOST_CHOICES else "")


def _write_row(key: Key, hint: Any) -> str:
    default = {"": "", "???": "required"}.get(key.default, f"`{key.default}`")
    return f"| `{key.name}` | {write_type(hint)} | {default} | {_write_text(key.comment)} |"


def write_type(hint: Any) -> str:
    """Returns the type of a key in words, empty for a key that has others below it."""
    if is_dataclass(hint):
        return ""
    if get_origin(hint) in (list, dict):
        inner = get_args(hint)[-1]
        return f"{get_origin(hint).__name__} of {_name_fields(inner) if is_dataclass(inner) else write_type(inner)}"
    if isinstance(hint, UnionType):
        return " or ".join(write_type(part) for part in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    return {Any: "any", NoneType: "null"}.get(hint) or str(hint.__name__)


def _name_fields(schema: Any) -> str:
    return f"`{{{', '.join(field.name for field in fields(schema))}}}`"


def _write_text(comment: str) -> str:
    """Returns a comment as the text of a cell; pages that it names become links."""
    linked = _PAGE.sub(_link, comment)
    return linked.replace("|", "\\|")


def _link(match: re.Match[str]) -> str:
    page, anchor = match[1], match[2] or ""
    words = (anchor.lstrip("#") or page).replace("-", " ").replace("_", " ")
    return f"[{words}]({'' if page == 'configure' else f'{page}.md'}{anchor})"
