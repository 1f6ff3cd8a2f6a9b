"""requirements.txt names what the sources import and nothing else, and the lock holds all that it names."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from sys import stdlib_module_names

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_structure import ROOT, SOURCE_FOLDERS, list_sources, read_imports

LOCK = ROOT / "requirements.lock"
# Imported where a key asks for it, on a machine that has it; `training/resolution/packages.py`,
# `training/trackers/build.py` and `models/layers/fused_kernels.py` end a run without it with one line.
OPTIONAL = {"bitsandbytes", "liger-kernel", "mlflow", "swanlab", "trackio", "comet-ml"}
ENGINES = {"vllm", "sglang", "made-up-engine"}  # which benchmarks/engines.py loads from wheels
UNDER_ANOTHER_NAME = {"tensorboard"}  # torch.utils.tensorboard imports it
COMMANDS = {"mypy", "ruff", "pytest-xdist"}  # of requirements-dev.txt: run, not imported
TESTS = list((ROOT / "tests").rglob("*.py"))
OWN = {file.stem for file in [*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py"), *TESTS]} | {
    *SOURCE_FOLDERS,
    "support",
    "tests",
}


def read_requirements(file: Path) -> dict[str, Requirement]:
    """Returns the requirements that a file names itself, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("-r ")]
    assert all(re.fullmatch(r"==[\w.]+", str(requirement.specifier)) for requirement in found), "not pinned"
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def find_imported(files: list[Path]) -> set[str]:
    """Returns the canonical names of the packages that files import, at the top or inside a function."""
    modules = {name.partition(".")[0] for file in files for name in read_imports(file)}
    packages = packages_distributions()
    assert not OWN & packages.keys(), "a file of ours has a package's name"
    foreign = modules - OWN - stdlib_module_names
    return {canonicalize_name(packages.get(module, [module])[0]) for module in foreign}


BASE = read_requirements(ROOT / "requirements.txt")
DEV = read_requirements(ROOT / "requirements-dev.txt")
TRACKERS = read_requirements(ROOT / "extensions/trackers/requirements.txt")
TRACKED = ("mlflow", "swanlab", "trackio", "comet")  # extras of pyproject.toml


def test_what_the_sources_import_is_what_users_install() -> None:
    imported = find_imported(list_sources())
    assert imported - OPTIONAL - ENGINES == set(BASE) - UNDER_ANOTHER_NAME


def test_what_tests_import_is_what_make_test_installs() -> None:
    imported = find_imported(TESTS)
    assert imported - set(BASE) - OPTIONAL - ENGINES - {"triton"} == set(DEV) - OPTIONAL - COMMANDS
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_the_ranges_name_the_packages_that_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: [Requirement(line) for line in lines] for name, lines in project["optional-dependencies"].items()}
    ranges = [Requirement(line) for line in project["dependencies"]]
    loggers = [*extras.pop("wandb"), *extras.pop("tensorboard")]
    assert {canonicalize_name(each.name) for each in [*ranges, *loggers]} == set(BASE)
    assert {canonicalize_name(each.name) for extra in TRACKED for each in extras[extra]} == TRACKERS.keys()
    pins = BASE | DEV | TRACKERS
    for requirement in [*ranges, *loggers, *(each for lines in extras.values() for each in lines)]:
        if (pin := pins.get(canonicalize_name(requirement.name))) is not None:
            assert requirement.specifier.contains(str(pin.specifier).removeprefix("==")), requirement


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
    needed = [Requirement(line) for line in requires(name) or []]
    here = {
        canonicalize_name(each.name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    assert here - {"torch"} <= set(read_lock())
