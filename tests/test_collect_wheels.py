"""`scripts/collect_wheels.py`: what is collected for a machine that has torch but no internet. uv and pip are not
run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import collect_wheels
from scripts.collect_wheels import build_sources, choose, describe, list_requirements, main, run


def test_torch_and_what_comes_with_it_stay_out() -> None:
    pins = ["torch==2.11.0", "triton==3.6.0", "nvidia-nccl-cu13==2.28.9", "cuda-bindings==13.0", "numpy==2.4.6",
            "torchdata==1", "PyYAML==6.0", "pyarrow==26.0.1"]  # fmt: skip
    assert choose(pins, ["pyyaml", ""]) == ["numpy==2.4.6", "torchdata==1", "pyarrow==26.0.1"]


def test_requirements_are_those_of_the_project_with_the_machines_torch() -> None:
    lines = list_requirements("2.11.0", ["WandB"], [])
    assert lines[-1] == "torch==2.11.0" and [line for line in lines if line.startswith("torch")] == lines[-1:]
    assert any(line.startswith("deepspeed==") for line in lines)
    assert not any(line.startswith(("wandb", "#", "bitsandbytes", "pytest")) for line in lines)
    assert list_requirements("2.11.0", ["WandB"], ["bitsandbytes", ""]) == [*lines, "bitsandbytes"]


class Tools:
    """uv resolves to antlr and a torch; pip downloads the source of the one and builds `wheel` of it."""

    def __init__(self, wheel: str) -> None:
        self.wheel = wheel
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *words: str, given: Sequence[str] = ()) -> str:
        self.calls.append(words)
        if words[:2] == ("pip", "download"):
            (folder,) = [Path(word.removeprefix("--dest=")) for word in words if word.startswith("--dest=")]
            (folder / "antlr-4.9.3.tar.gz").touch()
        if words[:2] == ("pip", "wheel"):
            (folder,) = [Path(word.removeprefix("--wheel-dir=")) for word in words if word.startswith("--wheel-dir=")]
            (folder / self.wheel).touch()
        return "antlr==4.9.3\ntorch==2.12.0\n"


def test_they_are_resolved_and_downloaded_for_the_other_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = Tools("antlr-4.9.3-py3-none-any.whl")
    monkeypatch.setattr(collect_wheels, "run", tools)
    words = ["--python-version=3.13", "--torch=2.12.0", "--machine=aarch64", f"--output_dir={tmp_path}/wheels"]
    monkeypatch.setattr(sys, "argv", ["collect_wheels.py", *words])
    main()
    compiled, downloaded, built = tools.calls
    assert {"--python-version=3.13", "--python-platform=aarch64-manylinux_2_39"} <= set(compiled)
    assert {"--python-version=3.13", "--platform=manylinux_2_28_aarch64", "--no-deps"} <= set(downloaded)
    assert downloaded[-1] == "antlr==4.9.3" and built[-1] == f"{tmp_path}/wheels/antlr-4.9.3.tar.gz"
    assert [file.name for file in (tmp_path / "wheels").iterdir()] == [tools.wheel]
    assert "1 wheels, 0 MiB" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="wheels is not empty"):
        main()


def test_a_wheel_for_this_machine_only_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "antlr-4.9.3.tar.gz").touch()
    monkeypatch.setattr(collect_wheels, "run", Tools("antlr-4.9.3-cp311-cp311-linux_x86_64.whl"))
    with pytest.raises(SystemExit, match=r"tar.gz: there is no wheel, and one built here fits this machine only"):
        build_sources(tmp_path)


def test_what_a_tool_says_when_it_fails_is_the_message() -> None:
    with pytest.raises(SystemExit, match="no_such_tool:\n.*No module named no_such_tool"):
        run("no_such_tool", "--help")


def test_the_size_and_the_command_are_said(tmp_path: Path) -> None:
    (tmp_path / "pyarrow-26-cp312.whl").write_bytes(b"0" * 3 * 2**20)
    (tmp_path / "small-1-any.whl").write_bytes(b"0")
    lines = describe(tmp_path).splitlines()
    assert lines[0].startswith("2 wheels, 3 MiB (pyarrow 3, small 0)")
    assert f"--no-index --no-deps --no-compile {tmp_path}/*.whl" in lines[1]
