"""benchmarks/engines.py: an engine's own modules next to empty ones; where its wheels are, its code on exports."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.engines_parts.stand_ins import install, unpack_sources

ROOT = Path(__file__).resolve().parents[1]
FOLDER = os.environ.get("ENGINE_WHEELS", "")
WHEELS = [] if not FOLDER else [str(file) for name in ("vllm", "sglang") for file in Path(FOLDER).glob(f"{name}-*.whl")]


@pytest.mark.skipif(not WHEELS, reason="ENGINE_WHEELS names no folder with wheels of vllm and sglang (pip download)")
def test_engines_stack_exports_into_the_trained_tensors(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "engines.py", *WHEELS, "--output", tmp_path / "report.md"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, (tmp_path / "report.md").read_text() if not ended.stderr else ended.stderr


def test_modules_that_are_not_named_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "made_up_engine/loader.py": "from made_up_engine.kernels import Kernel, scale\n\n\n"
        "class Loader(Kernel):\n    limit: Kernel | None = None\n\n    @scale\n    def load(self):\n        return 3\n",
        "made_up_engine/kernels.py": "raise ImportError('no GPU')\n",
        "made_up_engine/kernels.so": "",
    }
    wheel = tmp_path / "made_up_engine-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    assert unpack_sources(wheel, tmp_path / "unpacked") == "1.2.3"
    assert not (tmp_path / "unpacked" / "made_up_engine" / "kernels.so").exists()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    own = ("made_up_engine.loader",)
    install(tmp_path / "unpacked", "made_up_engine", own, {"made_up_engine.kernels": {"limit": 4}})
    loader = importlib.import_module(own[0])
    assert loader.Loader().load() == 3
    assert importlib.import_module("made_up_engine.kernels").limit == 4
