"""Words of the project: names and phrases that were replaced stay out of names, messages, comments and pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("models", "data", "training", "extensions", "tests", "benchmarks", "scripts", "docs", "conf")
SUFFIXES = (".py", ".md", ".yaml")
EXEMPT = {"CHANGELOG.md", "tests/test_words.py"}  # the past, and the list itself
# Names that nothing else is called, so they are wrong in a comment or on a page too.
NAMES = (
    "Anatomy", "CheckedRun", "DeepSpeedPlain", "GrownWeights", "LEVERS", "Lever", "OwnRandomness", "Shipment",
    "StageClock", "StandIn", "Trunk", "_heed_callbacks", "_off_the_clock", "delete_superfluous", "give_rope_parameters",
    "give_storage", "hold_noise", "hold_partitions", "lever", "levers", "of_hidden", "of_weight", "ranks_a_stage",
    "share_heads", "share_of_rank", "squashed", "stage_2", "teach_end", "tell_all", "trunk",
)  # fmt: skip
# Names that are words of a sentence too, so only code is searched for them.
IDENTIFIERS = {
    "ALONE", "Cut", "Entrance", "Horizon", "Lap", "Lookup", "Place", "Recompute", "Stop", "Totals", "WHOLE", "_Way",
}  # fmt: skip
PHRASES = (
    "a key cannot be taken away", "as it is cannot be taken off", "begins with too much", "cannot be taken away",
    "does not give it", "for ever", "for want of", "foresee", "foreseeing", "foreseen", "foresees", "foresaw",
    "go on with resume", "had best", "has not got on", "hear of", "hears of", "in front of", "is no field",
    "is no option", "is no regular expression", "is no size", "left away", "mend", "mended", "mending", "mends",
    "one's own code", "shares out", "shared out", "stands at step", "takes up a checkpoint", "teach nothing",
    "what a chunk had", "without a word",
)  # fmt: skip
PATTERNS = (
    # GPU; `cards_per_node`, and "cards" of a report, are keys, and a model card is the hub's
    r"(?<![\"'`])(?<!\bmodel )\bcards?\b(?![\"'`])",
    r"(?<!\ba )\bshare out\b(?! of range)",
)


def list_files() -> list[Path]:
    found = [*ROOT.glob("*"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    return sorted(
        file
        for file in found
        if file.suffix in SUFFIXES and file.is_file() and file.relative_to(ROOT).as_posix() not in EXEMPT
    )


FILES = list_files()
SOURCES = [file for file in FILES if file.suffix == ".py"]


def join_lines(text: str) -> str:
    """Returns the text with the lines of a string, a comment and a paragraph joined, so that a phrase is in one."""
    text = re.sub(r"""(["'])\s*\n\s*f?\1""", "", text)
    return re.sub(r"\s*\n\s*(?:#\s+)?", " ", text)


def find_words(text: str) -> list[str]:
    """Returns the names and phrases in a file of any kind that have been replaced."""
    names = "|".join(map(re.escape, NAMES))
    phrases = "|".join(rf"\b{re.escape(phrase)}\b" for phrase in PHRASES)
    found = re.findall(rf"(?<![\w./-])(?:{names})(?![\w])", text)
    return found + re.findall("|".join([phrases, *PATTERNS]), join_lines(text), re.IGNORECASE)


def find_identifiers(text: str) -> list[str]:
    """Returns the identifiers in a source that have been replaced, and those that begin with `of_`."""
    defined = list(list_identifiers(ast.parse(text)))
    return [name for name in defined if name in IDENTIFIERS or name.lstrip("_").startswith("of_")]


def list_identifiers(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a source defines or assigns to."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def find_fragments(text: str) -> list[str]:
    """Returns the first lines of docstrings that begin with "Of" or "What": a fragment, where a sentence is due."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [docstring.splitlines()[0] for docstring in docstrings if docstring.startswith(("Of ", "What "))]


def collect(find: Callable[[str], list[str]], files: list[Path]) -> dict[str, list[str]]:
    found = {file.relative_to(ROOT).as_posix(): find(file.read_text()) for file in files}
    return {file: words for file, words in found.items() if words}


@pytest.mark.full
def test_replaced_words_are_in_no_file() -> None:
    assert collect(find_words, FILES) == {}


@pytest.mark.full
def test_replaced_names_are_in_no_source() -> None:
    assert collect(find_identifiers, SOURCES) == {}


def test_docstrings_are_sentences() -> None:
    assert collect(find_fragments, SOURCES) == {}


def test_all_folders_are_read() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in FILES} >= {*FOLDERS, "README.md", "console.py"}


@pytest.mark.parametrize(
    "text",
    [
        *NAMES,
        *PHRASES,
        "what a card holds",
        "ranks share out the state",
        "# usually for\n    # want of memory",
        'raise UserError(\n    f"{key} is no "\n    f"size"\n)',
    ],
)
def test_a_replaced_word_is_found(text: str) -> None:
    assert find_words(f"It is {text}, here.")


@pytest.mark.parametrize(
    "text", ["cards_per_node: 8", 'machine["cards"]', "a share out of range", "`cards`: how many", "model cards"]
)
def test_an_honest_use_is_not(text: str) -> None:
    assert find_words(text) == []


@pytest.mark.parametrize(
    "source",
    [
        *(f"class {name}:\n    pass" for name in sorted(IDENTIFIERS)),
        "of_layers = 1",
        "self._of_layers = 1",
        "def of_layers(): ...",
        "def count(of_layers): ...",
        "import layers as of_layers",
    ],
)
def test_a_replaced_name_is_found(source: str) -> None:
    assert find_identifiers(source)


@pytest.mark.parametrize(
    "source", ['"""What it is."""', 'def f():\n    """Of a rank."""', 'class C:\n    """What is sent."""']
)
def test_a_fragment_is_found(source: str) -> None:
    assert find_fragments(source)
