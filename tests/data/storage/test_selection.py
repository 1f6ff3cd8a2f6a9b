"""Which records are taken: a part held out by their hashes, a user's filter, the first ones of each entry."""

import json
import linecache
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import write_corpus

from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.options import OnBadRecord
from data.sources.selection import HoldOut, Selection, build_filter
from data.storage.encoding import Encoding
from data.storage.tokenized import TokenizedDataset, load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError

FILTERS = """
def is_short(record, limit):
    return len(record["prompt"]) <= limit

def count(record):
    return len(record["prompt"])
"""
number = 0


def build_records(numbers: range) -> list[dict]:
    return [{"prompt": f"What is {n}?", "completion": f"A number, {n}."} for n in numbers]


def write_records(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def take(tokenizer, tmp_path: Path) -> Callable[..., list[str]]:
    """take(selection, entry, ...): the decoded samples of the records that it takes."""

    def decode(selection: Selection, *entries: str, num_proc: int = 1, **options) -> list[str]:
        encoding = Encoding(SFTEncoder(), tokenizer, 64, selection=selection, **options)
        path = prepare_dataset(
            entries, key="train_file", encoding=encoding, cache_dir=tmp_path / "cache", num_proc=num_proc, log=None
        )
        data = TokenizedDataset(path, True, False)
        return [tokenizer.decode(data.input_ids(sample)) for sample in range(len(data))]

    return decode


def split(take: Callable, hold_out: HoldOut, *entries: str) -> tuple[list[str], list[str]]:
    """Return the samples that are trained on, and those held out."""
    trained = Selection(hold_out=hold_out)
    return take(trained, *entries), take(replace(trained, takes_held_out=True), *entries)


def test_a_share_is_held_out_and_nothing_else(take: Callable, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", build_records(range(400)))
    trained, held_out = split(take, HoldOut(fraction=0.2), file)
    assert sorted(trained + held_out) == sorted(take(Selection(), file))
    assert not set(trained) & set(held_out) and 50 < len(held_out) < 110


def test_a_record_stays_on_its_side(take: Callable, tmp_path: Path) -> None:
    """Whatever file it is in, in whatever order, among whichever others; a larger share holds out more, not others."""
    records = build_records(range(200))
    _, before = split(take, HoldOut(fraction=0.2), write_records(tmp_path / "a.jsonl", records))
    reordered = [dict(reversed(record.items())) for record in reversed(records)]
    added = build_records(range(200, 300))
    files = [write_records(tmp_path / name, part) for name, part in (("b.jsonl", added), ("c.jsonl", reordered))]
    trained, after = split(take, HoldOut(fraction=0.2), *files)
    assert set(before) <= set(after) and not set(before) & set(trained)
    assert all(int(text.split()[2].partition("?")[0]) >= 200 for text in set(after) - set(before))
    assert set(after) <= set(split(take, HoldOut(fraction=0.5), *files)[1])


def test_a_number_of_records_is_held_out(take: Callable, tmp_path: Path) -> None:
    records = build_records(range(200))
    file = write_records(tmp_path / "a.jsonl", records)
    trained, held_out = split(take, HoldOut(count=30), file)
    assert len(held_out) == 30 and len(trained) == 170 and not set(trained) & set(held_out)
    added = write_records(tmp_path / "b.jsonl", build_records(range(200, 260)))
    _, after = split(take, HoldOut(count=30), added, file)
    assert len(after) == 30 and not set(after) & set(trained), "what was trained on never becomes held out"
    assert take(Selection(hold_out=HoldOut(count=30), takes_held_out=True), file, num_proc=2) == held_out


def test_copies_of_a_record_are_on_one_side(take: Callable, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", build_records(range(40)) * 2)
    for hold_out in (HoldOut(count=10), HoldOut(fraction=0.3)):
        trained, held_out = split(take, hold_out, file)
        assert not set(trained) & set(held_out) and len(trained) + len(held_out) == 80
    assert len(split(take, HoldOut(count=10), file)[1]) == 20, "ten different ones, twice each"


def test_the_first_records_of_each_entry(take: Callable, tmp_path: Path) -> None:
    files = [
        write_records(tmp_path / name, build_records(numbers))
        for name, numbers in (("a.jsonl", range(9)), ("b.jsonl", range(20, 22)), ("c.jsonl", range(30, 39)))
    ]
    with open(files[2], "a") as file:
        file.write("not JSON\n")
    taken = take(Selection(max_records=3), files[0], str(tmp_path / "[bc].jsonl"))
    assert [int(text.split()[2].partition("?")[0]) for text in taken] == [0, 1, 2, 20, 21, 30]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, unique per test since Python imports a module once."""
    global number
    number += 1
    name = f"own_filters_{number}"
    (tmp_path / f"{name}.py").write_text(FILTERS)
    monkeypatch.chdir(tmp_path)
    return name


def build_selection(target: str, **fields) -> Selection:
    return Selection(filter=build_filter({"_target_": target, **fields}))


def test_a_filter_chooses_records(take: Callable, module: str, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", build_records(range(12)))
    short = build_selection(f"{module}.is_short", limit=len("What is 9?"))
    assert len(take(short, file)) == len(take(short, file, num_proc=2)) == 10
    held_out = replace(short, hold_out=HoldOut(count=4))
    assert len(take(held_out, file)) == 6, "of those that it keeps"


def test_the_counts_say_what_was_left_out(tokenizer, module: str, tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_records(range(12)))
    selection = replace(build_selection(f"{module}.is_short", limit=10), hold_out=HoldOut(count=4))
    encoding = Encoding(SFTEncoder(), tokenizer, 64, selection=selection)
    path = prepare_dataset(["a.jsonl"], key="train_file", encoding=encoding, cache_dir=tmp_path / "cache", log=None)
    assert load_summary(path).describe().endswith("\n2 records filtered out\n4 records held out for evaluation")


def test_the_name_of_the_cache_depends_on_the_selection(tokenizer, module: str, tmp_path: Path) -> None:
    selections = [
        Selection(),
        Selection(max_records=3),
        Selection(hold_out=HoldOut(fraction=0.5)),
        Selection(hold_out=HoldOut(fraction=0.4)),
        Selection(hold_out=HoldOut(count=4)),
        Selection(hold_out=HoldOut(count=4), takes_held_out=True),
        build_selection(f"{module}.is_short", limit=1),
        build_selection(f"{module}.is_short", limit=2),
    ]
    compute = lambda selection: Encoding(SFTEncoder(), tokenizer, 64, selection=selection).compute_key([[]])  # noqa: E731
    keys = [compute(selection) for selection in selections]
    assert len(set(keys)) == len(selections)
    (tmp_path / f"{module}.py").write_text(FILTERS + "\n# changed\n")
    linecache.checkcache()  # as in a new process
    assert [compute(selection) for selection in selections[:6]] == keys[:6]
    assert compute(selections[6]) != keys[6]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("is_short", "a.jsonl:2: data.filter {}.is_short raised KeyError: 'prompt'; fix the function or the record"),
        ("count", "a.jsonl:1: data.filter {}.count returned 10 (int); it must return true or false"),
    ],
)
def test_what_a_filter_does_wrong_is_reported_with_its_record(
    take: Callable, module: str, tmp_path: Path, target: str, message: str
) -> None:
    write_records(tmp_path / "a.jsonl", [*build_records(range(1)), {"completion": "a"}, *build_records(range(1, 2))])
    fields = {"limit": 99} if target == "is_short" else {}
    selection = build_selection(f"{module}.{target}", **fields)
    with pytest.raises(UserError) as caught:
        take(selection, "a.jsonl")
    assert str(caught.value) == message.format(module) + " (data.on_bad_record=skip leaves such records out)"
    if target == "is_short":
        assert len(take(selection, "a.jsonl", on_bad_record=OnBadRecord.skip)) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("is_short", "data.filter=is_short: give a mapping, such as {_target_: my_data.keep, field: value}"),
        ({"_target_": "json.nothing"}, "data.filter: _target_=json.nothing: the module json has no class or function"),
        ({"_target_": "json.loads", "t": 1, "s": 2}, "data.filter: json.loads does not take a record and the fields"),
    ],
)
def test_a_filter_that_cannot_be_called(spec: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_filter(spec)
    assert str(caught.value).startswith(message), str(caught.value)


def test_a_selection_that_leaves_nothing(take: Callable, module: str, tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_records(range(5)))
    for selection, message in (
        (build_selection(f"{module}.is_short", limit=1), "train_file: data.filter keeps none of its 5 records; "),
        (
            Selection(hold_out=HoldOut(count=5)),
            "train_file: all of its 5 records would be held out for evaluation; lower ",
        ),
        (
            Selection(hold_out=HoldOut(fraction=1e-6), takes_held_out=True),
            "train_file: none of its 5 records is held out for evaluation; raise ",
        ),
    ):
        with pytest.raises(UserError) as caught:
            take(selection, "a.jsonl")
        assert str(caught.value).startswith(message), str(caught.value)


def test_tokens_have_no_records_to_choose_from(tokenizer, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    encoding = Encoding(PretrainEncoder(), tokenizer, None, selection=Selection(max_records=2))
    with pytest.raises(UserError) as caught:
        prepare_dataset([corpus], key="train_file", encoding=encoding, cache_dir=tmp_path, log=None)
    assert str(caught.value) == (
        f"train_file: {corpus}.bin is tokenized already, and data.max_samples chooses among records; omit it, or give "
        "text"
    )
