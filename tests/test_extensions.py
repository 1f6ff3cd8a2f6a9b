"""Extensions: found, searched, hidden and named; the core names none of them."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launching import run_deepspeed
from support.tiny import save_llama, save_records, save_tokenizer
from test_structure import IMPORTS, MODULES, ROOT, SOURCES

from data.components import find_component
from errors import UserError
from extension import OWN_FOLDERS, Extension, load_extensions

CORE = ("models/", "data/", "training/")


def list_shipped() -> list[Extension]:
    return [each for each in load_extensions() if each.is_shipped]


def list_offered(extension: Extension) -> set[str]:
    """Returns what an extension offers, in the form of `extensions/table.py`."""
    files = [file.relative_to(extension.conf) for file in extension.conf.rglob("*.yaml")]
    choices = {f"{file.parent.as_posix()}={file.stem}" if file.parent.parts else file.stem for file in files}
    return {
        *choices,
        *extension.aliases,
        *(f"plan={value}" for value in extension.plans),
        *extension.keys,
        *(f"{key}." for key in extension.keys),
    }


def test_the_table_has_what_is_declared() -> None:
    from extensions.table import TABLE

    assert {each.name: list_offered(each) for each in list_shipped()} == {
        name: set(offered) for name, offered in TABLE.items()
    }


def list_words(extension: Extension) -> set[str]:
    """Returns the names by which a source could mean an extension: what it offers, the values in that (`search` of
    `plan=search`), its own name and its classes."""
    offered = list_offered(extension)
    trees = (ast.parse(file.read_text()) for file in extension.folder.rglob("*.py"))
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {f"extensions.{extension.name}", *offered, *(each.partition("=")[2] or each for each in offered), *classes}


def list_named(source: str) -> Iterator[str]:
    """Yields the imported names, classes and words of texts of a source, without docstrings and comments."""
    tree = ast.parse((ROOT / source).read_text())
    yield from IMPORTS[source]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def find_named(text: str, words: set[str]) -> set[str]:
    """Returns the words that a name or a text is, and those with a `=` or a dot that it holds, `hub.` before a name."""
    ends = {word: r"\w" if word.endswith(".") else r"\b" for word in words if re.search(r"[=.]", word)}
    held = {word for word, end in ends.items() if re.search(rf"(?<![\w.]){re.escape(word)}{end}", text)}
    return held | ({text} & words)


def test_a_name_is_found() -> None:
    words = {"search", "plan=search", "extensions.search", "Candidate", "hub."}
    assert find_named("give hub.every=5", words) == {"hub."}
    assert find_named("models.storage.hub.find", words) == find_named("of the hub. It is", words) == set()
    assert find_named("or let plan=search look", words) == {"plan=search"}
    assert find_named("extensions.search.run", words) == {"extensions.search"}
    assert find_named("Candidate", words) == {"Candidate"} and find_named("search", words) == {"search"}
    assert find_named("the search for the best starts again", words) == find_named("plan=searching", words) == set()


@pytest.mark.parametrize("extension", list_shipped(), ids=lambda each: each.name)
def test_the_core_does_not_name_it(extension: Extension) -> None:
    core = [source for source in SOURCES if source.startswith(CORE)]
    words = list_words(extension)
    named = {source: {word for text in list_named(source) for word in find_named(text, words)} for source in core}
    assert len(core) > 300 and {source: found for source, found in named.items() if found} == {}


def test_nothing_imports_an_extension_and_none_another() -> None:
    for source in SOURCES:
        here = source.split("/")[1] if source.startswith("extensions/") else ""
        others = {name.split(".")[1] for name in IMPORTS[source] if name.startswith("extensions.")}
        assert others <= {here, *(["table"] if source == "extension.py" else [])}, source
    assert sum(module.startswith("extensions.") for module in MODULES) > 10


def test_a_module_that_has_moved_is_found_under_its_former_name() -> None:
    load_extensions()
    for extension in list_shipped():
        for former, now in extension.aliases.items():
            with pytest.warns(FutureWarning, match=f"^{re.escape(former)} is {re.escape(now)} now"):
                sys.modules.pop(former, None)
                moved = importlib.import_module(former)
            assert moved is importlib.import_module(now)
            assert moved.__name__ == now and moved.__spec__ is not None and moved.__spec__.name == now


# An extension that uses every field of `Extension`
MINE = {
    "extension.py": """
        from pathlib import Path
        from extension import Extension
        EXTENSION = Extension(
            folder=Path(__file__).parent,
            keys={"mine": "mine.keys:MineConfig"},
            readers="mine.readers:READERS",
            receiver="mine.receiver:Mine",
            plans={"mine": "mine.plan:plan"},
            refusals="mine.readers:ROWS",
            commands={"python -m mine.count RUN": "counts its lines"},
            hints={"use_mine": "logger=mine"},
            aliases={"former_place": "mine.tracker"},
        )
    """,
    "keys.py": """
        from dataclasses import dataclass
        from training.config.ranges import at_least
        @dataclass
        class MineConfig:
            file: str | None = None
            every: int = at_least(1, default=2)
    """,
    "readers.py": """
        from mine.keys import MineConfig
        from training.config.incompatible import FP16, Feature
        TAKEN = Feature("mine.file", lambda run: run.config.read_group(MineConfig).file is not None)
        READERS = {"mine.every": TAKEN}
        ROWS = ((TAKEN, {FP16: "it is too small; use precision=bf16"}),)
    """,
    "receiver.py": """
        from mine.keys import MineConfig
        from training.export_receiver import ExportReceiver
        class Mine(ExportReceiver):
            name, is_busy = "mine", False
            def __init__(self, file): self.file = file
            @classmethod
            def open(cls, config, run):
                file = config.read_group(MineConfig).file
                return None if file is None else cls(file)
            @classmethod
            def is_due(cls, config, step):
                mine = config.read_group(MineConfig)
                return mine.file is not None and step % mine.every == 0
            @classmethod
            def takes_steps(cls, config): return config.read_group(MineConfig).file is not None
            def start(self, folder, message):
                with open(self.file, "a") as lines:
                    lines.write(f"{message}: {(folder / 'config.json').is_file()}\\n")
            def wait(self): pass
    """,
    "plan.py": """
        def plan(config, width):
            yield f"mine plans {config.num_stages} stages"
    """,
    "tracker.py": """
        class Mine:
            package = None
            def __init__(self, file): self.file = file
            def start(self, run, params):
                self.out = open(self.file, "a", buffering=1)
                return self.file
            def log_metrics(self, figures, step): self.out.write(f"{step}\\n")
            def log_file(self, file): pass
            def close(self): self.out.close()
    """,
    "conf/logger/mine.yaml": "trackers: {mine: {_target_: former_place.Mine, file: mine.txt}}\n",
    "conf/mine_tiny.yaml": "defaults: [llama_tiny_pp2, override logger: mine, _self_]\nmax_steps: 3\n",
}


def write_mine(folder: Path) -> Path:
    for name, text in MINE.items():
        file = folder / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder / "mine"


def run(*words: str, root: Path = ROOT, cwd: Path | None = None, own: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the training command of a copy of the project."""
    return subprocess.run(
        [sys.executable, str(root / "trainer_base_ds_mp.py"), *words],
        cwd=cwd or root,
        env={**os.environ, OWN_FOLDERS: own, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_one_outside_of_the_tree_has_configs_choices_hints_and_commands(tmp_path: Path) -> None:
    mine = str(write_mine(tmp_path))
    composed = run("-cn", "mine_tiny", "--cfg", "job", own=mine)
    assert "_target_: former_place.Mine" in composed.stdout and "max_steps: 3" in composed.stdout, composed.stderr
    assert "python -m mine.count RUN" in run("--help", own=mine).stdout
    assert "did you mean 'logger=mine'" in run("use_mine=1", own=mine).stderr
    without = run("-cn", "mine_tiny")
    assert without.returncode and "there is no conf/mine_tiny.yaml" in without.stderr


def replace_in(old: str, new: str) -> Callable[[Path], object]:
    """Returns what changes the declaration of an extension."""

    def change(folder: Path) -> None:
        file = folder / "extension.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "extension.py").unlink(), "has no extension.py"),
        (lambda folder: folder.rename(folder.with_name("json")), "there is a package json already"),
        (lambda folder: folder.rename(folder.with_name("data")), "there is a package data already"),
        (lambda folder: folder.rename(folder.with_name("a.b")), "there is a package a.b already; rename the folder"),
        (lambda folder: (folder / "extension.py").write_text("EXTENSION = 1\n"), "it has to set EXTENSION"),
        (lambda folder: (folder / "extension.py").write_text("1 / 0\n"), "cannot be imported (ZeroDivisionError: "),
        (replace_in("keys=", "keyz="), "unexpected keyword argument 'keyz'); correct it"),
        (replace_in("hints={", "hints=None and {"), "(TypeError: hints=None is not a Mapping); correct it"),
        (replace_in('"mine": "mine.plan', '"search": "mine.plan'), "search and mine both offer plan=search"),
        (replace_in('"mine": "mine.keys', '"seed": "mine.keys'), "adds the key seed, which the project has"),
    ],
)
def test_a_folder_that_is_none_ends_in_one_line(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write_mine(tmp_path)
    change(tmp_path / "mine")
    (folder,) = tmp_path.iterdir()
    done = run("--help", own=str(folder))
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("first", "choice"),
    [("conf/logger/wandb.yaml", "logger=wandb"), ("conf/llama_tiny_pp2.yaml", "-cn llama_tiny_pp2")],
)
def test_a_config_that_there_is_already_is_named_with_both_files(first: str, choice: str, tmp_path: Path) -> None:
    file = write_mine(tmp_path) / first
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}\n")
    done = run("--help", own=str(tmp_path / "mine"))
    assert done.returncode == 1 and f"{ROOT / first} and {file} are both {choice}; rename one" in done.stderr


