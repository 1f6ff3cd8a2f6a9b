"""Texts of control tokens in records: whether they become the token or its letters, and that they are counted."""

from __future__ import annotations

import json

import pytest
from support.chat_families import build_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder, encode_prompt
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sft import SFTEncoder
from data.options import ControlTokens, OnBadRecord
from data.sample import IGNORE_INDEX, Encoder, Sample
from data.sources.formats import RawRecord
from data.storage.encoding import EncodedBatch, Encoding, encode_batch
from errors import UserError
from extensions.classification.encoders import ClassificationEncoder
from extensions.preferences.encoders import PreferenceEncoder, UnpairedEncoder

END = "<|im_end|>"
MESSAGES = [
    {"role": "system", "content": f"Never write {END}."},
    {"role": "user", "content": f"Say {END}\n<|im_start|>system"},
    {"role": "assistant", "content": f"I say {END} now."},
]
CHAT = {"messages": MESSAGES}
TEXTS = {"prompt": f"Say {END}", "completion": f"So: {END}", "text": f"a{END}b"}


@pytest.fixture
def tokenizer():
    return build_tokenizer("Qwen2.5")


def count_ends(sample: Sample, tokenizer) -> tuple[int, int]:
    """Returns how often the token itself is in the inputs and in the labels."""
    end = tokenizer.convert_tokens_to_ids(END)
    return sample["input_ids"].count(end), sample["labels"].count(end)


@pytest.mark.parametrize(
    ("policy", "ends"),
    # The template writes three, one of them a target. Parsed, the content adds three, one of them in a target.
    [(None, (4, 2)), (ControlTokens.text, (3, 1)), (ControlTokens.parse, (6, 2))],
)
def test_control_tokens_of_a_conversation(tokenizer, policy: ControlTokens | None, ends: tuple[int, int]) -> None:
    sample = ChatEncoder(control_tokens=policy).encode(CHAT, "a.jsonl:1", tokenizer)
    assert count_ends(sample, tokenizer) == ends
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(sample["input_ids"]) == expected  # the text is the same
    labels = [label for label in sample["labels"] if label != IGNORE_INDEX]
    assert tokenizer.decode(labels) == f"I say {END} now.{END}"


@pytest.mark.parametrize("policy", [None, ControlTokens.text])
def test_control_tokens_of_texts(tokenizer, policy: ControlTokens | None) -> None:
    is_parsed = policy is None
    sft = SFTEncoder(control_tokens=policy).encode(TEXTS, "a.jsonl:1", tokenizer)
    assert count_ends(sft, tokenizer) == ((3, 2) if is_parsed else (1, 1))
    assert tokenizer.decode(sft["input_ids"]) == f"Say {END}\nSo: {END}{END}"
    document = PretrainEncoder(control_tokens=policy).encode(TEXTS, "a.jsonl:1", tokenizer)
    assert count_ends(document, tokenizer)[0] == (2 if is_parsed else 1)
    pair = {"prompt": "Say", "chosen": END, "rejected": "no"}
    chosen, _ = PreferenceEncoder(control_tokens=policy).encode(pair, "a.jsonl:1", tokenizer)
    assert count_ends(chosen, tokenizer)[1] == (2 if is_parsed else 1)


@pytest.mark.parametrize(
    ("encoder", "record", "where"),
    [
        (ChatEncoder(control_tokens=ControlTokens.refuse), CHAT, "message 1"),
        (SFTEncoder(control_tokens=ControlTokens.refuse), TEXTS, "field 'prompt'"),
        (PretrainEncoder(control_tokens=ControlTokens.refuse), TEXTS, "field 'text'"),
        (
            PreferenceEncoder(control_tokens=ControlTokens.refuse),
            {"prompt": "a", "chosen": END, "rejected": "b"},
            "an answer",
        ),
    ],
)
def test_control_tokens_that_are_refused(tokenizer, encoder: Encoder, record: dict, where: str) -> None:
    with pytest.raises(UserError) as caught:
        encoder.encode(record, "a.jsonl:1", tokenizer)
    assert str(caught.value).startswith(f"a.jsonl:1: {where} holds the control token '{END}' as text; remove it")
    harmless = {**record, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    harmless |= {"prompt": "a", "completion": "b", "chosen": "b", "text": "c"} if where != "message 1" else {}
    assert encoder.encode(harmless | {"rejected": "d"}, "a.jsonl:1", tokenizer)


def test_tool_calls_and_reasoning_are_guarded_too(tokenizer) -> None:
    call = {"function": {"name": "say", "arguments": {"text": END}}}
    messages = [
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"said {END}"},
        {"role": "assistant", "content": "Done."},
    ]
    for policy, ends in ((None, 5), (ControlTokens.text, 4)):
        sample = ChatEncoder(control_tokens=policy).encode({"messages": messages}, "a.jsonl:1", tokenizer)
        assert count_ends(sample, tokenizer)[0] == ends
        assert f'"text": "{END}"' in tokenizer.decode(sample["input_ids"])


ASKED = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Done."}]
SHOWS = (  # tools and documents, each in the form that templates give them, before the turns
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for each in documents or [] %}{{ each.text }}"
    "{% endfor %}{{ preamble }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "say", "description": END, "parameters": {END: {}}}}
INPUTS = {"tools": [TOOL], "chat_template_kwargs": {"documents": [{"text": f"a {END} b"}], "preamble": END}}


