"""The installed command: the scripts of the project, found from outside its clone."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import free_port

from training.cli import commands
from training.cli.commands import COMMANDS, ROOT, TRAINER, add_config_dir, split_launcher
from training.cli.help import FIRST, render_help

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
PLANNED = ("model=llama_7b", "world_size=8", "micro_batch_size=1", "global_batch_size=8")


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
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_a_key_after_the_lines_on_the_page(shell: str, tmp_path: Path) -> None:
    """On a terminal, with a tab; the page's lines for the clone."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    page = (ROOT / "docs" / "configure.md").read_text()
    (install,) = re.findall(r'`(eval "\$\(python .*?)`', page)
    first = re.findall(r"^autoload .*$", page, re.MULTILINE) if shell == "zsh" else []
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": bin_first, "HOME": str(tmp_path), "TERM": "dumb"}
    start = [shell, *(["-f", "-i"] if shell == "zsh" else ["--norc", "-i"])]
    terminal, its_end = pty.openpty()
    with subprocess.Popen(
        start, cwd=ROOT, env=environment, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True
    ) as process:
        os.close(its_end)
        try:
            os.write(terminal, ("; ".join([*first, install, "echo re''ady"]) + "\n").encode())
            assert read_until(terminal, "ready\r")
            os.write(terminal, f"python {TRAINER} learning_r\t".encode())
            assert read_until(terminal, "learning_rate=")
        finally:
            process.kill()
            os.close(terminal)


def read_until(terminal: int, wanted: str, seconds: float = 120.0) -> bool:
    """Returns whether a terminal shows a text before `seconds` are over."""
    shown, end = "", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return wanted in shown


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("models", "data", "training", "scripts", "conf", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))):
        shutil.copyfile(file, source / file.name)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.full
def test_the_wheel_nests_the_project_and_its_command_runs_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """Nothing but `llm_pipeline` lands in site-packages; a plan needs its configs, and `import` a page of docs/."""
    site, work = tmp_path / "site", tmp_path / "work"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"llm_pipeline"}
    assert not [name for name in names if name.startswith("llm_pipeline/tests/")]
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel)
    work.mkdir()
    (work / "theirs.yaml").write_text("stage: sft\nfinetuning_type: lora\nmodel_name_or_path: a/b\nuse_galore: true\n")
    command = [sys.executable, site / "bin" / "llm-pipeline"]
    path = {"PYTHONPATH": str(site)}
    written = run(*command, "import", "theirs.yaml", "-o", "mine.yaml", cwd=work, **path)
    assert "not carried over: use_galore" in written
    (work / "conf").mkdir()
    (work / "conf" / "mine.yaml").write_text("defaults: [base, _self_]\nnum_stages: 2\nmodel_name_or_path: a/b\n")
    assert "FIT" in run(*command, "plan", "-cn", "mine", *PLANNED, cwd=work, **path)


@pytest.mark.full
def test_the_wheel_brings_its_dependencies_and_trains(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, into which pip installs what pyproject.toml asks for, and a folder of its own. torch is of
    this environment's build: pip would download gigabytes for GPUs."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_folder = tmp_path / "venv" / "bin"
    pip = [bin_folder / "python", *PIP[1:], "install", "--quiet"]
    try:
        run(*pip, f"torch=={torch.__version__}", PYTHONPATH="")
    except AssertionError as error:
        pytest.skip(f"pip cannot install torch {torch.__version__} here: {str(error).strip().splitlines()[-1]}")
    run(*pip, wheel, PYTHONPATH="")
    work = tmp_path / "work"
    work.mkdir()
    save_llama(work / "model", num_hidden_layers=2)
    save_tokenizer(work / "model")
    save_records(work / "train.jsonl", 10)
    isolated = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "", "VIRTUAL_ENV": ""}
    command = bin_folder / "llm-pipeline"
    keys = ("model_name_or_path=model", "train_file=train.jsonl", "output_dir=out", "num_stages=2", "max_steps=2")
    keys += ("micro_batch_size=2", "global_batch_size=4", "max_seq_length=128", "precision=fp32")
    assert "FIT" in run(
        command, "plan", "-cn", "llama_65b_pp8", "world_size=8", "hardware=a100_80g", cwd=work, **isolated
    )
    port = ("--master_port", str(free_port()))
    run(command, "train", "--num_gpus", "2", *port, *keys, cwd=work, **isolated)
    assert json.loads((work / "out" / "completed.json").read_text())["step"] == 2
    assert (work / "out" / "hf" / "model.safetensors").is_file()


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Returns what a command prints. environment: in addition to that of this process."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
