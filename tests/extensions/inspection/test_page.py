"""`data_report.html`: its samples are those of the data, of all lengths and files, and it needs nothing else."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.pages import load_page

from data.encoders.chat import ChatEncoder
from data.encoders.kinds import find_kind
from data.encoders.sft import SFTEncoder
from data.options import Packing
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenizing import prepare_dataset
from extensions.inspection import page
from extensions.inspection.page import SPECIAL, TARGET, save_page, split_parts
from extensions.inspection.report import render_row
from extensions.preferences.encoders import PreferenceEncoder, UnpairedEncoder


def prepare(tokenizer, folder: Path, files: dict[str, list[dict]], encoder=None, **options) -> Path:
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(encoder or SFTEncoder(), tokenizer, 4096, **options)
    return prepare_dataset(
        [str(folder / name) for name in files], key="train_file", encoding=encoding, cache_dir=folder, log=None
    )


def build_records(numbers: range) -> list[dict]:
    return [{"prompt": f"What is {n}?", "completion": "It is " + "a number. " * n} for n in numbers]


def test_samples_of_all_lengths_and_files(tokenizer, tmp_path: Path) -> None:
    files = {"a": build_records(range(400)), "b": build_records(range(5))}
    path = prepare(tokenizer, tmp_path, files)
    save_page({"train_file": path}, tmp_path / "out" / "page.html", title="here: data", tokenizer=tokenizer)
    found = load_page(tmp_path / "out" / "page.html")
    assert [(Path(file["name"].split(": ")[1]).name, file["records"]) for file in found["files"]] == [
        ("a", 400),
        ("b", 5),
    ]
    assert sum(count for _, count in found["files"][0]["lengths"]) == 400
    from_first = [sample for sample in found["samples"] if sample["file"] == 0]
    lengths = sorted(sample["length"] for sample in from_first)
    assert 100 < len(from_first) < 200 and len(found["samples"]) == len(from_first) + 5
    assert {0, 399} <= {sample["number"] for sample in from_first} and lengths[0] * 50 < lengths[-1]
    for sample in (from_first[3], found["samples"][-1]):
        text = "".join(part[2] for part in sample["parts"])
        record = files["ab"[sample["file"]]][sample["number"]]
        assert text == f"{record['prompt']}\n{record['completion']}</s>"
        assert sum(part[1] for part in sample["parts"]) == sample["tokens"] == sample["length"]
        targets = [part for part in sample["parts"] if part[0] & TARGET]
        assert sum(part[1] for part in targets) == sample["targets"]
        assert [part[0] for part in sample["parts"]] == [0, TARGET, TARGET | SPECIAL]


def test_truncated_samples_are_marked(tokenizer, tmp_path: Path) -> None:
    """With the number of tokens that are gone; one that fills the row exactly has none."""
    whole = [len(tokenizer(f"a\n{'b ' * n}</s>")["input_ids"]) for n in (1, 9, 40)]
    records = [{"prompt": "a", "completion": "b " * n} for n in (1, 9, 40)]
    (tmp_path / "a").write_text("".join(json.dumps(record) + "\n" for record in records))
    encoding = Encoding(SFTEncoder(), tokenizer, whole[1])
    path = prepare_dataset([str(tmp_path / "a")], key="train_file", encoding=encoding, cache_dir=tmp_path, log=None)
    save_page({"train_file": path}, tmp_path / "page.html", title="", tokenizer=tokenizer)
    samples = load_page(tmp_path / "page.html")["samples"]
    assert [sample["cut"] for sample in samples] == [0, 0, whole[2] - whole[1]]
    mark = f"\n... {whole[2] - whole[1]} tokens truncated"
    for packing in (Packing.NONE, Packing.BEST_FIT):
        plan = RowPlan(whole[1], packing)
        prepare_rows(path, plan, "train_file", log=None)
        rows = Rows(path, plan, True, True)
        texts = [render_row(rows, row, tokenizer, in_colour=False) for row in range(len(rows))]
        assert sum(text.count("truncated") for text in texts) == sum(text.endswith(mark) for text in texts) == 1


def test_the_page_stays_small(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on its tokens leaves samples of each file; one that is longer still is cut, and says so."""
    monkeypatch.setattr(page, "MOST_TOKENS", 1000)
    monkeypatch.setattr(page, "MOST_OF_SAMPLE", 300)
    path = prepare(tokenizer, tmp_path, {"a": build_records(range(200)), "b": build_records(range(3))})
    save_page({"train_file": path}, tmp_path / "page.html", title="", tokenizer=tokenizer)
    samples = load_page(tmp_path / "page.html")["samples"]
    assert {sample["file"] for sample in samples} == {0, 1}
    assert 1000 <= sum(sample["tokens"] for sample in samples) < 1300
    assert max(sample["tokens"] for sample in samples) == 300 < max(sample["length"] for sample in samples)


