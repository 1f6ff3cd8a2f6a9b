"""The tree without extensions, and without each one of them: all else runs, and what belongs to one that is gone ends
in one line that names it.

The extensions are those of `extensions/table.py`: a new folder is covered as soon as it is there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file
from support.configs import REQUIRED, compose_config
from support.head_runs import save_documents, save_queries, save_steps, save_words
from support.launching import Ended, run, run_alone, run_deepspeed
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer
from support.workers import free_port
from test_extensions import list_keys, list_shipped
from test_structure import ROOT

from errors import UserError
from extension import Extension, find_plan, load_part
from extensions.table import TABLE
from training.cli.command_line import check_command_line, find_flag
from training.config.changed_keys import write_config
from training.config.schema import CONF, register_schema

EXTENSIONS = {each.name: each for each in list_shipped()}


def save_judged(file: Path, count: int) -> Path:
    """Answers of which every second one was liked."""
    records = [json.loads(line) for line in save_records(file, count).read_text().splitlines()]
    judged = (record | {"label": number % 2 == 0} for number, record in enumerate(records))
    file.write_text("".join(f"{json.dumps(record)}\n" for record in judged))
    return file


# Makes records of a kind of data: of one that an extension adds, those of a checkpoint that needs the extension
RECORDS: dict[str, Callable[[Path, int], Path]] = {
    "data=sft": save_records,
    "data=embedding": save_queries,
    "data=rerank": save_queries,
    "data=preference": save_pairs,
    "data=unpaired_preference": save_judged,
    "data=classification": save_documents,
    "data=token_classification": save_words,
    "data=process_reward": save_steps,
}
PARITY = "tests/training/parity"  # of two families, at pp2 and pp2 x dp2
PARITIES = (
    f"{PARITY}/test_parity.py::test_five_sgd_steps_equal_hugging_face[pp2-untied-plain]",
    f"{PARITY}/test_parity.py::test_five_sgd_steps_equal_hugging_face[pp2xdp2-untied-plain]",
    f"{PARITY}/test_family_parity.py::test_five_sgd_steps_equal_hugging_face[gemma2-pp2-False]",
    f"{PARITY}/test_family_parity.py::test_five_sgd_steps_equal_hugging_face[gemma2-pp2xdp2-False]",
)


def copy_tree(folder: Path) -> Path:
    """Returns a copy of the project as git knows it, without caches and outputs."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if (ROOT / name).is_file():  # a deleted file is listed until that is committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("copy") / "tree")


@contextmanager
def hidden(folder: Path, place: Path) -> Iterator[None]:
    """Moves a folder to a place where nothing looks for it, and back."""
    folder.rename(place)
    try:
        yield
    finally:
        place.rename(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder, num_hidden_layers=2)
    save_tokenizer(folder)
    return folder


def list_words(model: Path, folder: Path, *overrides: str, kind: str = "data=sft") -> list[str]:
    """Returns the words of a run of three steps in `folder`."""
    records = folder / "train.jsonl"
    if not records.exists():
        RECORDS[kind](records, 24)
    return [
        "-cn", "llama_tiny_pp2", kind, f"model_name_or_path={model}", f"train_file={records}", "eval_file=null",
        f"output_dir={folder / 'out'}", f"data.cache_dir={folder / 'cache'}", "micro_batch_size=2",
        "global_batch_size=4", "max_seq_length=256", "max_steps=3", *overrides,
    ]  # fmt: skip


def check_finished(ended: Ended, output_dir: Path) -> None:
    assert (ended.code, ended.errors(), ended.left_alive) == (0, [], []), ended.output
    assert (output_dir / "checkpoints/global_step3").is_dir() and load_file(output_dir / "hf/model.safetensors")


def test_the_core_runs_without_extensions(tree: Path, model: Path, tmp_path: Path) -> None:
    """On one rank; the long suite starts several, and the launcher."""
    with hidden(tree / "extensions", tmp_path / "hidden"):
        ended = run_alone(list_words(model, tmp_path, "num_stages=1"), tmp_path, root=tree)
        check_finished(ended, tmp_path / "out")


@pytest.mark.parametrize(
    "words", [["gone.a=1"], ["gone=1"], ["logger=gone"], ["data.gone_field=a"], ["-cn", "gone_run"], ["--gone", "a=1"]]
)
def test_what_belongs_to_one_that_is_gone_is_named(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "extensions.table.TABLE", {"gone": ("gone", "gone.", "logger=gone", "data.gone_field", "gone_run", "--gone")}
    )
    register_schema()
    with pytest.raises(
        UserError, match=r"gone\w*'? belongs to the extension 'gone', and the folder extensions/gone is"
    ):
        check_command_line(words, CONF, "base")


def test_hydras_multirun_is_named_where_nothing_runs_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.cli.command_line.list_flags", dict)
    with pytest.raises(UserError, match="^--multirun: no extension runs several; "):
        find_flag(["-m", "seed=1,2"])
    monkeypatch.setattr("extensions.table.TABLE", {"gone": ("--multirun",)})
    with pytest.raises(UserError, match="^--multirun belongs to the extension 'gone', and"):
        find_flag(["--multirun", "seed=1,2"])
    assert find_flag(["seed=1"]) is None
    register_schema()
    with pytest.raises(UserError, match=r"^seed=1,2 is several values; write seed=\[1,2\] for a list$"):
        check_command_line(["seed=1,2"], CONF, "base")


def test_a_plan_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extensions.table.TABLE", {"gone": ("plan=gone",)})
    with pytest.raises(UserError, match="^plan=gone belongs to the extension 'gone', and"):
        find_plan("gone")


