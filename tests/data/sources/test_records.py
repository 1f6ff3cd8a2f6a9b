"""Sources and records: which are found, in which order, and errors of bad files."""

import json
import time
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from data.encoders.pretrain import PretrainEncoder
from data.sources.hub import describe_hub, load_hub
from data.sources.records import parse_record, read_records, resolve_sources
from data.storage.encoding import Encoding
from data.storage.tokenized import load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_sources_of_a_path_a_glob_and_a_list(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", "{}") for name in "cafbde"]
    b, a = files[3], files[1]
    assert resolve_sources(a, "train_file") == [a]
    assert resolve_sources(str(tmp_path / "*.jsonl"), "train_file") == sorted(files)
    assert resolve_sources([b, "hf:name:test", a], "train_file") == [b, "hf:name:test", a]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "part[1].jsonl", "{}")
    assert resolve_sources(path, "train_file") == [path]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{tmp}/none.jsonl", "eval_file: no such file: {tmp}/none.jsonl; check the path"),
        ("{tmp}/*.csv", "eval_file: no file matches {tmp}/*.csv; check the path"),
        ("{tmp}", "eval_file: {tmp} is a folder; give the files in it, for instance {tmp}/*.jsonl"),
        ("", "eval_file is empty; give a path, a glob, a list of these, or hf:NAME"),
    ],
)
def test_missing_sources_name_the_key_and_the_path(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_sources(entry.format(tmp=tmp_path), "eval_file")
    assert str(caught.value) == message.format(tmp=tmp_path)


def test_a_relative_path_says_relative_to_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no such file: none.jsonl \\(relative to {tmp_path}\\)"):
        resolve_sources(["none.jsonl"], "train_file")


def test_json_lines_are_numbered_as_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"a": "\xc3\xa9\xe2\x80\xa8"}')
    records = [(r.location, parse_record(r.location, r.text)) for r in read_records(path)]
    assert records == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": "\u00e9\u2028"})]


def test_json_files_hold_an_array_or_lines(tmp_path: Path) -> None:
    array = write(tmp_path / "array.json", '\n[{"a": 1},\n {"a": "\\ud83d\\ude00"}]')
    lines = write(tmp_path / "lines.json", '{"a": 1}\n{"a": 2}\n')
    parsed = [(r.location, parse_record(r.location, r.text)) for r in read_records(array)]
    assert parsed == [(f"{array}: record 1", {"a": 1}), (f"{array}: record 2", {"a": "\U0001f600"})]
    assert [r.location for r in read_records(lines)] == [f"{lines}:1", f"{lines}:2"]


def test_hub_data_sets_are_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "test.jsonl", '{"a": "x"}\n{"a": "y"}\n')
    source = f"hf:{folder}:test"
    assert [(r.location, json.loads(r.text)) for r in read_records(source)] == [
        (f"{source}: record 1", {"a": "x"}),
        (f"{source}: record 2", {"a": "y"}),
    ]
    with pytest.raises(UserError, match=f"hf:{folder}: cannot be loaded: .*train.*; check the name, the split"):
        list(read_records(f"hf:{folder}"))


def test_a_data_set_in_memory_is_known_by_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 2**20)
    folder, found = tmp_path / "corpus", []
    folder.mkdir()
    for text in ("x", "y", "x"):
        write(folder / "train.jsonl", json.dumps({"a": text}) + "\n")
        load_hub.cache_clear()  # as in a new process
        assert not load_hub(f"hf:{folder}").cache_files
        found.append(describe_hub(f"hf:{folder}"))
    assert found[0] == found[2] != found[1]


