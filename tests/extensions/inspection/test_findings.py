"""Suspicious samples are found and reported with their place, and no others are."""

import json
from pathlib import Path

from support.corpora import write_corpus

from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.storage.encoding import Encoding
from data.storage.tokenizing import prepare_dataset
from extensions.inspection.findings import Inspected, describe_findings


def find(tokenizer, folder: Path, names: dict[str, dict[str, list[tuple[str, str]]]]) -> str:
    """names: key -> file -> (prompt, completion) of each record."""
    files = []
    for key, entries in names.items():
        for name, records in entries.items():
            lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in records]
            (folder / name).write_text("\n".join(lines))
        paths = [str(folder / name) for name in entries]
        path = prepare_dataset(
            paths, key=key, encoding=Encoding(SFTEncoder(), tokenizer, 64), cache_dir=folder, log=None
        )
        files.append(Inspected(key, path, list(entries)))
    return describe_findings(files, lambda ids: repr(tokenizer.decode(ids[:4])))


def test_duplicates_within_and_across_files(tokenizer, tmp_path: Path) -> None:
    records = [(f"What is {n}?", "A number.") for n in range(20)]
    found = find(
        tokenizer,
        tmp_path,
        {"train_file": {"a": [*records, records[3]], "b": [("x y z?", "A number."), records[5]]}, "eval_file": {"c": [
            ("Is it new?", "A number."), records[7]]}},
    )  # fmt: skip
    lines = found.splitlines()
    assert lines[0] == "train_file: 2 of 23 samples repeat an earlier one of the same file"
    assert {line.partition(": ")[0] + line[line.rindex(" =") :] for line in lines[1:3]} == {
        f"  train_file sample 20 ({tmp_path}/a:21) = {tmp_path}/a:4",
        f"  train_file sample 22 ({tmp_path}/b:2) = {tmp_path}/a:6",
    }
    assert lines[3].startswith("eval_file: 1 of 2 samples are in train_file too")
    assert lines[4].startswith(f"  eval_file sample 1 ({tmp_path}/c:2): 'What")
    assert lines[4].endswith(f" = train_file {tmp_path}/a:8") and len(lines) == 5


def test_samples_of_strange_length(tokenizer, tmp_path: Path) -> None:
    records = [(f"What is the number {n}?", "A number, that is one of many.") for n in range(20)]
    lines = find(tokenizer, tmp_path, {"train_file": {"a": [*records, ("", "7")]}}).splitlines()
    assert lines[0].startswith("train_file: 1 sample far shorter than the others (")
    assert lines[1].startswith(f"  3 tokens: train_file sample 20 ({tmp_path}/a:21): ") and len(lines) == 2
    same = find(tokenizer, tmp_path, {"train_file": {"b": records}})
    assert same == "no duplicates, no samples without targets, no outliers in length"


def test_samples_without_a_target(tokenizer, tmp_path: Path) -> None:
    """Only tokenized corpora can hold them: elsewhere such a record is refused."""
    corpus = write_corpus(tmp_path / "corpus", [[[5, 6, 7]], [[14]], [[8, 9, 10]]])
    encoding = Encoding(PretrainEncoder(), tokenizer, None)
    path = prepare_dataset([corpus], key="train_file", encoding=encoding, cache_dir=tmp_path, log=None)
    lines = describe_findings([Inspected("train_file", path, ["corpus"])], str).splitlines()
    assert lines[0] == "train_file: 1 of 3 samples without a target, which add no loss"
    assert lines[1] == "  train_file sample 1 (number 1 of corpus): [14]"
