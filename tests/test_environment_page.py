"""docs/environment.md names every environment variable that the project reads or sets for a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from test_structure import ROOT, list_sources

PAGE = (ROOT / "docs" / "environment.md").read_text()
# Set for what the process itself starts or imports, and of trackers, which the page leaves to theirs
OWN = {"PYTHONPATH", "TOKENIZERS_PARALLELISM", "SUPERVISED_RUN"}
ELSEWHERE = ("benchmarks/", "extensions/trackers/", "scripts/make_demo.py")
SHELL = re.compile(r"\$\{(\w+):-")


def list_variables(file: Path) -> Iterator[str]:
    """Yields the names in a source that are given to `os.environ`, or to a local name of it, and those in constants of
    the module that are."""
    tree = ast.parse(file.read_text())
    constants = {
        target.id: [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_environment(node.func.value):
            parts = [*node.args[:1], *(ast.Constant(each.arg) for each in node.keywords)]
        elif isinstance(node, ast.Compare) and _is_environment(node.comparators[0]):
            parts = [node.left]
        for part in parts:
            if isinstance(part, ast.Constant):
                yield str(part.value)
            elif isinstance(part, ast.Name):
                yield from map(str, constants.get(part.id, []))


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def test_the_page_names_every_variable() -> None:
    sources = [file for file in list_sources() if not file.relative_to(ROOT).as_posix().startswith(ELSEWHERE)]
    found = {name for file in sources for name in list_variables(file)}
    assert {"RANK", "SLURM_JOB_ID", "LLM_PIPELINE_EXTENSIONS", "TORCHINDUCTOR_CACHE_DIR"} <= found
    scripts = " ".join(file.read_text() for file in (ROOT / "scripts").glob("*.sh"))
    found |= {name for name in SHELL.findall(scripts) if not name.startswith("SLURM_")}
    assert not [name for name in sorted(found - OWN) if not re.search(rf"`{name}\b", PAGE)]
