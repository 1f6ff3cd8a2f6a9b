"""The house keeps its order: who may import whom, read from the sources."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.architecture.lookup import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("models", "data", "training", "extensions", "scripts", "benchmarks")
ENTRY_POINTS = {"trainer_base_ds_mp", "convert2ckpt"}
ROOMED = ("models", "data", "training")
CONFIGURATION = {"hydra", "omegaconf"}
# The rooms, from the lowest: a module imports from its own room and from those in rows above its own. Those of one row
# do not know each other. A module at the top of training/ is a room by itself; those at the top of data/ are one.
MODELS = (
    ("models.parallel", "models.storage"),
    ("models.layers", "models.losses"),
    ("models.experts", "models.heads"),
    ("models.families", "models.generic"),
    ("models.further",),
    ("models.architecture",),
    ("models.sharding",),
    ("models.adapters",),
    ("models.weights",),
    ("models.conversion",),
)
DATA = (
    ("data",),
    ("data.encoders", "data.sources"),
    ("data.storage",),
    ("data.streaming",),
    ("data.loading",),
)
TRAINING = (
    ("training.config",),
    ("training.distributed", "training.objectives", "training.trackers"),
    ("training.pipeline",),
    ("training.optim",),
    ("training.engine",),
    ("training.checkpoint", "training.scoring", "training.costs"),
    ("training.export_receiver",),
    ("training.inputs", "training.cost_terms", "training.disk_space"),
    ("training.resolution",),
    ("training.layer_times",),
    ("training.planner",),
    ("training.plan_command",),
    ("training.setup", "training.observability"),
    ("training.build", "training.host_files"),
    ("training.evaluations", "training.callbacks", "training.collector"),
    ("training.loop", "training.evaluate", "training.export", "training.summary"),
    ("training.run",),
    ("training.entry",),
)
ABOVE = {room: row for order in (MODELS, DATA, TRAINING) for row, rooms in enumerate(order) for room in rooms}
CLI = "training.cli"  # next to the rows: it runs before torch is imported
CLI_IMPORTS = {"training.config", "training.distributed"}
ENTRY = "training.entry"  # alone imports it
# Where DeepSpeed may appear in the project itself; benchmarks compare with it.
DEEPSPEED_WINGS = (
    "training/engine/",
    "training/pipeline/module.py",
    "training/pipeline/weight_sharding.py",
    "training/distributed/process.py",
)
# Only these use Hydra and OmegaConf; everything after them gets typed objects.
CONFIGURATION_FILES = {
    "trainer_base_ds_mp.py",
    "training/cli/command_line.py",
    "extensions/sweep/sweep.py",
    "training/config/ranges.py",
    "training/config/schema.py",
    "training/entry.py",
    "training/config/changed_keys.py",
    "training/observability/reporters.py",
}
FORBIDDEN_FOLDERS = {"utils", "util", "common", "helpers", "helper", "misc"}


def list_sources() -> list[Path]:
    return sorted([*ROOT.glob("*.py"), *(file for folder in SOURCE_FOLDERS for file in (ROOT / folder).rglob("*.py"))])


def read_imports(file: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, inside functions too; relative ones made whole."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            yield from (name.value for name in node.args[:1] if isinstance(name, ast.Constant))


SOURCES = [file.relative_to(ROOT).as_posix() for file in list_sources()]
IMPORTS = {source: sorted(set(read_imports(ROOT / source))) for source in SOURCES}


def imported_by(source: str) -> set[str]:
    return {name.partition(".")[0] for name in IMPORTS[source]}


def users_of(*packages: str) -> set[str]:
    return {source for source in SOURCES if imported_by(source) & set(packages)}


def test_the_reader_of_imports_sees_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "models" / "x.py"
    file.parent.mkdir()
    file.write_text(
        "import a.b\nfrom c import d\nfrom .e import f\nfrom .. import g\ndef h():\n    import i\n    "
        "importlib.import_module('j.k')\n"
    )
    assert sorted(read_imports(file)) == ["a.b", "c.d", "g", "i", "j.k", "models.e.f"]
    assert len(SOURCES) > 25 and {
        "trainer_base_ds_mp.py",
        "models/families/llama.py",
        "data/order.py",
        "training/run.py",
    } <= set(SOURCES)


@pytest.mark.parametrize("source", [source for source in SOURCES if source.startswith(("models/", "data/"))])
def test_models_and_data_know_nothing_of_each_other_of_hydra_or_of_the_engine(source: str) -> None:
    other = {"models": "data", "data": "models"}[source.partition("/")[0]]
    assert not imported_by(source) & {other, "training", "deepspeed", *CONFIGURATION}


def test_nothing_imports_an_entry_point() -> None:
    assert users_of(*ENTRY_POINTS) == set()
    assert {f"{name}.py" for name in ENTRY_POINTS} <= set(SOURCES)


def test_training_is_imported_by_its_entry_point_alone() -> None:
    assert {
        source
        for source in users_of("training")
        if not source.startswith(("training/", "extensions/", "benchmarks/", "scripts/"))
    } == {"trainer_base_ds_mp.py"}


def test_deepspeed_is_imported_by_the_engine_and_the_stage_alone() -> None:
    users = {source for source in users_of("deepspeed") if not source.startswith(("benchmarks/", "scripts/"))}
    assert users and not {source for source in users if not source.startswith(DEEPSPEED_WINGS)}


def list_calls(file: Path) -> set[str]:
    """Returns the names that a file calls and the attributes that it reads or calls, without what precedes the last
    dot."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def list_users(names: set[str]) -> list[str]:
    """Returns the files, tests included, that call or read one of `names`."""
    files = [*list_sources(), *(ROOT / "tests").rglob("*.py")]
    return sorted(file.relative_to(ROOT).as_posix() for file in files if list_calls(file) & names)


