"""The ways through the source that the pages show: the files that a line of the train file passes on its way to the
loss of a plain run are those of the table in docs/inside.md, in its order, and few frames are above a layer's forward
pass; and the reading path of README.md has every file of a step."""

from __future__ import annotations

import ast
import json
import re

import pytest
from support.batch_trace import ROOT, Line, Trace, trace_run
from support.tiny import save_llama, save_tokenizer

MOST_LINES = 3000  # of what the reading path names
LENGTH = 59  # of the rows; no dimension of the model
MOST_FRAMES = 11
RECORD = {"prompt": "What bends a river", "completion": "sandstone ledges, and forty quiet winters"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("stations")
    save_llama(folder / "model")
    tokenizer = save_tokenizer(folder / "model")
    (folder / "train.jsonl").write_text(json.dumps(RECORD) + "\n")
    ids = tokenizer(RECORD["completion"])["input_ids"][2:-2]  # what no merge with a neighbour changes
    arguments = [
        f"model_name_or_path={folder}/model", f"train_file={folder}/train.jsonl", f"output_dir={folder}/out",
        "num_stages=2", "micro_batch_size=1", "global_batch_size=1", f"max_seq_length={LENGTH}", "precision=fp32",
        "activation_checkpoint_interval=0", "max_steps=1", "data.pad_to=max_seq_length",
        f"data.cache_dir={folder}/cache", "save_final=false",
    ]  # fmt: skip
    return trace_run(Line(RECORD["completion"][4:-4], tuple(ids), LENGTH), arguments, folder, 2)


def read_table() -> list[str]:
    """Return the files of the table."""
    section = (ROOT / "docs" / "inside.md").read_text().split("## The stations of a batch\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_table_lists_the_files_that_a_line_passes(trace: Trace) -> None:
    assert trace.files == read_table(), "\n".join(f"{file}: {name}" for file, name in trace.functions)


def test_few_frames_are_above_a_layer(trace: Trace) -> None:
    deepest = max(trace.stacks, key=len)
    assert deepest[-1].startswith("trainer_base_ds_mp.py"), deepest  # the real entry
    assert len(deepest) <= MOST_FRAMES, "\n".join(deepest)


def read_path() -> dict[str, list[str]]:
    """Return the files of the reading path with the functions and classes that it names in each; none: all of it."""
    section = (ROOT / "README.md").read_text().split("## Read the source\n")[1].split("\n## ")[0]
    path: dict[str, list[str]] = {}
    for file, names in re.findall(r"`([\w/]+\.py)`(?:\s+\(([^)]*)\))?", section):
        path[file] = re.findall(r"`([\w.]+)`", names)
    return {file: names for file, names in path.items() if not file.startswith("tests/")}


def count_lines(file: str, names: list[str]) -> int:
    """Return the lines of the functions and classes of a file, a method as `Class.method`; without names, of all."""
    source = (ROOT / file).read_text()
    found = {
        f"{prefix}{node.name}": node.end_lineno - node.lineno + 1
        for prefix, body in list_bodies(ast.parse(source))
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno is not None
    }
    return sum(found[name] for name in names) if names else len(source.splitlines())


def list_bodies(tree: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    return [("", tree.body), *((f"{each.name}.", each.body) for each in tree.body if isinstance(each, ast.ClassDef))]


def test_the_reading_path_is_short() -> None:
    lines = {file: count_lines(file, names) for file, names in read_path().items()}
    assert len(lines) > 40 and sum(lines.values()) <= MOST_LINES, sum(lines.values())


def test_the_reading_path_has_every_file_of_a_step(trace: Trace) -> None:
    assert trace.step - read_path().keys() == set()
