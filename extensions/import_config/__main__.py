"""Makes a config of this project from one of LLaMA-Factory, axolotl, TRL, ms-swift or PaddleNLP.

    python -m extensions.import_config llama3_lora_sft.yaml -o conf/mine.yaml
    python -m extensions.import_config train.sh --project ms-swift -o conf/mine.yaml

Theirs is YAML, JSON, or a script with their command. What has no counterpart is named, with the key that takes its
place, on the screen and at the top of the file. README.md, next to this file, has the tables.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from console import pluralize
from errors import UserError, exit_with_message
from extensions.import_config.importer import PROJECTS, Imported, import_config, take_layout, write_config
from filesystem import check_new_file
from interpreter import check_interpreter
from training.cli.command_line import check_command_line
from training.cli.plan_process import ask_plan
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import CONF, register_schema, to_typed
from training.config.validate import check_config


def find_refusal(imported: Imported) -> str:
    """Return why a run of the imported config would be refused, by all that is checked without its files and machine;
    empty where it would not be. Raises UserError for a value that no run reads, such as text for a number."""
    with TemporaryDirectory() as folder:
        register_schema()
        composed = check_command_line(write_config(imported, folder), CONF, "base")
    assert composed is not None
    config = to_typed(composed, unread=("model_name_or_path", "train_file"))
    try:
        check_config(config, has_accelerator=True)
        check_together(CheckedConfig(config))
    except UserError as error:
        return str(error)
    return ""


def propose_layout(imported: Imported, num_gpus: int, hardware: str) -> tuple[Imported, str]:
    """Return the config at the fastest layout that fits by `plan=search`, and a line that says so; as it is where none
    is found."""
    with TemporaryDirectory() as folder:
        words = [str(CONF.parent / "trainer_base_ds_mp.py"), *write_config(imported, folder), f"hardware={hardware}"]
        overrides, reason = ask_plan(words, "search", num_gpus)
    if reason:
        return imported, f"no layout for {num_gpus} x {hardware} was found: {reason}"
    found = " ".join(overrides) or "the layout as it is"
    return take_layout(imported, overrides), f"for {num_gpus} x {hardware}, by plan=search: {found}"


def check_output(file: Path | None) -> None:
    """Raise UserError for a place where no config can be written, or found by its name."""
    if file is None:
        return
    check_new_file(file, "--output")
    if file.suffix != ".yaml":
        raise UserError(f"--output {file}: a config is found by the ending .yaml; give {file}.yaml")


def choose_words(file: Path) -> str:
    """Return the words of a command that choose a config."""
    place = file.resolve().parent
    return f"-cn {file.stem}" if place == CONF else f"--config-dir {shlex.quote(str(place))} -cn {file.stem}"


def list_notes(refusal: str, proposal: str) -> list[str]:
    return [*([proposal] if proposal else []), *([f"a run would refuse it: {refusal}"] if refusal else [])]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m extensions.import_config",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("theirs", type=Path, help="their config, or a script with their command")
    parser.add_argument("-o", "--output", type=Path, help="where to write ours; without it, it is printed")
    parser.add_argument("--project", choices=PROJECTS, help="whose config it is, where its keys do not tell")
    parser.add_argument("--num_gpus", type=int, help="choose the layout for that many GPUs, by plan=search")
    parser.add_argument("--hardware", help="with --num_gpus: their kind, one of conf/hardware")
    arguments = parser.parse_args()
    if (arguments.num_gpus is None) != (arguments.hardware is None):
        parser.error("--num_gpus and --hardware go together: a layout is chosen for GPUs of a kind")
    with exit_with_message():
        check_interpreter()
        check_output(arguments.output)
        imported = import_config(arguments.theirs, arguments.project)
        refusal = find_refusal(imported)
        proposal = ""
        if arguments.num_gpus is not None:
            imported, proposal = propose_layout(imported, arguments.num_gpus, arguments.hardware)
        chosen = choose_words(arguments.output or CONF / "mine.yaml")
        text = imported.render(chosen, arguments.theirs.name)
        if arguments.output is None:
            print(text, end="")
            for note in list_notes(refusal, proposal):
                print(note, file=sys.stderr)
            return
        arguments.output.write_text(text, encoding="utf-8")
    print(
        f"{arguments.output}: {pluralize(len(imported.keys) + len(imported.groups), 'key')}, from a config of "
        f"{imported.project}"
    )
    for key, why in imported.left.items():
        print(f"  not carried over: {key}: {why}")
    for note in list_notes(refusal, proposal):
        print(note)
    print(f"look at it, then: python trainer_base_ds_mp.py {chosen} plan=true world_size=N hardware=NAME")


if __name__ == "__main__":
    main()
