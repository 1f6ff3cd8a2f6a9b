"""Every command on a page works. In the short run each command line is parsed as the real command would; in the full
run it is executed.

The lines of a ```bash block are commands; blocks of other languages are not. A line right above a block marks it:

    <!-- needs: GPUs -->                         its commands are parsed here, and not run
    <!-- needs: the hub -->                      they run, with a stand-in of the hub on this machine
    <!-- changes the machine: why -->            the same
    `NAME`:                                      no command: this block, of another language, is the content of a file
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from support.configs import CONF
from support.hub_server import TOKEN, serve_hub
from support.launching import BIN
from support.workers import free_port

from errors import UserError
from extension import OWN_FOLDERS, load_extensions
from extensions.sweep.sweep import plan_sweep
from training.cli.command_line import check_command_line, clean_arguments, find_flag, list_given
from training.config.incompatible import CheckedConfig
from training.config.schema import Init, register_schema, to_typed
from training.config.validate import check_config
from training.objectives.registry import check_objective
from training.plan_command.run import check_world_size
from training.resolution.readers import check_read

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "extensions").glob("*/*.md"))
HUB = "the hub"
NEEDS = {"GPUs", "two hosts", "slurm", HUB, "docker", "kubernetes", "skypilot"}
NO_COMMANDS = {"", "text", "python", "yaml", "json"}
BLOCK = re.compile(
    r"(?P<front>(?:(?:<!--[^\n]*-->|`[^`\n]+`:)\n)*)^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
TRAINER, DEFAULT_CONFIG = "trainer_base_ds_mp.py", "base"
OF_THE_SHELL = {
    "autoload",
    "bashcompinit",
    "cat",
    "compinit",
    "do",
    "done",
    "until",
    "cp",
    "docker",
    "eval",
    "export",
    "head",
    "kill",
    "kubectl",
    "ls",
    "mkdir",
    "rm",
    "pip",
    "python3",
    "pre-commit",
    "sky",
    "sleep",
    "tail",
    "tensorboard",
    "touch",
    "wait",
    "wandb",
    ".",
}
LAUNCHER_OPTIONS = {  # option -> number of arguments
    "deepspeed": {
        "-q": 0,
        "--num_gpus": 1,
        "--num_nodes": 1,
        "--hostfile": 1,
        "--no_ssh": 0,
        "--node_rank": 1,
        "--master_addr": 1,
        "--master_port": 1,
        "--log_level": 1,
    },
    "torchrun": {"--nnodes": 1, "--node_rank": 1, "--nproc_per_node": 1, "--master_addr": 1, "--master_port": 1},
    "sbatch": {"--nodes": 1, "--gpus-per-node": 1, "--ntasks-per-node": 1, "--cpus-per-task": 1},
}
FILE_KEYS = ("model_name_or_path", "tokenizer_name_or_path", "train_file", "eval_file", "resume")
FILE_OPTIONS = ("--model_name_or_path", "--prompt_file")


@dataclass(frozen=True)
class Block:
    """line: of the fence, for messages. words: kind -> rest of the lines above it, such as "needs" -> "GPUs"."""

    page: Path
    line: int
    language: str
    body: str
    words: dict[str, str]

    @property
    def place(self) -> str:
        return f"{name_page(self.page)}:{self.line}"

    @property
    def runs_here(self) -> bool:
        return "changes the machine" not in self.words and self.words.get("needs", HUB) == HUB

    def commands(self) -> list[list[str]]:
        """Returns the words of each command; `a | b`, `a && b` and `a &` are separate commands."""
        commands: list[list[str]] = [[]]
        for line in self.body.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            for word in lexer:
                commands.append([]) if set(word) <= set("|&;") else commands[-1].append(word)
            commands.append([])
        return [command for command in commands if command]


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        words = dict(
            (part.strip() for part in comment.partition(":")[::2])
            for comment in re.findall(r"<!--(.*?)-->", match["front"])
        )
        if name := re.search(r"^`(.*)`:$", match["front"], re.MULTILINE):
            words["writes"] = name[1]
        found.append(
            Block(page, text.count("\n", 0, match.start("language")) + 1, match["language"], match["body"], words)
        )
    assert len(found) == len(re.findall("^```", text, re.MULTILINE)) / 2, page
    return found


BLOCKS = {page: read_blocks(page) for page in PAGES}
COMMANDS = [block for blocks in BLOCKS.values() for block in blocks if block.language == "bash"]


def test_marks_are_known() -> None:
    for block in [block for blocks in BLOCKS.values() for block in blocks]:
        assert block.language in NO_COMMANDS | {"bash"}, block.place
        allowed = {"needs", "changes the machine"} if block.language == "bash" else {"writes"}
        assert block.words.keys() <= allowed and all(block.words.values()), f"{block.place}: {block.words}"
        assert block.words.get("needs", "GPUs") in NEEDS, block.place
    assert len(COMMANDS) > 30 and sum(block.runs_here for block in COMMANDS) > len(COMMANDS) / 2


class Understood(Exception):
    """A parser has taken its arguments."""


def take_arguments(script: Path, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a script of this project until it has parsed its command line."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Sequence[str]) -> None:
        parse(self, *given)
        raise Understood

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr("signal.signal", lambda *_: None)  # pytest keeps its handlers
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Understood):
            runpy.run_path(str(script), run_name="__main__")


def take_overrides(arguments: Sequence[str], folder: Path) -> str:
    """Checks a command line as the trainer does before it looks at the machine, and returns the run's output_dir.
    folder: the working directory."""
    arguments = clean_arguments([TRAINER, *arguments])[1:]
    arguments = [
        str(folder / argument) if before == "--config-dir" else argument
        for before, argument in zip(["", *arguments], arguments)
    ]
    register_schema()
    if find_flag(arguments):
        jobs, _ = plan_sweep(arguments, folder / "conf", DEFAULT_CONFIG)
        assert len(jobs) > 1
        return str(jobs[0].output_dir.parent)
    composed = check_command_line(arguments, folder / "conf", DEFAULT_CONFIG)
    options = get_args_parser().parse_args(arguments)
    if options.help or options.cfg:
        return ""
    unread = {
        "train_file": composed.evaluate_only,
        "model_name_or_path": composed.init is Init.random,
        "output_dir": False,
    }
    config = to_typed(composed, unread=[key for key in unread if composed.plan or unread[key]])
    check_config(config, has_accelerator=True)
    check_objective(config)
    check_read(CheckedConfig(config), list_given(arguments), continues=config.resume is not None)
    sizes = config.world_size if isinstance(config.world_size, list) else [config.world_size]
    for size in sizes if config.plan else ():
        check_world_size(replace(config, world_size=size))
    return config.output_dir


def read_launcher(command: Sequence[str]) -> list[str]:
    """Returns the words after the launcher's own: the script and its arguments."""
    known, position = LAUNCHER_OPTIONS[command[0]], 1
    while command[position].startswith("-"):
        name, _, value = command[position].partition("=")
        position += 1 if value else 1 + known[name]
    return list(command[position:])