def test_two_of_a_users_extensions_with_one_choice_are_named(tmp_path: Path) -> None:
    mine = write_mine(tmp_path)
    other = shutil.copytree(mine, tmp_path / "other")
    declared = "from pathlib import Path\nfrom extension import Extension\n"
    (other / "extension.py").write_text(f"{declared}EXTENSION = Extension(folder=Path(__file__).parent)\n")
    done = run("--help", own=f"{mine}{os.pathsep}{other}")
    assert done.returncode == 1 and f" and {other}/conf/" in done.stderr and "; rename one" in done.stderr


def test_several_in_one_folder_named_twice_by_a_link_and_on_the_path(tmp_path: Path) -> None:
    mine = write_mine(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    declared = "from pathlib import Path\nfrom extension import Extension\n"
    (other / "extension.py").write_text(f"{declared}EXTENSION = Extension(folder=Path(__file__).parent)\n")
    (tmp_path / "linked").symlink_to(other)
    own = os.pathsep.join([str(mine), f" {other}/ ", str(mine), str(tmp_path / "linked")])
    environment = {**os.environ, OWN_FOLDERS: own, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    code = "from extension import list_own_names; print(list_own_names())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "['mine', 'other', 'linked']\n", done.stderr


def copy_tree(folder: Path) -> Path:
    """Returns a copy of what a clone has, without tests and pages."""
    for name in ("conf", "data", "models", "training", "extensions", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(file, folder)
    return folder


def test_a_run_without_extensions_is_planned_and_what_belongs_to_one_is_named(tmp_path: Path) -> None:
    root = copy_tree(tmp_path)
    shutil.rmtree(root / "extensions" / "trackers")
    done = run("-cn", "llama_tiny_pp2", "logger=comet", root=root)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "error: logger=comet belongs to the extension 'trackers', and the folder extensions/trackers is not there",
    )
    shutil.rmtree(root / "extensions")
    planned = ("plan=true", "world_size=2", "hardware=l40s", "model=llama_7b", f"output_dir={tmp_path / 'out'}")
    done = run("-cn", "llama_7b_pp4", *planned, "num_stages=2", root=root)
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["extensions.gone.tracker.Gone", "gone_before.Gone"])
def test_a_target_in_a_removed_one_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extensions.table.TABLE", {"gone": ("gone_before",)})
    with pytest.raises(UserError, match=f"^logger.trackers.x: _target_={name} belongs to the extension 'gone', and"):
        find_component(name, "logger.trackers.x")


@pytest.mark.full
def test_one_outside_of_the_tree_has_keys_plans_and_refusals(tmp_path: Path) -> None:
    mine = str(write_mine(tmp_path))
    assert "mine.every=0: at least 1" in run("-cn", "mine_tiny", "plan=mine", "mine.every=0", own=mine).stderr
    planned = run("-cn", "mine_tiny", "plan=mine", "model=llama_7b", own=mine)
    assert planned.stdout.splitlines()[-1:] == ["mine plans 2 stages"], planned.stderr
    refused = run("-cn", "mine_tiny", "plan=mine", "model=llama_7b", "mine.file=x", "precision=fp16", own=mine)
    assert "error: mine.file does not go together with precision=fp16: it is too small" in refused.stderr
    unread = run("-cn", "mine_tiny", "plan=mine", "model=llama_7b", "mine.every=3", own=mine)
    assert "mine.every=3: this run does not read it, only one with mine.file does" in unread.stderr


@pytest.mark.full
def test_a_run_is_resumed_with_its_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    save_records(tmp_path / "train.jsonl", 40)
    words = [
        "-cn", "mine_tiny", f"model_name_or_path={tmp_path / 'model'}", f"train_file={tmp_path / 'train.jsonl'}",
        "eval_file=null", f"output_dir={tmp_path / 'out'}", "stop_after_steps=1",
    ]  # fmt: skip
    monkeypatch.setenv(OWN_FOLDERS, str(write_mine(tmp_path)))
    first = run_deepspeed([*words, f"mine.file={tmp_path / 'taken.txt'}", "mine.every=1"], tmp_path)
    assert (tmp_path / "taken.txt").read_text() == "step 1: True\nstep 1: True\n", first.output
    assert first.code == 0 and (tmp_path / "mine.txt").read_text().split()[0] == "1", first.output
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())["environment"]["extensions"]
    assert recorded == {"mine": str(tmp_path / "mine")}
    words = ["-cn", "llama_tiny_pp2", *words[2:], "max_steps=3", "resume=latest"]
    monkeypatch.delenv(OWN_FOLDERS)
    refused = run_deepspeed(words, tmp_path)
    assert refused.code and "was trained with the extensions mine; name their folders in" in refused.output
    went_on = run_deepspeed([*words, "resume_allow_changes=true"], tmp_path)
    assert went_on.code == 0 and "global_step2" in {each.name for each in (tmp_path / "out/checkpoints").iterdir()}