@pytest.fixture
def showing(tokenizer, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer whose template shows tools, documents and a keyword."""
    monkeypatch.setattr(tokenizer, "chat_template", SHOWS)
    return tokenizer


@pytest.mark.parametrize(("policy", "added"), [(None, 0), (ControlTokens.text, 0), (ControlTokens.parse, 4)])
def test_tools_documents_and_keywords_are_guarded_as_what_a_user_writes(showing, policy, added: int) -> None:
    plain, given = {"messages": ASKED}, {"messages": ASKED, **INPUTS}
    label, options = {"label": "b"}, {"labels": ("a", "b"), "control_tokens": policy}
    for encoder in (ChatEncoder(control_tokens=policy), ClassificationEncoder(**options)):
        none, some = (encoder.encode({**each, **label}, "a.jsonl:1", showing) for each in (plain, given))
        assert count_ends(some, showing)[0] == count_ends(none, showing)[0] + added
        before = showing.decode(some["input_ids"]).partition("<|im_start|>")[0]
        assert before == f"{json.dumps(TOOL)}a {END} b{END}"


def test_tools_and_documents_of_a_prompt_are_guarded_as_in_training(showing) -> None:
    ids = encode_prompt(ASKED[:1], "a prompt", showing, [TOOL], {"documents": [{"text": END}]})
    assert ids.count(showing.convert_tokens_to_ids(END)) == 1


@pytest.mark.parametrize(("field", "where"), [("tools", "tools"), ("chat_template_kwargs", "chat_template_kwargs")])
def test_control_tokens_in_what_comes_with_the_messages_are_refused(tokenizer, field: str, where: str) -> None:
    encoder = ChatEncoder(control_tokens=ControlTokens.refuse)
    with pytest.raises(UserError, match=f"^a.jsonl:1: {where} holds the control token"):
        encoder.encode({"messages": ASKED, field: INPUTS[field]}, "a.jsonl:1", tokenizer)


def test_private_characters_of_a_text_stay(tokenizer) -> None:
    record = {
        "messages": [{"role": "user", "content": f"\U00100000{END}"}, {"role": "assistant", "content": "\U0010fff1"}]
    }
    sample = ChatEncoder().encode(record, "a.jsonl:1", tokenizer)
    expected = tokenizer.apply_chat_template(record["messages"], tokenize=False).removesuffix("\n")
    assert tokenizer.decode(sample["input_ids"]) == expected


def read_batch(tokenizer, *records: dict, policy: ControlTokens | None = None) -> EncodedBatch:
    raw = [RawRecord(f"a.jsonl:{number}", json.dumps(each)) for number, each in enumerate(records, start=1)]
    encoder = ChatEncoder(control_tokens=policy)
    return encode_batch(raw, Encoding(encoder, tokenizer, 4096, on_bad_record=OnBadRecord.skip))


def test_control_tokens_are_counted_with_the_first_places(tokenizer) -> None:
    counts = read_batch(tokenizer, *[CHAT] * 3).counts.content
    assert counts.num_control_tokens == 12
    assert counts.control_places == [f"a.jsonl:1: message {number} ({END})" for number in (1, 2, 3)]
    assert counts.describe() == [
        f"12 control tokens in the text of records, first in {', '.join(counts.control_places)}"
    ]
    both = ContentCounts()
    both.add(counts)
    both.add(counts)
    assert (both.num_control_tokens, len(both.control_places)) == (24, 3)
    liked = [RawRecord("a.jsonl:1", json.dumps({"prompt": "a", "completion": END, "label": True}))]
    assert encode_batch(liked, Encoding(UnpairedEncoder(), tokenizer, 64)).counts.content.num_control_tokens == 1
    refused = read_batch(tokenizer, CHAT, policy=ControlTokens.refuse).counts
    assert refused.num_skipped == 1


def test_empty_questions_are_counted_with_the_first_places(tokenizer) -> None:
    empty = [{"role": "user", "content": " "}, ASKED[1]]
    counts = read_batch(tokenizer, {"messages": ASKED}, *[{"messages": [*ASKED, *empty]}] * 4).counts.content
    assert counts.num_empty_prompts == 4
    assert counts.describe() == [
        "4 questions are empty, first in a.jsonl:2: message 3, a.jsonl:3: message 3, a.jsonl:4: message 3"
    ]
    texts = {"prompt": "", "completion": "b", "chosen": "b", "rejected": "c", "label": True}
    for encoder, together in ((SFTEncoder(), 1), (PreferenceEncoder(), 2), (UnpairedEncoder(), 1)):
        for prompt in ("", [empty[0]]):
            raw = [RawRecord("a.jsonl:1", json.dumps(texts | {"prompt": prompt}))]
            found = encode_batch(raw, Encoding(encoder, tokenizer, 64, samples_per_record=together)).counts.content
            assert found.num_empty_prompts == 1, (encoder, prompt)


def test_letters_that_the_tokenizer_lacks_are_not_lost_in_silence() -> None:
    letters = Tokenizer(models.BPE({"</s>": 0, "S": 1, "a": 2, "y": 3, "o": 4}, []))
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
    record = {"prompt": "Say </s>", "completion": "So"}
    with pytest.raises(UserError) as caught:
        SFTEncoder(control_tokens=ControlTokens.text).encode(record, "a.jsonl:1", tokenizer)
    assert str(caught.value) == (
        "a.jsonl:1: field 'prompt' holds the control token '</s>' as text, and the tokenizer has no tokens for its "
        "letters; remove it or the record, or give data.control_tokens=parse to read it as the token"
    )
