"""User-defined encoders and records, named in a config: found, built, cached by their code, and their errors."""

import json
import re
from pathlib import Path

import pytest

from data.components import build_component
from data.sources.records import name_component_source, read_records
from data.storage.encoding import Encoding
from data.storage.tokenized import TokenizedDataset
from data.storage.tokenizing import prepare_dataset
from errors import UserError

ENCODER = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Shout:
    mark: str = "!"

    def encode(self, record, location, tokenizer):
        ids = tokenizer(record["text"] + self.mark)["input_ids"]
        return {"input_ids": ids, "labels": ids}

def count(upto):
    for number in range(upto):
        yield {"text": str(number)}

def weigh(path):
    yield {"text": {1, 2}}
"""
number = 0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, unique per test since Python imports a module once."""
    global number
    number += 1
    name = f"own_data_{number}"
    (tmp_path / f"{name}.py").write_text(ENCODER)
    monkeypatch.chdir(tmp_path)
    return name


def test_fields_are_arguments(module: str) -> None:
    assert build_component({"_target_": f"{module}.Shout", "mark": "?"}, "data.encoder").mark == "?"


def test_own_records_and_encoder_make_a_data_set(module: str, tokenizer, tmp_path: Path) -> None:
    encoder = build_component({"_target_": f"{module}.Shout"}, "data.encoder")
    source = name_component_source({"_target_": f"{module}.count", "upto": 12})
    path = prepare_dataset(
        [source], key="train_file", encoding=Encoding(encoder, tokenizer, 32), cache_dir=tmp_path / "cache"
    )
    data = TokenizedDataset(path, True, True)
    assert [tokenizer.decode(data.input_ids(i)) for i in (0, 11)] == ["0!", "11!"] and len(data) == 12


def test_another_version_of_the_code_is_tokenized_again(module: str, tokenizer, tmp_path: Path) -> None:
    encoder = build_component({"_target_": f"{module}.Shout"}, "data.encoder")
    encoding = Encoding(encoder, tokenizer, 32)
    before = encoding.compute_key([[]])
    (tmp_path / f"{module}.py").write_text(ENCODER + "\n# changed\n")
    import linecache

    linecache.checkcache()  # as in a new process
    assert encoding.compute_key([[]]) != before


def test_what_json_cannot_hold_is_reported_with_its_record(module: str) -> None:
    (record,) = read_records(name_component_source({"_target_": f"{module}.weigh", "path": "a"}))
    assert record.problem.startswith(f"{module}.weigh: record 1: cannot be written as JSON: ")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"_target_": "nowhere_at_all.Encoder"},
            "data.encoder: _target_=nowhere_at_all.Encoder: there is no module nowhere_at_all; start",
        ),
        (
            {"_target_": "json.Encoder"},
            "data.encoder: _target_=json.Encoder: the module json has no class or function 'Encoder'",
        ),
        ({"_target_": "Encoder"}, "data.encoder: _target_=Encoder; name a class or a function with its module"),
        ({"_target_": None}, "data.encoder: _target_=None; name a class"),
        (
            {"_target_": "json.dumps"},
            "data.encoder: json.dumps does not take these fields: missing a required argument: 'obj'",
        ),
        ({"_target_": "json.loads", "t": 1}, "data.encoder: json.loads does not take these fields: "),
    ],
)
def test_an_invalid_target(spec: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_component(spec, "data.encoder")
    assert str(caught.value).startswith(message), str(caught.value)


def test_a_module_with_a_failing_import_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken.py").write_text("import nowhere_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        build_component({"_target_": "own_broken.Encoder"}, "data.encoder")


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("data.mine", "", "data.encoder: _target_=data.mine.Encoder: No module named 'data.mine': data is a part of"),
        ("own_clash", "import models.mine", "data.encoder: _target_=own_clash.Encoder: No module named 'models.mine'"),
        (
            "own_other_clash",
            "from errors import Mine",
            "data.encoder: _target_=own_other_clash.Encoder: cannot import name 'Mine'",
        ),
    ],
)
def test_a_module_with_the_name_of_one_of_the_projects(
    module: str, source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(message)}.* own another name$"):
        build_component({"_target_": f"{module}.Encoder"}, "data.encoder")


def test_the_source_is_text(module: str) -> None:
    assert name_component_source({"upto": 1, "_target_": "a.b"}) == 'own:{"_target_": "a.b", "upto": 1}'
    assert [
        json.loads(r.text) for r in read_records(name_component_source({"_target_": f"{module}.count", "upto": 1}))
    ] == [{"text": "0"}]
