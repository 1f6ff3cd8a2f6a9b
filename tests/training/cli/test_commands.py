"""The installed command: the scripts of the project, found from outside its clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from training.cli import commands
from training.cli.commands import COMMANDS, ROOT, TRAINER, add_config_dir, split_launcher
from training.cli.help import FIRST, render_help


def test_each_command_is_a_script_that_is_there() -> None:
    assert COMMANDS.keys() >= {"train", "plan", "convert", "generate", "inspect", "export", "import"}
    assert all((ROOT / script).is_file() for script, _, _ in COMMANDS.values())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--num_gpus", "2", "-cn", "x"], ["--num_gpus", "2"]),
        (["--num_gpus=2", "-q", "-cn", "x"], ["--num_gpus=2", "-q"]),
        (["-cn", "x", "seed=1"], []), ([], []),
    ],
)  # fmt: skip
def test_options_of_the_launcher_come_first(words: list[str], options: list[str]) -> None:
    assert split_launcher(words) == (options, words[len(options) :])


def test_configs_of_ones_own_are_found(tmp_path: Path) -> None:
    assert add_config_dir(["-cn", "x"], tmp_path) == ["-cn", "x"]
    (tmp_path / "conf").mkdir()
    assert add_config_dir(["-cn", "x"], tmp_path) == ["-cn", "x", "--config-dir", str(tmp_path / "conf")]
    assert add_config_dir(["--config-dir=y"], tmp_path) == ["--config-dir=y"]
    assert add_config_dir([], ROOT) == []


@pytest.mark.parametrize(
    ("words", "script", "arguments"),
    [
        (["plan", "-cn", "x", "world_size=8"], TRAINER, ["-cn", "x", "world_size=8", "plan=true"]),
        (["plan", "-cn", "x", "plan=search"], TRAINER, ["-cn", "x", "plan=search"]),
        (["export", "--output_dir", "y"], "convert2ckpt.py", ["--output_dir", "y", "--to_hf"]),
        (["train", "--help"], TRAINER, ["--help"]),
    ],
)
def test_a_command_runs_its_script(
    words: list[str], script: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["llm-pipeline", *words])
    monkeypatch.setattr(commands, "_run", lambda *given: ran.append(given))
    commands.main()
    assert ran == [(script, arguments)]


def test_training_starts_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["llm-pipeline", "train", "--num_gpus", "2", "-cn", "x", "seed=1"])

    def become(program: str, words: Sequence[str]) -> None:
        started.append(words)
        raise SystemExit

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit):
        commands.main()
    ((program, *words),) = started
    assert Path(program) == Path(sys.executable).with_name("deepspeed")
    assert words == ["--num_gpus", "2", str(ROOT / TRAINER), "-cn", "x", "seed=1"]


def test_the_help_is_a_screen_of_keys_with_their_defaults() -> None:
    lines = render_help().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 100
    assert len([line for line in lines if line.startswith("  ") and "=" in line]) >= sum(map(len, FIRST.values()))
    assert any(line.startswith("  learning_rate=2.0e-5 ") for line in lines)


def complete(line: str, *program: str | Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *program, "-sc", "query=bash"], capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "COMP_LINE": line, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout.split()


def test_hydra_completes_keys_and_configs() -> None:
    assert complete(f"python {TRAINER} optimizer=adam", ROOT / TRAINER) == ["optimizer=adamw", "optimizer=adamw_8bit"]
    with_command = complete("llm-pipeline train learning_", "-c", "from training.cli.commands import main; main()")
    assert with_command == ["learning_rate="]


@pytest.mark.full
def test_the_wheel_nests_the_project_and_its_command_runs_outside_the_clone(tmp_path: Path) -> None:
    """Nothing but `llm_pipeline` lands in site-packages; a plan needs its configs, and `import` a page of docs/."""
    pytest.importorskip("setuptools")
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("models", "data", "training", "scripts", "conf", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))):
        shutil.copyfile(file, source / file.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"llm_pipeline"}
    assert not [name for name in names if name.startswith("llm_pipeline/tests/")]
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    work = tmp_path / "work"
    work.mkdir()
    (work / "theirs.yaml").write_text("stage: sft\nfinetuning_type: lora\nmodel_name_or_path: a/b\nuse_galore: true\n")
    written = run_command(site, work, "import", "theirs.yaml", "-o", "mine.yaml")
    assert "not carried over: use_galore" in written
    (work / "conf").mkdir()
    (work / "conf" / "mine.yaml").write_text("defaults: [base, _self_]\nnum_stages: 2\nmodel_name_or_path: a/b\n")
    plan = run_command(
        site, work, "plan", "-cn", "mine", "model=llama_7b", "world_size=8", "micro_batch_size=1", "global_batch_size=8"
    )
    assert "FITS" in plan or "DOES NOT FIT" in plan


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_command(site: Path, folder: Path, *words: str) -> str:
    """Runs the installed command in `folder`; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, site / "bin" / "llm-pipeline", *words], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
