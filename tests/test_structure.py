"""The house keeps its order: who may import whom, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.architecture import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("models", "data", "training", "scripts", "benchmarks")
ENTRY_POINTS = {"trainer_base_ds_mp", "convert2ckpt"}
CONFIGURATION = {"hydra", "omegaconf"}
# Where DeepSpeed may appear in the project itself; benchmarks compare with it.
DEEPSPEED_FILES = {
    "training/checkpoint.py", "training/checkpoint_writer.py", "training/engine.py", "training/interleaved.py", "training/loop.py", "training/offload.py", "training/pipeline.py", "training/process.py",
    "training/run.py", "training/stage_loaders.py",
}  # fmt: skip
# Where Hydra and OmegaConf end: behind these, only typed objects.
CONFIGURATION_FILES = {
    "trainer_base_ds_mp.py",
    "training/command_line.py",
    "training/config.py",
    "training/outputs.py",
    "training/run.py",
    "training/sweep.py",
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
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
    file.write_text("import a.b\nfrom c import d\nfrom .e import f\nfrom .. import g\ndef h():\n    import i\n    importlib.import_module('j.k')\n")
    assert sorted(read_imports(file)) == ["a.b", "c.d", "g", "i", "j.k", "models.e.f"]
    assert len(SOURCES) > 25 and {"trainer_base_ds_mp.py", "models/llama.py", "data/order.py", "training/run.py"} <= set(SOURCES)


@pytest.mark.parametrize("source", [source for source in SOURCES if source.startswith(("models/", "data/"))])
def test_models_and_data_know_nothing_of_each_other_of_hydra_or_of_the_engine(source: str) -> None:
    other = {"models": "data", "data": "models"}[source.partition("/")[0]]
    assert not imported_by(source) & {other, "training", "deepspeed", *CONFIGURATION}


def test_nothing_imports_an_entry_point() -> None:
    assert users_of(*ENTRY_POINTS) == set()
    assert {f"{name}.py" for name in ENTRY_POINTS} <= set(SOURCES)


def test_training_is_imported_by_its_entry_point_alone() -> None:
    assert {source for source in users_of("training") if not source.startswith(("training/", "benchmarks/", "scripts/"))} == {"trainer_base_ds_mp.py"}


def test_deepspeed_appears_in_few_files() -> None:
    assert {source for source in users_of("deepspeed") if not source.startswith(("benchmarks/", "scripts/"))} == DEEPSPEED_FILES


def test_bars_are_drawn_in_one_place() -> None:
    assert users_of("tqdm") == {"screen.py"}


def test_hydra_ends_where_typed_objects_begin() -> None:
    assert {source for source in users_of(*CONFIGURATION) if not source.startswith(("benchmarks/", "scripts/"))} == CONFIGURATION_FILES


def test_nothing_imports_the_tests() -> None:
    tests = {file.stem for file in (ROOT / "tests").rglob("*.py")} - {Path(source).stem for source in SOURCES}
    assert not [(source, name) for source in SOURCES for name in IMPORTS[source] if name.partition(".")[0] in tests | {"tests"}]


def list_files() -> list[Path]:
    """The project's files: what lies at the top, and in its folders."""
    folders = (*SOURCE_FOLDERS, "conf", "docs", "tests")
    files = [*ROOT.glob("*"), *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    return [file for file in files if file.is_file() and "__pycache__" not in file.parts]


def test_sources_are_ascii() -> None:
    texts = [file for file in list_files() if file.suffix in (".py", ".yaml", ".yml", ".sh", ".txt", ".ini", ".toml") or file.name == "Makefile"]
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
    assert not [file for file in list_files() if re.search(r"_v\d+(?=[._]|$)|_(old|new|copy|final|bak)$", own_name(file))]
