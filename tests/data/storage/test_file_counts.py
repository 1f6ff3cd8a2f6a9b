"""The counts of each file's records: samples, turns, targets, and turns without targets with the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.options import LengthPolicy, OnBadRecord, RewrittenTurns, TrainOn
from data.sample import Encoder
from data.sources.selection import HoldOut, Selection, hash_record
from data.storage.encoding import Encoding
from data.storage.length import LengthCounts
from data.storage.summary import BatchCounts
from data.storage.tokenized import TokenizedDataset, load_record_hashes, load_summary
from data.storage.tokenizing import prepare_dataset
from extensions.preferences.encoders import PreferenceEncoder, UnpairedEncoder


def build_chat(*turns: dict) -> dict:
    """Return a conversation whose assistant turns have these fields, with a question before each."""
    messages: list[dict] = []
    for number, turn in enumerate(turns):
        messages += [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": "It.", **turn}]
    return {"messages": messages}


def write_records(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prepare(encoder: Encoder, tokenizer, folder: Path, *entries: str, **options) -> Path:
    encoding = Encoding(encoder, tokenizer, **{"max_seq_length": 256, **options})
    return prepare_dataset(entries, key="train_file", encoding=encoding, cache_dir=folder / "cache", log=None)


def count(*arguments, **options) -> dict[str, BatchCounts]:
    """Return the counts of each file by its name without its folder."""
    path = prepare(*arguments, **options)
    return {Path(file.name).name: file.counts for file in load_summary(path).files}


def test_each_file_has_its_own_counts(tokenizer, tmp_path: Path) -> None:
    """Files of one glob share batches; each keeps its own counts, and the columns are in the order of the files."""
    for name, numbers in (("a.jsonl", range(5)), ("b.jsonl", range(5, 7)), ("c.jsonl", range(2))):
        write_records(tmp_path / name, [{"prompt": f"{n}?", "completion": f"It is {n}."} for n in numbers])
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write('{"prompt": "a"}\nnot JSON\n')
    entries = (f"{tmp_path}/[ab].jsonl", f"{tmp_path}/c.jsonl")
    path = prepare(SFTEncoder(), tokenizer, tmp_path, *entries, on_bad_record=OnBadRecord.skip)
    summary, data = load_summary(path), TokenizedDataset(path, False, False)
    assert [(Path(file.name).name, file.counts.num_records, file.counts.num_skipped) for file in summary.files] == [
        ("a.jsonl", 5, 0),
        ("b.jsonl", 4, 2),
        ("c.jsonl", 2, 0),
    ]
    ends = np.cumsum([file.counts.num_samples for file in summary.files])
    assert [int(part.sum()) for part in np.split(data.lengths, ends[:-1])] == [
        file.counts.num_tokens for file in summary.files
    ]
    assert sum(file.counts.num_targets for file in summary.files) == summary.num_targets
    hashes = load_record_hashes(path)
    assert hashes is not None
    assert hashes.tolist() == [hash_record({"prompt": f"{n}?", "completion": f"It is {n}."}) for n in [*range(7), 0, 1]]


def test_turns_without_a_target_have_their_reason(chat_tokenizer, tmp_path: Path) -> None:
    records = [build_chat({}, {}, {}), build_chat({"train": False}, {}), build_chat({"weight": 0}, {"weight": 1}, {})]
    file = write_records(tmp_path / "a.jsonl", records)
    turns = count(ChatEncoder(), chat_tokenizer, tmp_path, file)["a.jsonl"].content
    assert (turns.num_turns, turns.num_marked_turns, turns.num_earlier_turns) == (8, 2, 0)
    assert (turns.num_cut_turns, turns.num_lost_turns) == (0, 0)
    turns = count(ChatEncoder(train_on=TrainOn.last_turn), chat_tokenizer, tmp_path, file)["a.jsonl"].content
    assert (turns.num_turns, turns.num_marked_turns, turns.num_earlier_turns) == (8, 2, 2)
    assert turns.describe_turns() == [
        "8 turns of the assistant",
        "2 turns without targets: their own train or weight",
        "2 turns without targets: they are not the last one (data.train_on=last_turn)",
    ]


@pytest.mark.parametrize(
    ("policy", "num_cut"), [(LengthPolicy.truncate, 2), (LengthPolicy.drop, 3), (LengthPolicy.split, 0)]
)
def test_turns_that_the_length_policy_cuts(chat_tokenizer, tmp_path: Path, policy: LengthPolicy, num_cut: int) -> None:
    """The first of three turns fits."""
    file = write_records(tmp_path / "a.jsonl", [build_chat({}, {}, {}), build_chat({})])
    options = {"max_seq_length": 36, "length_policy": policy}
    counts = count(ChatEncoder(), chat_tokenizer, tmp_path, file, **options)["a.jsonl"]
    turns = counts.content
    assert (turns.num_turns, turns.num_cut_turns, turns.num_lost_turns) == (4, num_cut, 0)
    assert counts.lengths.num_lost_targets > 0 or policy is LengthPolicy.split


# It drops the reasoning of earlier turns, as several families do: the model sees them in another form.
REWRITES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>hm</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("rewritten", "num_samples", "num_lost"), [("split", 4, 0), ("last", 2, 2), ("keep", 2, 0)])
def test_turns_that_the_template_rewrites(
    build_tokenizer, tmp_path: Path, rewritten: str, num_samples: int, num_lost: int
) -> None:
    """Each counts once, in however many samples its conversation shows it."""
    tokenizer = build_tokenizer(eos_token="<|im_end|>", chat_template=REWRITES)
    file = write_records(tmp_path / "a.jsonl", [build_chat({}, {}, {}), build_chat({})])
    encoder = ChatEncoder(rewritten_turns=RewrittenTurns(rewritten))
    counts = count(encoder, tokenizer, tmp_path, file)["a.jsonl"]
    turns = counts.content
    assert (counts.num_records, counts.num_samples) == (2, num_samples)
    assert (turns.num_turns, turns.num_target_turns, turns.num_lost_turns, turns.num_cut_turns) == (4, 4, num_lost, 0)
    if num_lost:
        assert turns.describe_turns()[1:] == ["2 turns without targets: the chat template rewrites them later"]


def test_turns_of_a_split_conversation_that_are_cut(build_tokenizer, tmp_path: Path) -> None:
    """The first two samples fit; the third is truncated to its context."""
    tokenizer = build_tokenizer(eos_token="<|im_end|>", chat_template=REWRITES)
    file = write_records(tmp_path / "a.jsonl", [build_chat({}, {}, {})])
    path = prepare(ChatEncoder(), tokenizer, tmp_path, file)
    lengths = TokenizedDataset(path, False, False).lengths.tolist()
    counts = count(ChatEncoder(), tokenizer, tmp_path, file, max_seq_length=lengths[1])["a.jsonl"]
    assert (counts.num_samples, counts.content.num_split) == (2, 1)
    assert (counts.content.num_turns, counts.content.num_cut_turns) == (3, 1)
    assert counts.describe().startswith(f"1 record; 2 samples, {sum(lengths[:2])} tokens, ")


def test_turns_of_a_prompt_count_once(chat_tokenizer, tmp_path: Path) -> None:
    asked, answered = ({"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"})
    prompt = [asked, answered, asked]
    file = write_records(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": [answered]}])
    words = ["2 turns of the assistant", "1 turn without targets: they are part of the prompt"]
    for encoder in (ChatEncoder(), SFTEncoder()):
        assert count(encoder, chat_tokenizer, tmp_path, file)["a.jsonl"].content.describe_turns() == words
    file = write_records(tmp_path / "b.jsonl", [{"prompt": prompt, "chosen": [answered], "rejected": "c"}])
    turns = count(PreferenceEncoder(), chat_tokenizer, tmp_path, file, samples_per_record=2)["b.jsonl"].content
    assert (turns.num_turns, turns.num_target_turns, turns.num_prompt_turns) == (3, 2, 1)
    file = write_records(tmp_path / "c.jsonl", [{"prompt": prompt, "completion": [answered], "label": True}])
    assert count(UnpairedEncoder(), chat_tokenizer, tmp_path, file)["c.jsonl"].content.describe_turns() == words


def test_records_that_are_skipped_have_no_turns(chat_tokenizer, tmp_path: Path) -> None:
    """Nor other counts of content: also of one that is found bad after its turns were read."""
    long = build_chat({})
    long["messages"][0]["content"] = "<|im_end|> legs" * 99
    file = write_records(tmp_path / "a.jsonl", [build_chat({}), long])
    options = {"max_seq_length": 36, "on_bad_record": OnBadRecord.skip}
    counts = count(ChatEncoder(), chat_tokenizer, tmp_path, file, **options)["a.jsonl"]
    assert (counts.num_skipped, counts.content.num_turns, counts.content.num_control_tokens) == (1, 1, 0)
    assert f"\n1 of 2 records skipped as bad, such as {file}:2: " in counts.describe()


def test_other_layouts_of_a_conversation(chat_tokenizer, tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}] * 2
    sharegpt[1] = {**sharegpt[1], "train": False}
    records = [{"conversations": sharegpt}, {"instruction": "a?", "output": "b"}, {"prompt": "a?", "completion": "b"}]
    file = write_records(tmp_path / "a.jsonl", records)
    turns = count(ChatEncoder(), chat_tokenizer, tmp_path, file)["a.jsonl"].content
    assert (turns.num_turns, turns.num_marked_turns, turns.num_lost_turns) == (4, 1, 0)


def test_answers_are_turns_and_documents_are_not(tokenizer, tmp_path: Path) -> None:
    pairs = [{"prompt": "a?", "chosen": "b", "rejected": "c"}] * 3
    file = write_records(tmp_path / "a.jsonl", pairs)
    counts = count(PreferenceEncoder(), tokenizer, tmp_path, file, samples_per_record=2)["a.jsonl"]
    assert (counts.num_records, counts.num_samples, counts.content.num_turns) == (3, 6, 6)
    (tmp_path / "a.txt").write_text("one document")
    counts = count(PretrainEncoder(), tokenizer, tmp_path, f"{tmp_path}/a.txt", max_seq_length=None)["a.txt"]
    assert (counts.num_records, counts.content.num_turns, counts.content.describe_turns()) == (1, 0, [])


def test_what_is_left_out_is_counted_where_it_was(tokenizer, tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "completion": "It."} for n in range(20)]
    files = [write_records(tmp_path / name, records[part]) for name, part in (("a", slice(15)), ("b", slice(15, 20)))]
    selections = [Selection(hold_out=HoldOut(count=6), takes_held_out=side) for side in (False, True)]
    trained, held_out = (count(SFTEncoder(), tokenizer, tmp_path, *files, selection=each) for each in selections)
    for name, num_records in (("a", 15), ("b", 5)):
        assert trained[name].num_records == num_records
        assert trained[name].num_held_out == held_out[name].num_records == held_out[name].num_samples


def test_a_corpus_of_tokens_has_documents_alone(tokenizer, tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path / name) for name in ("a", "b")]
    path = prepare(PretrainEncoder(), tokenizer, tmp_path, *corpora, max_seq_length=None)
    summary = load_summary(path)
    assert [Path(file.name).name for file in summary.files] == ["a.bin", "b.bin"]
    assert [file.counts.num_samples * 2 for file in summary.files] == [summary.num_samples] * 2
    assert load_record_hashes(path) is None


def test_all_that_can_be_said_of_a_file_is_in_short_lines() -> None:
    """With every count above a million; a line that names a record is as long as its message."""
    content, lengths, counts = ContentCounts(), LengthCounts(), BatchCounts()
    for each in (content, lengths, counts):
        vars(each).update({name: 1_234_567 for name in vars(each) if name.startswith("num_")})
    content.empty_places = content.control_places = ["a.jsonl:1234567: message 1"]
    counts.content, counts.lengths, counts.examples = content, lengths, ["a.jsonl:2: no field 'completion'"]
    lines = counts.describe().split("\n")
    assert len(lines) == 21 and max(map(len, lines)) <= 120, max(lines, key=len)
