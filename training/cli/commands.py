"""`llm-pipeline`, the command of the installed package: each of its commands is a script of this project, as it is.

    llm-pipeline train --num_gpus 4 -cn llama_7b_pp4 train_file=data.jsonl

In the wheel all of the project is in one package, `llm_pipeline`, so that no `models` or `data` is in site-packages.
The folder of that package comes first on `sys.path` here, as the folder of a clone does when a script of it is run:
that is where `from models...` is found. Configs of one's own are in `conf/` of the working directory.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER, CONVERTER = "trainer_base_ds_mp.py", "convert2ckpt.py"
# Command -> script, words that are added to it, what it does.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": (TRAINER, (), "train, with deepspeed's launcher: [--num_gpus N] -cn NAME key=value ..."),
    "plan": (TRAINER, ("plan=true",), "memory and time of a run, without a GPU: -cn NAME world_size=N hardware=NAME"),
    "inspect": (TRAINER, ("inspect_data=true",), "what the model will see of the data: -cn NAME train_file=FILE"),
    "convert": (CONVERTER, (), "Hugging Face weights to one file per layer"),
    "export": (CONVERTER, ("--to_hf",), "a checkpoint to a Hugging Face folder"),
    "generate": ("scripts/generate.py", (), "answers of a model"),
    "import": ("scripts/import_config.py", (), "a config of another trainer to one of this project"),
    "report": ("scripts/report.py", (), "the page of a run, or of several to compare"),
    "upload": ("scripts/upload.py", (), "a run's model to the Hugging Face hub"),
    "supervise": ("scripts/supervise.py", (), "restart a run until it has finished: --output_dir OUT -- COMMAND"),
}
COMPLETION = "-sc"  # Hydra's option
# deepspeed's own options that `train` passes on -> number of their arguments
LAUNCHER_OPTIONS = {
    "--num_gpus": 1, "--num_nodes": 1, "--hostfile": 1, "--include": 1, "--exclude": 1, "--master_addr": 1,
    "--master_port": 1, "--node_rank": 1, "--no_ssh": 0, "--quiet": 0, "-q": 0,
}  # fmt: skip


def main() -> None:
    """Run a command: in this process, but for `train`, which becomes deepspeed's launcher."""
    words = sys.argv[1:]
    if words[:1] == [COMPLETION]:
        _complete(words)
        return
    if not words or words[0] not in COMMANDS:
        is_help = not words or words[0] in ("-h", "--help")
        print(describe(), file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else f"llm-pipeline: {words[0]} is not a command")
    script, added, _ = COMMANDS[words[0]]
    rest = [*words[1:], *(word for word in added if not _is_given(word, words))]
    if script == TRAINER:
        rest = add_config_dir(rest, Path.cwd())
    if words[0] == "train" and not {"--help", "-h", "--cfg", "-c", "--multirun", "-m"} & set(rest):
        launcher, rest = split_launcher(rest)
        command = [str(Path(sys.executable).with_name("deepspeed")), *launcher, str(ROOT / TRAINER), *rest]
        os.execv(command[0], command)
    _run(script, rest)


def describe() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<10} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        [
            "llm-pipeline COMMAND ...; COMMAND --help says more", *lines,
            f"completion: eval \"$(llm-pipeline {COMPLETION} install=bash)\", in zsh after",
            "autoload -Uz compinit bashcompinit && compinit && bashcompinit",
            f"the sources are in {ROOT}",
        ]
    )  # fmt: skip


def split_launcher(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of deepspeed's launcher, which come first, and the rest."""
    at = 0
    while at < len(words) and (name := words[at].partition("=")[0]) in LAUNCHER_OPTIONS:
        at += 1 if "=" in words[at] else 1 + LAUNCHER_OPTIONS[name]
    return list(words[:at]), list(words[at:])


def add_config_dir(words: Sequence[str], folder: Path) -> list[str]:
    """Return the words of a run, with `--config-dir` where the working directory has a `conf/` that is not this
    project's."""
    own = folder / "conf"
    is_given = any(word.partition("=")[0] in ("--config-dir", "-cd", "--config-path", "-cp") for word in words)
    return [*words] if is_given or not own.is_dir() or own == ROOT / "conf" else [*words, "--config-dir", str(own)]


def _is_given(word: str, words: Sequence[str]) -> bool:
    """Return whether the words set the same key, as `plan=search` does."""
    return any(each == word or each.startswith(f"{word.partition('=')[0]}=") for each in words)


def _complete(words: Sequence[str]) -> None:
    """Let Hydra complete a line, which knows no commands: without ours."""
    line = os.environ.get("COMP_LINE", "").split(" ")
    if len(line) > 1 and line[1] in COMMANDS:
        os.environ["COMP_LINE"] = " ".join([line[0], *line[2:]])
    _run(TRAINER, words, name="llm-pipeline")


def _run(script: str, words: Sequence[str], name: str = "") -> None:
    sys.argv = [name or str(ROOT / script), *words]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(ROOT / script), run_name="__main__")
