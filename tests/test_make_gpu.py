"""`make gpu` without internet: in the Python that is there, or in an environment made of a folder of wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.missing_packages import list_missing

ROOT = Path(__file__).resolve().parents[1]
REPORT = "import sys; print('ran in', sys.prefix, *sys.argv[1:])"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that `make gpu` reads; the report itself only says where it ran."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "scripts" / "missing_packages.py", tmp_path / "scripts")
    (tmp_path / "benchmarks" / "gpu.py").write_text(REPORT)
    (tmp_path / "requirements.txt").write_text("far-away==2\n")
    return tmp_path


def start_make(
    clone: Path, needed: str, *variables: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """There is no index to install from."""
    (clone / "pyproject.toml").write_text(f'[project]\ndependencies = ["{needed}"]\n')
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0", "MAKEFLAGS": ""}
    command = ["make", "gpu", f"PYTHON={python}", "GPU_OPTIONS=--parts right", *variables]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)


def run_make(clone: Path, needed: str, *variables: str) -> str:
    """The last line that is printed."""
    ended = start_make(clone, needed, *variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[-1]


def test_a_python_that_has_what_it_takes_is_used_as_it_is(clone: Path) -> None:
    assert run_make(clone, "packaging>=20") == f"ran in {sys.prefix} --parts right"
    assert not (clone / ".venv").exists()


def test_an_old_python_is_named(clone: Path) -> None:
    old = clone / "python3"
    set_version = "import sys; sys.version_info, sys.version = (3, 10, 12), '3.10.12 (main)'; exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{set_version}" "$2"\n')
    old.chmod(0o755)
    ended = start_make(clone, "packaging>=20", python=str(old))
    assert ended.returncode != 0 and not (clone / ".venv").exists()
    assert ended.stderr.startswith(f"Python 3.11 or later is needed, and {old} is 3.10.12; make PYTHON=python3.12 ...")


@pytest.mark.full
@pytest.mark.parametrize("folder", ["wheels", "elsewhere"])
def test_wheels_are_installed_without_an_index(clone: Path, folder: str) -> None:
    (clone / folder).mkdir()
    with zipfile.ZipFile(clone / folder / "far_away-2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("far_away.py", "")
        info = "far_away-2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: far-away\nVersion: 2\nRequires-Dist: torch\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    variables = () if folder == "wheels" else (f"WHEELS={folder}",)
    assert run_make(clone, "far-away>=2", *variables) == f"ran in {clone / '.venv'} --parts right"
    assert list((clone / ".venv").glob("lib/*/site-packages/far_away.py"))
    assert "include-system-site-packages = true" in (clone / ".venv" / "pyvenv.cfg").read_text()


def test_what_is_missing_is_named() -> None:
    found = list(list_missing(["packaging>=20", "packaging>=9999", "far-away>=2"]))
    assert [each.partition(" (")[0] for each in found] == ["packaging>=9999", "far-away>=2"]