def test_one_assembly() -> None:
    """The run, the evaluation, tests and benchmarks build stages and engines in one place."""
    assert list_users({"StageModule", "start_engine"}) == ["training/build.py"]


# What is DeepSpeed's own of an engine, and who uses it on purpose: the engines, the bare pipelines that the benchmarks
# compare with, and tests that prove something about DeepSpeed.
ENGINE_INSIDES = {
    "wrapped",
    "_take_model_step",
    "train_batch",
    "eval_batch",
    "global_steps",
    "get_global_grad_norm",
    "_hp_mapping",
    "reset_activation_shape",
    "loss_scaler",
}
LOOK_INSIDE = {
    "benchmarks/peers.py",
    "tests/training/checkpoint/test_coverage.py",
    "tests/training/engine/test_pipeline_engine.py",
    "tests/training/parity/test_parity.py",
    "tests/training/parity/test_zero_stages.py",
}


def test_nothing_looks_behind_the_engine() -> None:
    users = {user for user in list_users(ENGINE_INSIDES) if not user.startswith("training/engine/")}
    assert users == LOOK_INSIDE


def find_room(module: str) -> str:
    """The folder of a module; at the top of `training` the module itself."""
    package = module if MODULES.get(module, "").endswith("__init__.py") else module.rpartition(".")[0]
    return module if package == "training" else package


def list_wrong_arrows(imports: dict[str, set[str]]) -> list[str]:
    """Imports against the order of the rooms. imports: module -> the modules that it imports."""
    wrong = []
    for module, imported in imports.items():
        room = find_room(module)
        for other in imported:
            to = find_room(other)
            package = room.partition(".")[0]
            if room == to or package not in ROOMED or to.partition(".")[0] != package:
                continue
            if CLI in (room, to):
                is_allowed = to in CLI_IMPORTS if room == CLI else room == ENTRY
            else:
                is_allowed = ABOVE[to] < ABOVE[room]
            if not is_allowed:
                wrong.append(f"{module} -> {other}")
    return sorted(wrong)


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    circles = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            start = path.index(module)
            group = path[start:]
            del path[start:]
            if len(group) > 1:
                circles.append(sorted(group))

    for module in imports:
        if module not in number:
            visit(module)
    return circles


def resolve(name: str) -> str | None:
    """The module of the project in which an imported dotted name lies."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


MODULES = {source.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source for source in SOURCES}
MODULE_IMPORTS = {
    module: {found for name in IMPORTS[source] if (found := resolve(name)) and found != module}
    for module, source in MODULES.items()
}
MODULE_IMPORTS["models.architecture.lookup"] |= set(ARCHITECTURES.values())  # imported by name, when one is asked for


def test_rooms_import_downwards_only() -> None:
    rooms = {find_room(module) for module in MODULES if module.partition(".")[0] in ROOMED}
    assert rooms - {"models", "training"} == {*ABOVE, CLI}
    assert list_wrong_arrows(MODULE_IMPORTS) == []


def test_a_wrong_arrow_is_found() -> None:
    wrong = {
        "models.weights.sources": {"models.conversion.convert", "models.layers.layer"},
        "data.encoders.sft": {"data.storage.rows", "data.sample"},
        "training.config.schema": {"training.engine.pipeline_engine", "data.loading.loader"},
        "training.cli.help": {"training.planner.plan", "training.config.schema"},
        "training.planner.plan": {"training.cli.help", "training.setup", "training.costs.cost"},
        "training.run": {"training.config.schema"},
    }
    assert list_wrong_arrows(wrong) == [
        "data.encoders.sft -> data.storage.rows",
        "models.weights.sources -> models.conversion.convert",
        "training.cli.help -> training.planner.plan",
        "training.config.schema -> training.engine.pipeline_engine",
        "training.planner.plan -> training.cli.help",
        "training.planner.plan -> training.setup",
    ]


def test_no_module_imports_itself_through_others() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert find_circles(MODULE_IMPORTS) == []


COST_MODEL = ("training/planner/", "training/costs/", "training/cost_terms/", "training/pipeline/partition.py")


def find_identities(tree: ast.AST) -> list[str]:
    """Returns calls of `id`, and comparisons by `is` with what is neither None nor a constant of a class or module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "id":
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            others = [other for compared, other in pairs if isinstance(compared, (ast.Is, ast.IsNot))]
            known = (other for other in others if re.fullmatch(r"None|\w+(\.\w+)+", ast.unparse(other)))
            found += [ast.unparse(node)] if len(others) > len(list(known)) else []
    return found