def test_config_and_split_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    for config in ("small", "large"):
        (folder / config).mkdir(parents=True)
        for split in ("train", "test"):
            write(folder / config / f"{split}.jsonl", json.dumps({"a": f"{config} {split}"}) + "\n")
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {config}\n  data_files:\n"
            + "".join(f"  - {{split: {split}, path: {config}/{split}.jsonl}}\n" for split in ("train", "test"))
            for config in ("small", "large")
        )
        + "---\n"
    )
    for query, text in (("config=large", "large train"), ("config=small&split=test", "small test")):
        assert [json.loads(record.text) for record in read_records(f"hf:{folder}?{query}")] == [{"a": text}]
    for wrong in (f"hf:{folder}?", f"hf:{folder}?name=large", f"hf:{folder}?config="):
        with pytest.raises(UserError, match="cannot be read; give hf:NAME.config=...&split=...&revision=... with"):
            resolve_sources(wrong, "train_file")


def test_a_data_set_that_has_changed_has_other_tokens(tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder, encoding = tmp_path / "corpus", Encoding(PretrainEncoder("a"), tokenizer, None)
    folder.mkdir()

    def tokenize(text: str | None = None) -> tuple[Path, int]:
        """Read it as a new run does, without the cache in memory."""
        if text is not None:
            write(folder / "train.jsonl", json.dumps({"a": text}) + "\n")
        load_hub.cache_clear()
        path = prepare_dataset([f"hf:{folder}"], key="train_file", encoding=encoding, cache_dir=tmp_path, log=None)
        return path, load_summary(path).num_tokens

    first = tokenize("one")
    assert tokenize() == first
    second = tokenize("one and more of it")
    assert second[0] != first[0] and second[1] > first[1]


def test_an_unreachable_hub_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a closed port
    start = time.monotonic()
    with pytest.raises(
        UserError,
        match="hf:nobody/nothing: cannot be loaded: Couldn't reach 'nobody/nothing' .*; "
        "check the name, .* and the network",
    ):
        list(read_records("hf:nobody/nothing"))
    assert time.monotonic() - start < 6 and not constants.HF_HUB_OFFLINE


def test_text_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    lines = write(tmp_path / "latin.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n')
    good, bad = read_records(lines)
    assert good.problem is None and bad.location == f"{lines}:2"
    assert bad.problem == f"{lines}:2: not UTF-8 text (byte 0xe9 at position 10); convert the file to UTF-8"
    array = write(tmp_path / "latin.json", b'[{"a": 1},\n{"a": "caf\xe9"}]\n')
    with pytest.raises(UserError, match=f"{array}:2: not UTF-8 text"):
        list(read_records(array))


def test_malformed_json_names_line_reason_and_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^a.jsonl:3: not valid JSON: Expecting ',' delimiter, column 10; fix"):
        parse_record("a.jsonl:3", '{"a": 1  "b": 2}')
    with pytest.raises(UserError, match="^a.jsonl:4: not valid JSON: Expecting value, column 7; fix"):
        parse_record("a.jsonl:4", '{"a": \r\n')
    array = write(tmp_path / "a.json", '[{"a": 1},\n{"a": }]')
    with pytest.raises(UserError, match=f"^{array}:2: not valid JSON: Expecting value, column 7; fix the file"):
        list(read_records(array))
    with pytest.raises(UserError, match="a.jsonl:1: not valid JSON: "):
        parse_record("a.jsonl:1", "[" * 100_000)


@pytest.mark.parametrize("field", ["tools", "name", "a\\ud83d"])
def test_half_of_a_surrogate_pair_anywhere_is_of_one_record(field: str) -> None:
    text = f'{{"messages": [], "{field}": [{{"name": "\\uD83D"}}]}}'
    with pytest.raises(UserError, match="^a.jsonl:1: field '.*' holds half of a surrogate pair, which is not a char"):
        parse_record("a.jsonl:1", text)
    assert parse_record("a.jsonl:1", '{"a": "\\ud83d\\ude00 \\\\ud83d"}') == {"a": "\U0001f600 \\ud83d"}


def test_a_record_that_is_not_an_object() -> None:
    with pytest.raises(UserError, match="^a.jsonl:1: a record must be a JSON object, not a list"):
        parse_record("a.jsonl:1", "[1]")
