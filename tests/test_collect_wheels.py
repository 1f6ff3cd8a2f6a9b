"""`scripts/collect_wheels.py`: what is collected for a machine that has torch but no internet. pip is not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import collect_wheels
from scripts.collect_wheels import PipFailed, choose, describe, list_requirements, list_target_options, resolve


def test_torch_and_what_comes_with_it_stay_out() -> None:
    pins = {"torch": "2.11.0", "triton": "3.6.0", "nvidia-nccl-cu13": "2.28.9", "cuda-bindings": "13.0",
            "numpy": "2.4.6", "torchdata": "1", "PyYAML": "6.0", "pyarrow": "26.0.1"}  # fmt: skip
    assert choose(pins, ["pyyaml", ""]) == ["numpy==2.4.6", "pyarrow==26.0.1", "torchdata==1"]


def test_requirements_are_those_of_the_project_with_the_machines_torch() -> None:
    lines = list_requirements("2.11.0", ["WandB"], [])
    assert lines[-1] == "torch==2.11.0" and [line for line in lines if line.startswith("torch")] == lines[-1:]
    assert any(line.startswith("deepspeed==") for line in lines)
    assert not any(line.startswith(("wandb", "#", "bitsandbytes", "pytest")) for line in lines)
    assert list_requirements("2.11.0", ["WandB"], ["bitsandbytes", ""]) == [*lines, "bitsandbytes"]


def test_pip_is_asked_for_another_machine() -> None:
    options = list_target_options("3.12", "x86_64")
    assert {"--python-version=3.12", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64"} <= set(options)
    assert "--platform=manylinux2014_x86_64" in options


def report(*pins: tuple[str, str]) -> str:
    return json.dumps({"install": [{"metadata": {"name": name, "version": version}} for name, version in pins]})


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """pip(wheel): the words of its calls, in which antlr has no wheel until one of that name is built."""

    def patch(wheel: str) -> list[str]:
        calls: list[str] = []

        def run_pip(*words: str) -> str:
            calls.append(words[0])
            if words[0] == "wheel":
                (tmp_path / wheel).touch()
            elif not any(tmp_path.glob("antlr*")):
                raise PipFailed(
                    "ERROR: Could not find a version that satisfies the requirement antlr==4.9.*; (from ...)"
                )
            return report(("antlr", "4.9.3"))

        monkeypatch.setattr(collect_wheels, "run_pip", run_pip)
        return calls

    return patch


def test_what_has_no_wheel_is_built(pip: Callable[[str], list[str]], tmp_path: Path) -> None:
    calls = pip("antlr-4.9.3-py3-none-any.whl")
    assert resolve(["antlr"], [], tmp_path) == {"antlr": "4.9.3"}
    assert calls == ["install", "wheel", "install"]


def test_a_wheel_for_this_machine_only_is_refused(pip: Callable[[str], list[str]], tmp_path: Path) -> None:
    pip("antlr-4.9.3-cp311-cp311-linux_x86_64.whl")
    with pytest.raises(PipFailed, match=r"antlr==4.9.\*: there is no wheel, and one built here fits this machine only"):
        resolve(["antlr"], [], tmp_path)


def test_the_size_and_the_command_are_said(tmp_path: Path) -> None:
    (tmp_path / "pyarrow-26-cp312.whl").write_bytes(b"0" * 3 * 2**20)
    (tmp_path / "small-1-any.whl").write_bytes(b"0")
    lines = describe(tmp_path).splitlines()
    assert lines[0].startswith("2 wheels, 3 MiB (pyarrow 3, small 0)")
    assert f"--no-index --no-deps --no-compile {tmp_path}/*.whl" in lines[1]