def test_costs_are_known_by_their_values() -> None:
    """Layers of one kind share a cost, and copies of it would be others: no object's identity says what it is."""
    made_up = "a[id(b)]\nc is None\nd is not E.f\ng is h[0]\ni is j"
    assert sorted(find_identities(ast.parse(made_up))) == ["g is h[0]", "i is j", "id(b)"]
    sources = [source for source in SOURCES if source.startswith(COST_MODEL)]
    found = {source: find_identities(ast.parse((ROOT / source).read_text())) for source in sources}
    assert len(sources) > 20 and not {source: each for source, each in found.items() if each}


def list_loads_of_code(tree: ast.AST) -> list[str]:
    """Returns the receivers of `from_pretrained` that may run a folder's code: `transformers` asks the person at the
    keyboard, unless it is called with trust_remote_code=False. A peft config or adapter brings no code."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        ast.unparse(call.func.value)
        for call in calls
        if call.func.attr == "from_pretrained"
        and ast.unparse(call.func.value) not in ("LoraConfig", "PeftModel")
        and "trust_remote_code=False" not in map(ast.unparse, call.keywords)
    ]


def test_no_load_runs_the_code_of_a_folder() -> None:
    made_up = "A.from_pretrained(p)\nB.from_pretrained(p, trust_remote_code=False)\nm[C].from_pretrained(p, **options)"
    assert list_loads_of_code(ast.parse(made_up)) == ["A", "m[C]"]
    loads = {source: list_loads_of_code(ast.parse((ROOT / source).read_text())) for source in SOURCES}
    assert not {source: found for source, found in loads.items() if found}
    assert any("from_pretrained" in (ROOT / source).read_text() for source in SOURCES)


def test_bars_are_drawn_in_one_place() -> None:
    assert users_of("tqdm") == {"console.py"}


def test_hydra_ends_where_typed_objects_begin() -> None:
    assert {
        source for source in users_of(*CONFIGURATION) if not source.startswith(("benchmarks/", "scripts/"))
    } == CONFIGURATION_FILES


def test_nothing_imports_the_tests() -> None:
    tests = {file.stem for file in (ROOT / "tests").rglob("*.py")} - {Path(source).stem for source in SOURCES}
    assert not [
        (source, name) for source in SOURCES for name in IMPORTS[source] if name.partition(".")[0] in tests | {"tests"}
    ]


def list_files() -> list[Path]:
    """The project's files: what lies at the top, and in its folders."""
    folders = (*SOURCE_FOLDERS, "conf", "docs", "tests")
    files = [*ROOT.glob("*"), *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    return [file for file in files if file.is_file() and "__pycache__" not in file.parts]


def test_sources_are_ascii() -> None:
    texts = [
        file
        for file in list_files()
        if file.suffix in (".py", ".yaml", ".yml", ".sh", ".txt", ".ini", ".toml") or file.name == "Makefile"
    ]
    assert len(texts) > len(SOURCES)
    found = {
        f"{file.relative_to(ROOT)}:{number}": line
        for file in texts
        for number, line in enumerate(file.read_bytes().decode("utf-8").splitlines(), start=1)
        if not line.isascii()
    }
    assert not found


def test_no_folder_without_a_subject() -> None:
    folders = {part for file in list_files() for part in file.relative_to(ROOT).parent.parts}
    assert not folders & FORBIDDEN_FOLDERS
    assert not {file.name for file in list_files() if file.stem in FORBIDDEN_FOLDERS}


def own_name(file: Path) -> str:
    """Without a model_type, the name that its makers gave it."""
    return re.sub("|".join(ARCHITECTURES), "", file.stem)


def test_no_version_in_a_name() -> None:
    assert not [
        file for file in list_files() if re.search(r"_v\d+(?=[._]|$)|_(old|new|copy|final|bak)$", own_name(file))
    ]


DECISIONS = re.findall(
    r"^\| [^|`]+ \| `(\w+)` \| `([\w/]+\.py)` \|$", (ROOT / "docs" / "inside.md").read_text(), re.MULTILINE
)


@functools.cache
def list_definitions(source: str) -> set[str]:
    tree = ast.parse((ROOT / source).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_each_decision_has_one_place() -> None:
    """docs/inside.md says where; nothing else in the project has the name."""
    assert len(DECISIONS) >= 10
    for name, source in DECISIONS:
        assert [other for other in SOURCES if name in list_definitions(other)] == [source], name
