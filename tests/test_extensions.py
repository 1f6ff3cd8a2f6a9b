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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from support.launching import SECONDS, Ended, run_deepspeed
from support.tiny import save_llama, save_records, save_tokenizer
from test_structure import IMPORTS, MODULES, ROOT, SOURCES, read_imports

from data.components import find_component
from errors import UserError
from extension import OWN_FOLDERS, Extension, list_options, load_extensions, load_part
from training.config.schema import RunConfig

# Of an extension: words that mean something else in the core, with what that is
HOMONYMS: dict[str, dict[str, str]] = {
    "preferences": {"preference": "of a backward pass that starts later, in the schedule of zero bubbles"},
    "retrieval": dict.fromkeys(("embedding", ".embedding"), "the layer that looks tokens up"),
    "sweep": {"--multirun": "an option of Hydra's, which parses it"},
}
COMMANDS = {"benchmarks/heads.py"}  # trains what an extension adds


def list_shipped() -> list[Extension]:
    return [each for each in load_extensions() if each.is_shipped]


def list_offered(extension: Extension) -> set[str]:
    """Returns what an extension offers, in the form of `extensions/table.py`."""
    files = [file.relative_to(extension.conf) for file in extension.conf.rglob("*.yaml")]
    choices = {f"{file.parent.as_posix()}={file.stem}" if file.parent.parts else file.stem for file in files}
    own = {each.name for each in fields(RunConfig)}
    groups = extension.keys.keys() - own
    return {
        *choices,
        *extension.aliases,
        *extension.actions,
        *extension.flags,
        *list_options(extension),
        *(f"plan={value}" for value in extension.plans),
        *groups,
        *(f"{key}." for key in groups),
        *(
            f"{key}.{each.name}"
            for key in extension.keys.keys() & own
            for each in fields(load_part(extension.keys[key]))
        ),
        *(f"task={each.name}" for each in load_named(extension.objectives)),
    }


def load_named(place: str) -> tuple[Any, ...]:
    return load_part(place) if place else ()


def test_the_table_has_what_is_declared() -> None:
    from extensions.table import TABLE

    assert {each.name: list_offered(each) for each in list_shipped()} == {
        name: set(offered) for name, offered in TABLE.items()
    }


def list_keys(extension: Extension) -> set[str]:
    """Returns the keys of a run that an extension adds, groups by their names alone."""
    others = {*extension.aliases, *(file.stem for file in extension.conf.glob("*.yaml"))}
    offered = list_offered(extension) - others
    return {each for each in offered if "=" not in each and not each.endswith(".") and not each.startswith("--")}


def list_names(value: object) -> Iterator[str]:
    """Yields the names in the value of a seam: of a mapping or a sequence, or of the one that "module:name" names."""
    part = load_part(value) if isinstance(value, str) and ":" in value else value
    if isinstance(part, Mapping):
        yield from part
    elif isinstance(part, list | tuple):
        yield from (each if isinstance(each, str) else getattr(each, "name", "") for each in part)


def list_words(extension: Extension) -> set[str]:
    """Returns the names by which a source could mean an extension: its own, what it offers, the values in that
    (`search` of `plan=search`), its keys as attributes (`.hub`), the names in each of its seams, and its classes."""
    offered = list_offered(extension)
    keys = {each.rpartition(".")[2] for each in list_keys(extension)}
    seams = {name for each in fields(Extension) for name in list_names(getattr(extension, each.name))}
    trees = (ast.parse(file.read_text()) for file in extension.folder.rglob("*.py"))
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    words = {f"extensions.{extension.name}", *offered, *(each.partition("=")[2] for each in offered)}
    words |= keys | {f".{key}" for key in keys} | seams | classes
    return (
        words - {each.name for each in fields(RunConfig)} - {""}
    )  # a key of the core's, which an extension may extend


