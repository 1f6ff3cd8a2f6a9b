"""Lists what the running Python lacks of the packages that a run needs (the ranges of pyproject.toml).

    python scripts/missing_packages.py      one line per package; exit code 1 where there is one

Needs nothing but Python, and installs nothing: `make gpu` asks it whether an environment has to be made at all.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main() -> None:
    missing = list(list_missing(tomllib.loads(PROJECT.read_text())["project"]["dependencies"]))
    if missing:
        print(f"{sys.executable} lacks:", *missing, sep="\n  ")
        sys.exit(1)


def list_missing(requirements: list[str]) -> Iterator[str]:
    """Yields the requirements that are not installed, or in another version than they allow."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # one of them
        yield from requirements
        return
    for requirement in map(Requirement, requirements):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield str(requirement)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement} ({found} is installed)"


if __name__ == "__main__":
    main()
