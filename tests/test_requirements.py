"""requirements.txt and the group `dev` name what the sources and the tests import and nothing else, and the lock holds
all that requirements.txt needs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path
from sys import stdlib_module_names

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_structure import ROOT, SOURCE_FOLDERS, list_sources, read_imports

LOCK = ROOT / "requirements.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Imported where a key asks for it, on a machine that has it; `training/resolution/packages.py`,
# `training/trackers/build.py`, `extensions/images/processor.py` and `models/layers/fused_kernels.py` end a run without
# it with one line.
OPTIONAL = {"bitsandbytes", "liger-kernel", "mlflow", "swanlab", "trackio", "comet-ml", "pillow"}
ENGINES = {"vllm", "sglang", "made-up-engine"}  # which benchmarks/engines.py loads from wheels
COMMANDS = {"mypy", "pre-commit", "pytest-xdist", "ruff", "uv"}  # of the group dev: run, not imported
TESTS = list((ROOT / "tests").rglob("*.py"))
OWN = {file.stem for file in [*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py"), *TESTS]} | {
    *SOURCE_FOLDERS,
    "support",
    "tests",
}


def read_requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    """Returns the requirements of lines, which pin them, by canonical name."""
    found = [Requirement(line) for line in (line.partition("#")[0].strip() for line in lines) if line]
    assert all(re.fullmatch(r"==[\w.]+", str(requirement.specifier)) for requirement in found), "not pinned"
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def list_group(name: str) -> Iterator[str]:
    """Yields the lines of a group of pyproject.toml, with those of the groups that it includes."""
    for line in PROJECT["dependency-groups"][name]:
        yield from [line] if isinstance(line, str) else list_group(line["include-group"])


def find_imported(files: list[Path]) -> set[str]:
    """Returns the canonical names of the packages that files import, at the top or inside a function."""
    modules = {name.partition(".")[0] for file in files for name in read_imports(file)}
    packages = packages_distributions()
    assert not OWN & packages.keys(), "a file of ours has a package's name"
    foreign = modules - OWN - stdlib_module_names
    return {canonicalize_name(packages.get(module, [module])[0]) for module in foreign}


BASE = read_requirements((ROOT / "requirements.txt").read_text().splitlines())
DEV = read_requirements(list_group("dev"))


def test_what_the_sources_import_is_what_users_install() -> None:
    imported = find_imported(list_sources())
    assert imported - OPTIONAL - ENGINES == set(BASE)


def test_what_tests_import_is_what_make_test_installs() -> None:
    imported = find_imported(TESTS)
    assert imported - set(BASE) - OPTIONAL - ENGINES - {"triton"} == set(DEV) - OPTIONAL - COMMANDS


def test_the_ranges_name_the_packages_that_are_pinned() -> None:
    ranges = {canonicalize_name(each.name): each for each in map(Requirement, PROJECT["project"]["dependencies"])}
    assert ranges.keys() == BASE.keys() - {"wandb"}  # which a run needs only where `logger` asks for it
    for name, requirement in ranges.items():
        assert requirement.specifier.contains(str(BASE[name].specifier).removeprefix("==")), requirement


def test_groups_pin_what_they_name_and_no_package_twice() -> None:
    lines = [line for group in PROJECT["dependency-groups"].values() for line in group if isinstance(line, str)]
    assert len(read_requirements(lines)) == len(lines) and not read_requirements(lines).keys() & BASE.keys()
    trackers = {"mlflow": "mlflow-skinny", "comet": "comet-ml"}
    files = (ROOT / "extensions/trackers/conf/logger").glob("*.yaml")
    named = {trackers.get(file.stem, file.stem) for file in files}
    assert read_requirements(list_group("trackers")).keys() == named | {"tensorboard"}


def read_lock() -> dict[str, tuple[str, int]]:
    """Returns package -> (version, number of hashes). A package whose version depends on Python's is there once."""
    entries = re.findall(r"^([\w.-]+)==(\S+)(.*(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)*)", LOCK.read_text(), re.M)
    return {canonicalize_name(name): (version, rest.count("--hash=sha256:")) for name, version, rest in entries}


def test_the_lock_holds_every_requirement_with_hashes_and_torch_is_outside() -> None:
    locked = read_lock()
    assert {name: locked.get(name, ("missing",))[0] for name in BASE if name != "torch"} == {
        name: str(requirement.specifier).removeprefix("==") for name, requirement in BASE.items() if name != "torch"
    }
    assert all(hashes for _, hashes in locked.values())
    assert not [name for name in locked if re.match(r"torch$|triton$|nvidia-|cuda-", name)]
    lines = [line for line in LOCK.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert all(re.match(r"[\w.-]+==|    --hash=sha256:", line) for line in lines)
    assert "://" not in LOCK.read_text(), "the lock names no host"


@pytest.mark.parametrize("name", sorted(BASE.keys() - {"torch"}))
def test_the_lock_holds_what_each_requirement_needs(name: str) -> None:
    if not BASE[name].specifier.contains(version(name)):
        pytest.skip(f"{name} {version(name)} is installed")
    needed = [Requirement(line) for line in requires(name) or []]
    here = {
        canonicalize_name(each.name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    assert here - {"torch"} <= set(read_lock())