@pytest.mark.full
def test_the_demo_runs_resumes_and_is_exported_without_extensions(tree: Path, tmp_path: Path) -> None:
    with hidden(tree / "extensions", tmp_path / "hidden"):
        demo = ["env", f"MASTER_PORT={free_port()}", "bash", "scripts/quickstart.sh", "max_steps=12", "eval_steps=6"]
        ended = run(demo, tree)
        assert (ended.code, ended.errors(), ended.left_alive) == (0, [], []), ended.output
        resumed = run_deepspeed(["-cn", "llama_tiny_pp2", "max_steps=14", "resume=latest"], tree, root=tree)
        assert (resumed.code, resumed.errors()) == (0, []), resumed.output
        to_hf = ["--to_hf", "--model_name_or_path", "outputs/demo/checkpoints", "--output_dir", "outputs/exported"]
        exported = run([sys.executable, "convert2ckpt.py", *to_hf], tree)
        assert exported.code == 0, exported.output
    ours, theirs = (load_file(tree / "outputs" / name / "model.safetensors") for name in ("exported", "demo/hf"))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.full
def test_parity_without_extensions(tree: Path, tmp_path: Path) -> None:
    with hidden(tree / "extensions", tmp_path / "hidden"):
        ended = run([sys.executable, "-m", "pytest", f"--basetemp={tmp_path / 'inner'}", *PARITIES], tree)
    assert ended.code == 0 and f"{len(PARITIES)} passed" in ended.output, ended.output


def list_uses(extension: Extension) -> Iterator[list[str]]:
    """Yields command lines that use what an extension offers: its configs, choices, values and keys."""
    configs = {file.stem for file in extension.conf.glob("*.yaml")}
    groups = {key: [each.name for each in fields(load_part(place))] for key, place in extension.keys.items()}
    for each in TABLE[extension.name]:
        if each in configs:
            yield ["-cn", each]
        elif "=" in each:
            yield ["-cn", "llama_tiny_pp2", each]
    for key in list_keys(extension):
        yield from ([f"{key}.{name}=1"] for name in groups.get(key, ()))
        yield [f"{key}=1"]


def save_configs(extension: Extension, folder: Path) -> Iterator[list[str]]:
    """Saves what config.yaml holds of runs with an extension, one of each group of choices and each of its configs.
    Yields command lines that start from one."""
    choices = {each.partition("=")[0]: [each] for each in TABLE[extension.name] if "=" in each}
    starts = [("llama_tiny_pp2", choice) for choice in choices.values()]
    starts += [(file.stem, []) for file in extension.conf.glob("*.yaml")]
    for number, (name, choice) in enumerate(starts if starts or not extension.keys else [("llama_tiny_pp2", [])]):
        config = OmegaConf.to_object(compose_config(name, *REQUIRED, *choice))
        (folder / f"saved_{number}.yaml").write_text(f"defaults: [base, _self_]\n{write_config(config)}")
        yield ["--config-dir", str(folder), "-cn", f"saved_{number}"]


def import_former(module: str, tree: Path, folder: Path) -> Ended:
    """Looks for a `_target_` in a module, as the trainer of `tree` does."""
    code = (
        f"import sys; sys.path.insert(0, {str(tree)!r})\n"
        "from data.components import find_component\n"
        "from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error\n"
        f"with exit_on_user_error(SINGLE_PROCESS): find_component('{module}.Thing', 'logger')"
    )
    return run([sys.executable, "-c", code], folder)


@pytest.fixture(scope="module")
def begun(tree: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the whole tree has begun: one step of three."""
    folder = tmp_path_factory.mktemp("begun")
    ended = run_deepspeed(list_words(model, folder, "stop_after_steps=1"), folder, root=tree)
    assert ended.code == 0, ended.output
    return folder


def check_refused(ended: Ended, name: str) -> None:
    """Asserts that a command has ended in one line, which says that the folder of an extension is not there."""
    assert ended.code == 1 and "Traceback" not in ended.output and len(ended.errors()) == 1, ended.output
    assert f"belongs to the extension '{name}', and the folder extensions/{name} is not there" in ended.errors()[0]


@pytest.mark.full
@pytest.mark.parametrize("name", TABLE)
def test_without_one_extension(name: str, tree: Path, model: Path, begun: Path, tmp_path: Path) -> None:
    extension = EXTENSIONS[name]
    own = {kind: tmp_path / kind.partition("=")[2] for kind in TABLE[name] if kind.startswith("data=")}
    for kind, folder in own.items():  # checkpoints that need it
        folder.mkdir()
        assert run_deepspeed(list_words(model, folder, "stop_after_steps=1", kind=kind), folder, root=tree).code == 0
    refused = [
        *list_uses(extension),
        *(list_words(model, folder, "resume=latest", kind=kind) for kind, folder in own.items()),
    ]
    refused += [words + list_words(model, tmp_path, "num_stages=1")[3:] for words in save_configs(extension, tmp_path)]

    with hidden(tree / "extensions" / name, tmp_path / "hidden"):
        for words in refused:
            check_refused(run_alone(words, tmp_path, root=tree), name)
        for folder in own.values():
            to_hf = [
                "--to_hf",
                "--model_name_or_path",
                f"{folder}/out/checkpoints",
                "--output_dir",
                f"{folder}/exported",
            ]
            converted = run([sys.executable, str(tree / "convert2ckpt.py"), *to_hf], folder)
            assert "Traceback" not in converted.output and len(converted.errors()) == converted.code, converted.output
        for module in extension.aliases:
            check_refused(import_former(module, tree, tmp_path), name)

        shutil.copytree(begun, tmp_path / "begun")
        resumed = run_deepspeed(list_words(model, tmp_path / "begun", "resume=latest"), tmp_path, root=tree)
        check_finished(resumed, tmp_path / "begun/out")
