"""The lines about each file: what became of its records, and which of them the training files hold too."""

import json
from pathlib import Path

from data.encoders.sft import SFTEncoder
from data.options import OnBadRecord
from data.storage.encoding import Encoding
from data.storage.file_report import MOST_FILES, describe_files, list_files
from data.storage.tokenizing import prepare_dataset


def prepare(tokenizer, folder: Path, key: str, files: dict[str, list[int]], max_seq_length: int = 64) -> Path:
    """files: name -> the number in each record."""
    for name, numbers in files.items():
        records = [{"prompt": f"What is {n}?", "completion": "It."} if n >= 0 else {} for n in numbers]
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(SFTEncoder(), tokenizer, max_seq_length, on_bad_record=OnBadRecord.skip)
    return prepare_dataset(
        [str(folder / name) for name in files], key=key, encoding=encoding, cache_dir=folder / "cache", log=None
    )


def test_records_of_the_evaluation_that_are_trained_on(tokenizer, tmp_path: Path) -> None:
    """By the record: also where two of them are the same once they are cut."""
    datasets = {
        "train_file": prepare(tokenizer, tmp_path, "train_file", {"a": [*range(10)], "b": [3, 20, 21]}, 8),
        "eval_file.c": prepare(tokenizer, tmp_path, "eval_file.c", {"c": [-1, 3, 21, 30, 3]}),
        "eval_file.d": prepare(tokenizer, tmp_path, "eval_file.d", {"d": [-1, 31], "e": [9]}),
    }
    assert [(Path(each.file).name, each.num_shared) for each in list_files(datasets)] == [
        ("a", None), ("b", None), ("c", 3), ("d", 0), ("e", 1),
    ]  # fmt: skip
    facts = describe_files(datasets)
    assert list(facts) == ["train_file 1", "train_file 2", "eval_file.c", "eval_file.d 1", "eval_file.d 2"]
    assert facts["eval_file.c"].startswith(f"{tmp_path}/c: 5 records; 4 samples, ")
    assert "\n4 turns of the assistant\n1 of 5 records skipped as bad, such as " in facts["eval_file.c"]
    assert facts["eval_file.c"].endswith("\n3 of its records are in train_file too, so the evaluation is contaminated")
    assert "\n10 samples truncated\n" in facts["train_file 1"] and "contaminated" not in facts["eval_file.d 1"]


def test_many_files_are_summed_up(tokenizer, tmp_path: Path) -> None:
    files = {f"{number:02}": [number] for number in range(MOST_FILES + 3)}
    datasets = {"train_file": prepare(tokenizer, tmp_path, "train_file", files)}
    facts = describe_files(datasets)
    assert len(facts) == MOST_FILES
    assert facts[f"train_file {MOST_FILES}"].startswith("4 more files: 4 records; 4 samples, ")