def test_no_text_ends_the_script_and_nothing_is_loaded(tokenizer, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- DATA"
    path = prepare(tokenizer, tmp_path, {"a": [{"prompt": hostile, "completion": "No."}]})
    save_page({"train_file": path}, tmp_path / "page.html", title="", tokenizer=tokenizer)
    text = (tmp_path / "page.html").read_text()
    (sample,) = load_page(tmp_path / "page.html")["samples"]
    assert hostile in sample["parts"][0][2] and "alert(1)" in text
    assert text.count("<script") == text.count("</script>") == 2
    assert not re.findall(r"https?://|src=|url\(|@import|fetch\(", text)
    assert "default-src 'none'" in text


def test_pairs_stay_together(tokenizer, tmp_path: Path) -> None:
    pairs = [{"prompt": "a?", "chosen": "b " * n, "rejected": "c"} for n in range(1, 400)]
    path = prepare(tokenizer, tmp_path, {"a": pairs}, PreferenceEncoder(), samples_per_record=2)
    save_page(
        {"train_file": path}, tmp_path / "page.html", title="", tokenizer=tokenizer, sample_names=("chosen", "rejected")
    )
    samples = load_page(tmp_path / "page.html")["samples"]
    assert [sample["answer"] for sample in samples] == ["chosen", "rejected"] * (len(samples) // 2)
    assert [sample["number"] for sample in samples[::2]] == [sample["number"] for sample in samples[1::2]]
    assert 200 < len(samples) <= 300 and samples[0]["number"] == 0 and samples[-1]["number"] == 398


def test_answers_say_whether_they_were_liked(tokenizer, tmp_path: Path) -> None:
    records = [{"prompt": "a?", "completion": f"b {n}", "label": n == 1} for n in range(3)]
    path = prepare(tokenizer, tmp_path, {"a": records}, UnpairedEncoder(), label_key="desirable")
    names = find_kind("unpaired_preference").label_names
    save_page({"train_file": path}, tmp_path / "page.html", title="", tokenizer=tokenizer, label_names=names)
    answers = [sample["answer"] for sample in load_page(tmp_path / "page.html")["samples"]]
    assert answers == ["not liked", "liked", "not liked"]


def test_parts_in_the_middle_of_a_word_keep_their_text(tokenizer) -> None:
    """A character of several tokens that a mask cuts is shown with the token that ends it, or as a replacement."""
    ids = np.array(tokenizer("two \u00e9 words")["input_ids"])
    for cut in range(1, len(ids)):
        labels = np.where(np.arange(len(ids)) < cut, -100, ids)
        parts = split_parts(ids, labels, tokenizer)
        assert [kind for kind, _, _ in parts] == [0, TARGET]
        text = "".join(part for _, _, part in parts)
        assert text.startswith("two ") and text.endswith(" words")


def test_the_stop_token_of_a_turn_is_shown_where_the_template_writes_another(build_tokenizer, tmp_path: Path) -> None:
    """The model reads what the template writes after an earlier turn, and is trained on the token that ends it."""
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    turns = [{"role": role, "content": text} for role, text in (("user", "Legs?"), ("assistant", "Eight."))]
    path = prepare(tokenizer, tmp_path, {"a": [{"messages": turns * 2}]}, ChatEncoder())
    save_page({"train_file": path}, tmp_path / "page.html", title="", tokenizer=tokenizer)
    (sample,) = load_page(tmp_path / "page.html")["samples"]
    stops = [text for kind, _, text in sample["parts"] if kind == TARGET | SPECIAL]
    assert stops == ["</s>", "</s>"]