def list_files(words: Sequence[str]) -> Iterator[str]:
    """Yields the files that a command reads."""
    for key, value in (word.split("=", 1) for word in words if re.match(r"\w+=", word)):
        if key in FILE_KEYS and value not in ("latest", "auto", "null") and not value.startswith(("[", "{", "hf:")):
            yield value
    for before, word in pairwise(words):
        if before in FILE_OPTIONS:
            yield word


class Reader:
    """Checks the commands of one page in order, and tracks which files earlier ones have made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        shutil.copytree(CONF, folder / "conf")
        self.made = {"outputs/demo"}  # by `make demo`, which each page may assume

    def write(self, block: Block) -> None:
        file = self.folder / block.words["writes"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.body)
        self.made.add(block.words["writes"])

    def take(self, command: list[str], checks_files: bool) -> None:
        while command and (variable := re.fullmatch(r"(\w+)=(\S*)", command[0])):  # VARIABLE=value before a command
            if variable[1] == OWN_FOLDERS:
                self.monkeypatch.setenv(OWN_FOLDERS, str(self.folder / variable[2]))
                load_extensions.cache_clear()
            command = command[1:]
        if checks_files:
            for file in list_files(command):
                ships = not file.startswith("outputs/") and (ROOT / file).exists()
                assert ships or any(Path(file).is_relative_to(made) for made in self.made), (
                    f"{file} is made by no command before"
                )
        match command:
            case [launcher, *_] if launcher in LAUNCHER_OPTIONS:
                script, *arguments = read_launcher(command)
                assert script in (TRAINER, "scripts/slurm.sh"), script
                self.made.add(take_overrides(arguments, self.folder))
            case ["python", script, *arguments] if script == TRAINER:
                self.made.add(take_overrides(arguments, self.folder))
            case ["python", "-m", "pytest", *arguments]:
                assert all((ROOT / argument).exists() for argument in arguments if argument.startswith("tests"))
            case ["python", "-m", module, *arguments] if module.startswith("extensions."):
                take_arguments(ROOT / module.replace(".", "/") / "__main__.py", arguments, self.monkeypatch)
            case ["python", script, *arguments]:
                take_arguments(ROOT / script, arguments, self.monkeypatch)
                self.made |= {after for before, after in pairwise(arguments) if before in ("--output_dir", "--output")}
                if script == "scripts/supervise.py":
                    self.take(arguments[arguments.index("--") + 1 :], checks_files)
            case ["make", target]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            case ["git", "clone", *_] | ["cd", *_]:
                pass
            case [word, *_]:
                assert word in OF_THE_SHELL


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_command_lines_are_understood(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    reader = Reader(tmp_path, monkeypatch)
    request.addfinalizer(load_extensions.cache_clear)
    for block in BLOCKS[page]:
        if "writes" in block.words:
            reader.write(block)
        for command in block.commands() if block.language == "bash" else ():
            try:
                reader.take(command, checks_files=block.runs_here)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {' '.join(command)}: {error}") from error


@pytest.mark.parametrize(
    "command",
    [
        ["deepspeed", TRAINER, "-cn", "llama_tiny_pp2", "learning_rte=1"],
        ["deepspeed", TRAINER, "-cn", "llama_tiny_pp2", "keep_last=0"],
        ["deepspeed", TRAINER, "-cn", "llama_tiny_pp2", "train_file=nowhere.jsonl"],
        ["deepspeed", "--gpus", "2", TRAINER],
        ["python", TRAINER, "-cn", "llama_65b_pp8", "plan=true", "world_size=3"],
        ["python", "convert2ckpt.py", "--model_name", "x"],
        ["python", "scripts/generate.py", "--model_name_or_path", "outputs/demo/hf", "--promt", "x"],
        ["make", "tests"],
        ["pytohn", "x.py"],
    ],
)
def test_a_wrong_command_line_is_not(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, UserError, SystemExit, KeyError)):
        Reader(tmp_path, monkeypatch).take(command, checks_files=True)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in list_anchors(file), f"{page.name}: {target}#{anchor}"


def test_rows_are_in_tables() -> None:
    """A row after an empty line, or below a paragraph, would be shown as text."""
    for page in PAGES:
        for above, rows in re.findall(r"^(.*)\n((?:\|.*\n)+)", BLOCK.sub("", page.read_text()), re.MULTILINE):
            assert not above and re.match(r"\|.*\n\|[-:| ]+\|\n", rows), f"{name_page(page)}: {above}\n{rows[:80]}"


def list_anchors(page: Path) -> list[str]:
    """Returns the anchors that GitHub derives from headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def copy_project(folder: Path) -> Path:
    """Copies the files that a fresh clone has, with an environment that `make` takes as installed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in (".installed", ".installed-dev", "activate"):
        (folder / ".venv" / "bin" / name).touch()
    return folder


def run_commands(body: str, folder: Path, **variables: str) -> None:
    """Runs commands as typed, except for the port, since several launches may run on this machine. variables: of the
    environment."""
    body = re.sub(r"\bdeepspeed (?=-|trainer)", lambda _: f"deepspeed --master_port {free_port()} ", body)
    launched = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    environment = {**launched, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"MASTER_PORT": str(free_port()), **variables}  # the port is that of `make demo`
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", body],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ended.returncode == 0, f"{body}\n{ended.stdout[-4000:]}"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project after `make demo`."""
    folder = copy_project(tmp_path_factory.mktemp("demo"))
    run_commands("make demo", folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.language == "bash" and b.runs_here for b in BLOCKS[page])], ids=name_page
)
def test_commands_run(page: Path, demo: Path, tmp_path: Path) -> None:
    """Runs the commands of a page that need nothing special, in order, in a copy of the project; uploads go to a
    stand-in."""
    folder = shutil.copytree(demo, tmp_path / "project", symlinks=True)
    for block in BLOCKS[page]:
        if "writes" in block.words:
            (folder / block.words["writes"]).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.words["writes"]).write_text(block.body)
        elif block.words.get("needs") == HUB:
            upload(block, folder)
        elif block.language == "bash" and block.runs_here:
            run_commands(block.body, folder)


def upload(block: Block, folder: Path) -> None:
    """Runs the block of an upload, with the stand-in's token for the page's dots. What arrives is the whole export."""
    ((output_dir, repo_id),) = re.findall(r"extensions.hub (\S+) --repo_id (\S+)", block.body)
    assert block.body.count("hf_...") == 1, block.place
    with serve_hub() as hub:
        body = block.body.replace("hf_...", TOKEN)
        run_commands(body, folder, HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")
    export = {file.name: file.read_bytes() for file in (folder / output_dir / "hf").iterdir()}
    assert hub.repos == {repo_id: export} and "README.md" in export and len(hub.commits) == 1, block.place
    assert hub.created[0]["visibility"] == "private"
