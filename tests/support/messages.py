"""Reads from the sources, without importing them, every message that a person may be shown at the end of a run.

A message is written as a person reads it, with `...` for what varies: an f-string's own words, and where a value is
itself put together here (by a function of the project, a local variable, a constant of a module), its words too.
Alternatives are messages of their own.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOLE = "..."
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("models", "data", "training", "extensions", "scripts")
_DEPTH = 6  # functions that call each other
_WORDS = 3  # that a value needs to be shown in words
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Message:
    text: str
    place: str  # file:line
    code: str  # of the expression


def read_sources() -> dict[str, str]:
    """File name -> text, of what a user runs."""
    files = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in sorted(files)}


def normalize(text: str) -> str:
    return re.sub(r"\.{3,}", HOLE, " ".join(text.split()))


class Sources:
    """All files together, since a message may be put together in another one than it is raised in."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._trees = {name: ast.parse(text) for name, text in texts.items()}
        self._functions: dict[str, list[tuple[str, Function]]] = {}
        self._constants: dict[str, set[str]] = {}
        for name, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    self._functions.setdefault(node.name, []).append((name, node))
            for node in tree.body:
                targets = (
                    node.targets
                    if isinstance(node, ast.Assign)
                    else [node.target]
                    if isinstance(node, ast.AnnAssign)
                    else []
                )
                if targets and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                    for target in itertools.chain.from_iterable(ast.walk(target) for target in targets):
                        if isinstance(target, ast.Name):
                            self._constants.setdefault(target.id, set()).add(node.value.value)

    def calls(self, callee: str, argument: int | str = 0, file: str | None = None) -> list[Message]:
        """Returns the messages passed to `callee` (`UserError`, `self._report`) as `argument`, in all files or in
        one."""
        found = []
        for name, tree in self._trees.items():
            if file in (None, name):
                for function, call in _walk_calls(tree):
                    if ast.unparse(call.func) == callee and (given := _argument(call, argument)) is not None:
                        found += self._messages(name, function, given)
        return found

    def returns(self, function: str, file: str) -> list[Message]:
        """Returns the texts that a function returns."""
        found = [
            message
            for name, node in self._functions[function]
            if name == file
            for value in _list_returns(node)
            for message in self._messages(name, node, value)
        ]
        return [message for message in found if message.text != HOLE]

    def _messages(self, name: str, function: Function | None, value: ast.expr) -> list[Message]:
        texts = {normalize(text) for text in self._render(value, name, function, _DEPTH)}
        return [Message(text, f"{name}:{value.lineno}", ast.unparse(value)) for text in sorted(texts - {HOLE} or texts)]

    def _render(self, value: ast.expr, name: str, function: Function | None, depth: int) -> list[str]:
        """All texts that an expression may be."""
        if isinstance(value, ast.Constant):
            return [value.value if isinstance(value.value, str) else HOLE]
        if isinstance(value, ast.JoinedStr):
            parts = [self._render_part(part, name, function, depth) for part in value.values]
            return ["".join(chosen) for chosen in itertools.product(*parts)]
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            sides = [self._render(side, name, function, depth) for side in (value.left, value.right)]
            return ["".join(chosen) for chosen in itertools.product(*sides)]
        if isinstance(value, ast.IfExp):
            return [text for side in (value.body, value.orelse) for text in self._render(side, name, function, depth)]
        if isinstance(value, ast.Call) and depth:
            return self._render_call(value, name, depth) or [HOLE]
        if isinstance(value, ast.Name):
            assigned = [
                node.value
                for node in ast.walk(function or ast.Module([], []))
                if isinstance(node, ast.Assign) and _names(node) == [value.id]
            ]
            if assigned and depth:
                return sorted({text for node in assigned for text in self._render(node, name, function, depth - 1)})
            constants = self._constants.get(value.id, set())
            return list(constants) if len(constants) == 1 else [HOLE]
        return [HOLE]

    def _render_part(self, part: ast.expr, name: str, function: Function | None, depth: int) -> list[str]:
        """A piece of an f-string: its words, or a value's, where that is only one text or put together by a
        function."""
        if not isinstance(part, ast.FormattedValue):
            return self._render(part, name, function, depth)
        if isinstance(part.value, ast.Name) and part.value.id in self._constants:
            return self._render(part.value, name, function, depth)
        texts = self._render(part.value, name, function, depth)
        is_told = all(len(re.findall(r"[a-z]{2,}", text)) >= _WORDS for text in texts)
        return texts if is_told and (len(texts) == 1 or isinstance(part.value, ast.Call)) else [HOLE]

    def _render_call(self, call: ast.Call, name: str, depth: int) -> list[str]:
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "join"
            and isinstance(call.args[0], ast.GeneratorExp)
        ):
            return self._render(call.args[0].elt, name, None, depth - 1)  # of what is said several times, one
        callee = (
            call.func.attr
            if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
            else getattr(call.func, "id", None)
        )
        defined = self._functions.get(callee, [])
        defined = [entry for entry in defined if entry[0] == name] or defined
        if len(defined) != 1:
            return []
        ((file, node),) = defined
        return list(
            dict.fromkeys(text for value in _list_returns(node) for text in self._render(value, file, node, depth - 1))
        )


def _walk_calls(tree: ast.Module) -> Iterator[tuple[Function | None, ast.Call]]:
    """Each call, with the innermost function around it."""
    pending: list[tuple[Function | None, ast.AST]] = [(None, tree)]
    while pending:
        function, node = pending.pop()
        if isinstance(node, ast.Call):
            yield function, node
        inner = node if isinstance(node, Function) else function
        pending += [(inner, child) for child in ast.iter_child_nodes(node)]


def _argument(call: ast.Call, which: int | str) -> ast.expr | None:
    if isinstance(which, int):
        return call.args[which] if len(call.args) > which else None
    return next((keyword.value for keyword in call.keywords if keyword.arg == which), None)


def _list_returns(function: Function) -> list[ast.expr]:
    return [node.value for node in _walk_own(function) if isinstance(node, ast.Return) and node.value is not None]


def _walk_own(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function, in order, without those of the functions in it."""
    pending: list[ast.AST] = list(reversed(function.body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*Function.__args__, ast.Lambda)):
            pending += reversed(list(ast.iter_child_nodes(node)))


def _names(assign: ast.Assign) -> list[str]:
    return [target.id for target in assign.targets if isinstance(target, ast.Name)]