@cache
def list_named(file: Path) -> frozenset[str]:
    """Returns what a source names: imports, classes and what is set in them, attributes, keywords, and texts other than
    docstrings; of a config its keys and texts."""
    if file.suffix == ".yaml":
        return frozenset(list_yaml(yaml.safe_load(file.read_text())))
    tree = ast.parse(file.read_text())
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = set(read_imports(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            set_in = (each for item in node.body for each in getattr(item, "targets", [getattr(item, "target", None)]))
            named |= {node.name, *(each.id for each in set_in if isinstance(each, ast.Name))}
        elif isinstance(node, ast.Attribute):
            named.add(f".{node.attr}")
        elif isinstance(node, ast.keyword):
            named.add(node.arg or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            named.add(node.value)
    return frozenset(named)


def list_yaml(value: object) -> Iterator[str]:
    """Yields the keys and texts in a YAML value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from list_yaml(each)


def find_named(texts: Iterable[str], words: set[str]) -> set[str]:
    """Returns the words that a name or a text is, and those with a `=` or a dot within that it holds, `hub.` before a
    name."""
    held = [re.escape(word) + (r"\w" if word.endswith(".") else r"\b") for word in words if re.search(r"\w[=.]", word)]
    holds = re.compile(rf"(?<![\w.])({'|'.join(held)})")
    return {text for text in texts if text in words or holds.search(text)}


def test_a_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"search", "plan=search", "extensions.search", "Candidate", "hub.", ".hub"}
    found = {"give hub.every=5", "or let plan=search look", "extensions.search.run", "Candidate", "search", ".hub"}
    others = {"models.hub.find", "of the hub. It is", "the search starts again", "plan=searching", ".hubs", "re.search"}
    assert find_named(found | others, words) == found

    monkeypatch.setattr("test_structure.ROOT", tmp_path)
    source, config = tmp_path / "a.py", tmp_path / "a.yaml"
    source.write_text(
        '"""Not read."""\nfrom b import C  # not read\nclass D:\n    "Not read."\n    e: int = 1\n    f = C.g(h="i")\n'
        '    """Not read."""\n'
    )
    assert list_named(source) == {"b.C", "D", "e", "f", ".g", "h", "i"}
    config.write_text("defaults: [base, override j: k]\nl: {m: [n, 1]}  # not read\n")
    assert list_named(config) == {"defaults", "base", "override j", "k", "l", "m", "n"}


@pytest.mark.parametrize("extension", list_shipped(), ids=lambda each: each.name)
def test_the_core_does_not_name_it(extension: Extension) -> None:
    sources = [source for source in SOURCES if not source.startswith("extensions/") and source not in COMMANDS]
    core = [*(ROOT / source for source in sources), *(ROOT / "conf").rglob("*.yaml")]
    homonyms = HOMONYMS.get(extension.name, {})
    words = list_words(extension)
    assert homonyms.keys() <= words and len(core) > 400
    named = {file: find_named(list_named(file), words - homonyms.keys()) for file in core}
    assert {str(file.relative_to(ROOT)): found for file, found in named.items() if found} == {}
    assert all(any(word in list_named(file) for file in core) for word in homonyms)


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
            keys={"mine": "mine.keys:MineConfig", "data": "mine.keys:MineData"},
            readers="mine.readers:READERS",
            data_kinds="mine.kinds:KINDS",
            objectives="mine.objectives:OBJECTIVES",
            modifiers="mine.modifier:MODIFIERS",
            heads="mine.head:HEADS",
            model_files=("mine.json",),
            receiver="mine.receiver:Mine",
            actions={"mine_only": "mine.plan:count"},
            facts="mine.plan:describe",
            plans={"mine": "mine.plan:plan"},
            flags={"--mine_alone": "mine.plan:run"},
            options={"--mine": "adds a word to each start", "--mine_word WORD": "which one"},
            starter="mine.starts:add_word",
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
            entropy: float = 0.0
        @dataclass
        class MineData:
            mine_field: str = "completion"
    """,
    "kinds.py": """
        from dataclasses import dataclass
        from data.encoders.kind import DataKind
        from data.encoders.sft import SFTEncoder
        @dataclass(frozen=True)
        class MineEncoder(SFTEncoder):
            mine_field: str = "completion"
            def encode(self, record, location, tokenizer, counts=None):
                completion = record[self.mine_field]
                return super().encode({**record, "completion": completion}, location, tokenizer, counts)
        KINDS = (DataKind("lines", MineEncoder, task="lines"),)
    """,
    "objectives.py": """
        from mine.keys import MineData
        from training.objectives.next_token import SFT
        class Files:
            def __init__(self, field): self.field = field
            def save(self, folder): (folder / "mine.json").write_text(self.field)
            def check(self, folder): pass
        class Mine(SFT):
            name = "lines"  # the keys of a group of its name would be read by its runs alone
            def exports(self, config, hidden_size): return Files(config.read_group(MineData).mine_field)
        OBJECTIVES = (Mine(),)
    """,
    "modifier.py": """
        from dataclasses import replace
        from mine.keys import MineConfig
        from models.losses.metric_sums import MetricSums
        from training.objectives.objective import Modifier
        class Entropy:
            def __init__(self, coef): self.coef, self.sums = coef, MetricSums("mine_entropy")
            def open(self, targets): return self
            def __call__(self, chunk):
                logs = chunk.log_probabilities
                terms = logs.exp() * logs
                entropy = -terms.sum(dim=-1, keepdim=True)
                self.sums.add(entropy.sum()[None], len(logs))
                return terms.add_(logs.exp() * entropy).mul_(self.coef) if chunk.needs_gradient else None
        class Mine(Modifier):
            key, metrics = "mine.entropy", ("mine_entropy",)
            def read(self, config): return config.read_group(MineConfig).entropy
            def change(self, loss, config, stage): return replace(loss, terms=(Entropy(self.read(config)), *loss.terms))
        MODIFIERS = (Mine(),)
    """,
    "head.py": """
        from transformers import LlamaConfig, LlamaForSequenceClassification
        from models.heads.head import Head, ProjectionHead
        HEADS = (
            Head(
                words="model of mine", loaded_with="AutoModel", ending="ForMine", module=ProjectionHead,
                classes={LlamaConfig: LlamaForSequenceClassification}, prefix="mine.", peft_task="SEQ_CLS",
            ),
        )
    """,
    "conf/data/lines.yaml": "defaults: [shared/every_kind@_here_, _self_]\nname: lines\nprompt_field: prompt\n"
    'completion_field: completion\nprompt_template: "{prompt}"\nmessages_field: messages\ntext_field: text\n',
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
        def run(script, arguments, config_name):
            print(f"mine runs {script.name} {' '.join(arguments)} {config_name}")
            return 3
        def describe(config, hosts):
            return {"mine": {"summary": f"{config.num_stages} stages on {len(hosts)} ranks"}}
        def count(config, ranks, given):
            print(f"mine counts {config.num_stages} stages, {'mine_only' in given}")
    """,
    "starts.py": """
        from errors import UserError
        def add_word(values, say):
            if values.mine_word == "never":
                raise UserError("mine never starts")
            say(f"mine: {values.mine_word}")
            return (lambda command: [*command, values.mine_word]) if values.mine else None
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


def run(*words: str, own: str = "", script: str = "trainer_base_ds_mp.py") -> subprocess.CompletedProcess[str]:
    """Runs a command of the project with the extensions of `own`."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=ROOT,
        env={**os.environ, OWN_FOLDERS: own, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def supervise(*words: str, root: Path = ROOT, own: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the supervisor of a copy of the project around a command that prints its arguments and fails."""
    with TemporaryDirectory() as folder:
        code = "import sys; print('started with', *sys.argv[1:] or ['']); sys.exit(1)"
        around = ["--output_dir", folder, "--max_restarts", "0", *words, "--", sys.executable, "-c", code]
        return subprocess.run(
            [sys.executable, str(root / "scripts" / "supervise.py"), *around],
            env={**os.environ, OWN_FOLDERS: own},
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
        (replace_in('"mine_only": ', '"seed": '), "adds the key seed, which the project has"),
        (replace_in('"--mine": ', '"--elastic": '), "the extensions elastic and mine both offer --elastic"),
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


def test_a_supervisor_has_options_of_extensions(tmp_path: Path) -> None:
    mine = str(write_mine(tmp_path))
    assert "--mine_word WORD" in supervise("--help", own=mine).stdout
    started = supervise("--mine", "--mine_word", "given", own=mine)
    assert "started with given" in started.stdout and "supervise: mine: given" in started.stderr, started.stderr
    assert "started with \n" in supervise("--mine_word", "given", own=mine).stdout
    for words in (["--mine_word", "never"], ["--mine_words_of_none"]):
        refused = supervise(*words, own=mine)
        message = "mine never starts" if "never" in words else "unrecognized arguments: --mine_words_of_none"
        assert refused.returncode == 2 and message in refused.stderr and "started" not in refused.stdout


@pytest.mark.parametrize("name", ["extensions.gone.tracker.Gone", "gone_before.Gone"])
def test_a_target_in_a_removed_one_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extensions.table.TABLE", {"gone": ("gone_before",)})
    with pytest.raises(UserError, match=f"^logger.trackers.x: _target_={name} belongs to the extension 'gone', and"):
        find_component(name, "logger.trackers.x")


@dataclass(frozen=True)
class Life:
    """The traces of the extension `mine`, from its start to its removal. Texts are what commands printed."""

    folder: Path
    help: str
    hint: str
    plan: str
    refused: str
    unread: str
    out_of_range: str
    acted: str
    in_place: str
    restarted: str
    supervisor: str
    described: str
    begun: Ended
    resumed: Ended
    recorded: dict[str, str]  # the extensions in run.json
    after_removal: dict[str, subprocess.CompletedProcess[str]]  # its folder named, not named, an export
    continued: Ended
    with_its_data: Ended  # trained on its data, by its objective

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Trains with an extension from outside of the tree, resumes with it, removes it, and continues without."""
    folder = tmp_path_factory.mktemp("life")
    save_llama(folder / "model")
    save_tokenizer(folder / "model")
    save_records(folder / "train.jsonl", 40)
    mine, out = str(write_mine(folder)), folder / "out"
    planned = ("-cn", "mine_tiny", "plan=mine", "model=llama_7b")
    words = [
        f"model_name_or_path={folder / 'model'}", f"train_file={folder / 'train.jsonl'}", "eval_file=null",
        f"output_dir={out}", f"data.cache_dir={folder / 'cache'}", "logging_steps=1",
    ]  # fmt: skip
    taking = ["-cn", "mine_tiny", *words, f"mine.file={folder / 'taken.txt'}", "mine.every=1"]
    without = ["-cn", "llama_tiny_pp2", *words, "max_steps=3", "resume=latest"]
    texts = {
        "help": run("--help", own=mine).stdout,
        "hint": run("use_mine=1", own=mine).stderr,
        "plan": run(*planned, own=mine).stdout,
        "refused": run(*planned, "mine.file=x", "precision=fp16", own=mine).stderr,
        "unread": run(*planned, "mine.every=3", own=mine).stderr,
        "out_of_range": run(*planned, "mine.every=0", own=mine).stderr,
        "in_place": run("--mine_alone", "-cn", "mine_tiny", own=mine).stdout,
        "acted": run("-cn", "mine_tiny", *words, "mine_only=true", own=mine).stdout,
        "restarted": supervise("--mine", "--mine_word", "given", own=mine).stdout,
        "supervisor": supervise("--help", own=mine).stdout,
        "described": describe_head("LlamaForMine", own=mine),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OWN_FOLDERS, mine)
        begun = run_deepspeed([*taking, "stop_after_steps=1"], folder)
        resumed = run_deepspeed([*taking, "stop_after_steps=1", "resume=latest"], folder)
        recorded = json.loads((out / "run.json").read_text())["environment"]["extensions"]
        own = (
            f"output_dir={folder / 'kind'}",
            "data=lines",
            "data.mine_field=prompt",
            "max_steps=1",
            "mine.entropy=0.1",
        )
        with_its_data = run_deepspeed(["-cn", "mine_tiny", *words, *own], folder)
        patch.delenv(OWN_FOLDERS)
        shutil.rmtree(mine)
        to_hf = ("--to_hf", "--model_name_or_path", f"{out}/checkpoints", "--output_dir", f"{folder}/exported")
        after_removal = {
            "named": run("--help", own=mine),
            "not named": run(*without, "num_stages=1"),
            "export": run(*to_hf, script="convert2ckpt.py"),
        }
        continued = run_deepspeed([*without, "resume_allow_changes=true"], folder)
    return Life(
        folder,
        **texts,
        begun=begun,
        resumed=resumed,
        recorded=recorded,
        after_removal=after_removal,
        continued=continued,
        with_its_data=with_its_data,
    )


def describe_head(architecture: str, own: str) -> str:
    """Returns what the head is called of a model whose config.json names this class."""
    code = (
        "from transformers import LlamaConfig; from models.heads.table import find_head; "
        f"print(find_head(LlamaConfig(architectures=['{architecture}'])).words)"
    )
    environment = {**os.environ, OWN_FOLDERS: own, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout


# What is seen of each field of `Extension`
SEAMS: dict[str, Callable[[Life], bool]] = {
    "folder": lambda life: life.recorded == {"mine": str(life.folder / "mine")},
    "commands": lambda life: "python -m mine.count RUN" in life.help,
    "keys": lambda life: "mine.every=0: at least 1" in life.out_of_range,
    "readers": lambda life: "mine.every=3: this run does not read it, only one with mine.file does" in life.unread,
    "data_kinds": lambda life: json.loads(life.read("kind/run.json"))["config"]["data"]["name"] == "lines",
    "objectives": lambda life: life.with_its_data.code == 0 and "kind" in life.with_its_data.output,
    "modifiers": lambda life: json.loads(life.read("kind/metrics.jsonl").splitlines()[-1])["mine_entropy"] > 0,
    "heads": lambda life: life.described.splitlines()[-1:] == ["model of mine"],
    "model_files": lambda life: life.read("kind/checkpoints/mine.json") == life.read("kind/hf/mine.json") == "prompt",
    "actions": lambda life: life.acted.splitlines()[-1:] == ["mine counts 2 stages, True"],
    "facts": lambda life: json.loads(life.read("out/run.json"))["facts"]["mine"]["summary"] == "2 stages on 2 ranks",
    "flags": lambda life: life.in_place == "mine runs trainer_base_ds_mp.py --mine_alone -cn mine_tiny base\n",
    "options": lambda life: "--mine_word WORD" in life.supervisor,
    "starter": lambda life: "started with given" in life.restarted,
    "receiver": lambda life: life.read("taken.txt").split("\n")[:2] == ["step 1: True", "step 1: True"],
    "plans": lambda life: life.plan.splitlines()[-1:] == ["mine plans 2 stages"],
    "refusals": lambda life: "mine.file does not go together with precision=fp16: it is too small" in life.refused,
    "hints": lambda life: "did you mean 'logger=mine'" in life.hint,
    "aliases": lambda life: set(life.read("mine.txt").split()) >= {"1", "2"},  # conf/logger/ names the former place
}


def test_no_seam_is_forgotten() -> None:
    seams = {each.name for each in fields(Extension)}
    (call,) = (
        node for node in ast.walk(ast.parse(textwrap.dedent(MINE["extension.py"]))) if isinstance(node, ast.Assign)
    )
    assert isinstance(call.value, ast.Call) and {each.arg for each in call.value.keywords} == seams == SEAMS.keys()


@pytest.mark.full
@pytest.mark.parametrize("seam", SEAMS)
def test_one_outside_of_the_tree_uses_a_seam(life: Life, seam: str) -> None:
    assert SEAMS[seam](life), life


@pytest.mark.full
def test_one_outside_of_the_tree_trains_resumes_exports_and_is_removed(life: Life) -> None:
    assert [each.code for each in (life.begun, life.resumed, life.continued)] == [0, 0, 0], life
    assert life.read("taken.txt").endswith("step 2: True\n") and "3" not in life.read("mine.txt").split()
    named, not_named, export = life.after_removal.values()
    gone = rf"error: {OWN_FOLDERS}: \S+/mine has no extension.py; .*"
    unnamed = r"error: resume: \S+ was trained with the extensions mine; name their folders in .*"
    for ended, message in ((named, gone), (not_named, unnamed)):
        (error,) = (line for line in ended.stderr.splitlines() if line.startswith("error"))
        assert ended.returncode == 1 and re.fullmatch(message, error) and "Traceback" not in ended.stderr, ended.stderr
    assert export.returncode == 0, export.stderr
    steps = {each.name for each in (life.folder / "out/checkpoints").glob("global_step*")}
    assert steps >= {"global_step2", "global_step3"}
    assert all((life.folder / name / "model.safetensors").is_file() for name in ("exported", "out/hf"))
