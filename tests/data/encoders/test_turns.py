"""The keys and the fields of records that decide what of a turn is a target, on templates in the manner of families."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chat_families import CLOSE, CONVERSATIONS, FAMILIES, OPEN, build_tokenizer
from test_chat import read_targets_in_context

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder
from data.encoders.messages import REASONING_FIELDS
from data.encoders.sft import SFTEncoder
from data.encoders.stops import read_stop_tokens
from data.encoders.turns import PROBE, _align, _count_shared, _find_following, find_template_stops
from data.options import LengthPolicy, OnBadRecord, RewrittenTurns
from data.sources.formats import RawRecord
from data.storage.encoding import EncodedBatch, Encoding, encode_batch
from data.storage.summary import FileCounts, Summary, sum_files
from errors import UserError
from extensions.preferences.encoders import PreferenceEncoder

ASKED = {"role": "user", "content": "How many legs has a spider?"}
THOUGHTS = CONVERSATIONS["two thoughts"]
CALLED = CONVERSATIONS["parallel calls"]


def read(name: str, record: dict, **keys: object) -> list[str]:
    """Returns the targets of a record, by the template of a family."""
    encoder = ChatEncoder(stop_tokens=FAMILIES[name].stops, **keys)
    made = encoder.encode(record, "chat.jsonl:1", build_tokenizer(name))
    samples = made if isinstance(made, list) else [made]
    return [target for sample in samples for _, target in read_targets_in_context(sample, build_tokenizer(name))]


def batch(name: str, *records: dict, length: int = 4096, **keys: object) -> EncodedBatch:
    encoder = ChatEncoder(stop_tokens=FAMILIES[name].stops, **keys)
    raw = [RawRecord(f"chat.jsonl:{number}", json.dumps(each)) for number, each in enumerate(records, start=1)]
    return encode_batch(raw, Encoding(encoder, build_tokenizer(name), length, LengthPolicy.truncate, OnBadRecord.stop))


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss", "GLM-4.5", "DeepSeek-R1 distilled", "Granite 3"])
def test_reasoning_is_read_under_each_of_its_names(name: str) -> None:
    expected = read(name, CONVERSATIONS["a thought"])
    assert "An arachnid." in expected[0]
    for field in REASONING_FIELDS:
        turn = {"role": "assistant", "content": "Eight.", field: "An arachnid."}
        assert read(name, {"messages": [ASKED, turn]}) == expected


def test_reasoning_in_tags_of_the_content_is_not_lost_by_a_template_that_cuts_it_off() -> None:
    turn = {"role": "assistant", "content": "<think>\nAn arachnid.\n</think>\n\nEight."}
    expected = read("DeepSeek-R1 distilled", CONVERSATIONS["a thought"])
    assert read("DeepSeek-R1 distilled", {"messages": [ASKED, turn]}) == expected
    assert expected == ["An arachnid.\n</think>\n\nEight.<|eos|>"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3", ["\n</think>\n\nEight.<|im_end|>", "\n</think>\n\nSix.<|im_end|>"]),
        ("gpt-oss", [f"<|end|><|start|>assistant<|channel|>final<|message|>{n}.<|return|>" for n in ("Eight", "Six")]),
    ],
)
def test_reasoning_that_is_not_trained_on(name: str, expected: list[str]) -> None:
    assert read(name, THOUGHTS, train_on_reasoning=False) == expected
    plain = CONVERSATIONS["two turns"]
    assert read(name, plain, train_on_reasoning=False) == read(name, plain)


SHORT = ["hi", "think", "<", "i", "Eight.", "assistant"]  # texts that templates write elsewhere too


@pytest.mark.parametrize("rewritten", list(RewrittenTurns))
@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss", "GLM-4.5", "DeepSeek-R1 distilled", "Granite 3", "Nemotron 3"])
def test_short_reasoning_is_masked_where_it_is(name: str, rewritten: RewrittenTurns) -> None:
    keys = {"rewritten_turns": rewritten, "train_on_reasoning": False}
    (expected,) = read(name, CONVERSATIONS["a thought"], **keys)
    assert "An arachnid." not in expected and "Eight." in expected
    for thought in SHORT:
        for field in (*REASONING_FIELDS, None):
            said = {field: thought} if field else {"content": f"<think>\n{thought}\n</think>\n\nEight."}
            record = {"messages": [ASKED, {"role": "assistant", "content": "Eight.", **said}]}
            if field or name == "DeepSeek-R1 distilled":  # the others show tags in the content as they are
                assert read(name, record, **keys) == [expected], thought


def test_reasoning_that_a_template_changes_is_not_masked_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = FAMILIES["Qwen3"].template.replace(
        "{{ m.reasoning_content", "{{ m.reasoning_content | length ~ m.reasoning_content"
    )
    monkeypatch.setattr(build_tokenizer("Qwen3"), "chat_template", changed)
    with pytest.raises(
        UserError, match="^chat.jsonl:1: message 2: where its reasoning ends cannot be found, since the"
    ):
        read("Qwen3", CONVERSATIONS["a thought"], train_on_reasoning=False)


def test_reasoning_that_the_template_does_not_show_is_counted() -> None:
    assert batch("Llama 3", THOUGHTS, CONVERSATIONS["one turn"]).counts.content.num_hidden_thoughts == 2
    assert batch("Qwen3", THOUGHTS).counts.content.num_hidden_thoughts == 0


def test_keys_of_the_template_decide_over_what_a_turn_holds() -> None:
    plain = CONVERSATIONS["one turn"]
    assert read("Qwen3", plain) == ["Eight.<|im_end|>"]
    thinking = {"enable_thinking": True}
    assert read("Qwen3", plain, template_kwargs=thinking) == ["<think>\n\n</think>\n\nEight.<|im_end|>"]
    own = {**plain, "chat_template_kwargs": {"reasoning_effort": "low"}}
    encoder = ChatEncoder(template_kwargs={"reasoning_effort": "high"})
    sample = encoder.encode(own, "a:1", build_tokenizer("gpt-oss"))
    assert "Reasoning: low" in build_tokenizer("gpt-oss").decode(sample["input_ids"])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("low", "a:1: chat_template_kwargs=low: give a mapping, such as {enable_thinking: false}"),
        ({"tools": []}, "a:1: chat_template_kwargs: tools of a template cannot be set; omit it"),
    ],
)
def test_keys_of_a_record_that_are_refused(own: object, message: str) -> None:
    record = {**CONVERSATIONS["one turn"], "chat_template_kwargs": own}
    with pytest.raises(UserError) as caught:
        ChatEncoder().encode(record, "a:1", build_tokenizer("Qwen3"))
    assert str(caught.value) == message


def test_turns_that_are_rewritten() -> None:
    assert read("Qwen3", THOUGHTS, rewritten_turns=RewrittenTurns.last) == read("Qwen3", THOUGHTS)[1:]
    kept = ["Eight.<|im_end|>", "<think>\nAn insect.\n</think>\n\nSix.<|im_end|>"]
    assert read("Qwen3", THOUGHTS, rewritten_turns=RewrittenTurns.keep) == kept
    ends = ["<|channel|>final<|message|>Eight.<|end|>", read("gpt-oss", THOUGHTS)[1]]
    assert read("gpt-oss", THOUGHTS, rewritten_turns=RewrittenTurns.keep) == ends
    glm = ["\n<think></think>\nEight.<|user|>", "\n<think>An insect.</think>\nSix.<|user|>"]
    assert read("GLM-4.5", THOUGHTS, rewritten_turns=RewrittenTurns.keep) == glm
    called = read("GLM-4.5", CALLED, rewritten_turns=RewrittenTurns.keep)
    assert called == read("GLM-4.5", CALLED)  # nothing is rewritten


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_targets_of_a_conversation_that_is_not_rewritten_are_the_same_when_kept(name: str) -> None:
    record = CONVERSATIONS["two turns"]
    if len(batch(name, record).columns["length"]) == 1 and name != "gpt-oss":
        assert read(name, record, rewritten_turns=RewrittenTurns.keep) == read(name, record)


def test_what_splitting_costs_is_counted() -> None:
    split = batch("Qwen3", THOUGHTS, CONVERSATIONS["one turn"]).counts.content
    assert (split.num_turns, split.num_target_turns, split.num_split, split.num_extra_samples) == (3, 3, 1, 1)
    shared = "<|im_start|>user\nHow many legs has a spider?<|im_end|>\n<|im_start|>assistant\n"
    assert split.num_repeated_tokens == len(build_tokenizer("Qwen3").encode(shared, add_special_tokens=False))
    last = batch("Qwen3", THOUGHTS, rewritten_turns=RewrittenTurns.last).counts.content
    assert (last.num_split, last.num_lost_turns) == (0, 1)
    assert split.describe()[0].startswith("1 conversation became 2 samples: the chat template rewrites earlier")
    without = "1 turn without targets: the chat template rewrites them later"
    assert last.describe_turns() == ["2 turns of the assistant", without]


def test_counts_are_stored_with_the_tokens() -> None:
    counts = batch("GLM-4.5", THOUGHTS, CALLED).counts
    assert counts.content.stop_tokens == {"<|user|>": 4, "<|observation|>": 1}
    summary = sum_files([FileCounts("a.jsonl", counts)], ["0"])
    assert Summary.from_json(summary.to_json()) == summary


def test_a_sample_that_is_too_long_does_not_take_the_others_with_it() -> None:
    first, second, third = batch("Qwen3", CALLED).columns["length"].tolist()
    assert first < second < third
    cut = batch("Qwen3", CALLED, length=first)
    assert cut.columns["length"].tolist() == [first]
    assert (cut.counts.lengths.num_truncated, cut.counts.lengths.num_lost_tokens) == (2, second + third)


@pytest.mark.parametrize("name", ["Qwen2.5", "DeepSeek-V3", "GLM-4.5", "Llama 3.1"])
def test_calls_and_tools_are_read_as_objects_and_as_text(name: str) -> None:
    record = CONVERSATIONS["tool call"]
    (asked, called, *rest), (call,) = record["messages"], record["messages"][1]["tool_calls"]
    function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
    expected = read(name, record)
    for calls in ([{**call, "function": function}], json.dumps([call]), [{"id": call["id"], **function}]):
        messages = [asked, {**called, "tool_calls": calls}, *rest]
        assert read(name, {"tools": json.dumps(record["tools"]), "messages": messages}) == expected


def test_where_one_text_ends_with_the_longest_end_of_another() -> None:
    for text, other, expected in [
        ("abcab", "cab", (5, 3)),
        ("abxcab.ab", "cab", (6, 3)),
        ("ab ab", "xab", (5, 2)),  # the last of several
        ("abc", "", (3, 0)),
        ("abc", "x", (3, 0)),
        ("", "x", (0, 0)),
        ("aaaa", "aa", (4, 2)),
    ]:
        assert _align(text, other) == expected, (text, other)
    for one, other, number in [("abc", "abd", 2), ("", "a", 0), ("ab", "ab", 2), ("x", "y", 0)]:
        assert _count_shared(one, other) == number


@pytest.mark.parametrize("name", ["Qwen3", "GLM-4.5", "DeepSeek-R1 distilled"])
def test_the_time_for_a_long_text_is_in_proportion_to_it(name: str) -> None:
    long = "legs and " * 200_000  # of which comparing each letter with all would take hours
    turn = {"role": "assistant", "content": long, "reasoning": "An arachnid."}
    encoder, counts = ChatEncoder(stop_tokens=FAMILIES[name].stops, train_on_reasoning=False), ContentCounts()
    (pieces,) = encoder.split({"messages": [ASKED, turn]}, "chat.jsonl:1", build_tokenizer(name), counts)
    (target,) = [piece.content for piece in pieces if piece.is_target and isinstance(piece.content, str)]
    assert long.rstrip() in target and "arachnid" not in target


@pytest.mark.parametrize("name", ["Qwen2.5", "DeepSeek-V3", "GLM-4.5", "Llama 3.1"])
def test_calls_of_sharegpt_are_those_of_messages(name: str) -> None:
    record = CONVERSATIONS["tool call"]
    asked, called, result, answer = record["messages"]
    function = {key: value for key, value in called["tool_calls"][0]["function"].items() if key != "description"}
    for value in (json.dumps(function), json.dumps([function]), json.dumps(called["tool_calls"])):
        turns = [
            {"from": "human", "value": asked["content"]},
            {"from": "function_call", "value": value},
            {"from": "observation", "value": result["content"]},
            {"from": "gpt", "value": answer["content"]},
        ]
        assert read(name, {"tools": json.dumps(record["tools"]), "conversations": turns}) == read(name, record)
    for value in ("look", '{"arguments": {}}', "[]", None):
        with pytest.raises(UserError, match="turn 2 is from 'function_call', so its value must be the JSON text of a"):
            read(name, {"conversations": [turns[0], {"from": "function_call", "value": value}]})


def test_prompt_and_completion_as_lists_of_messages() -> None:
    messages = CONVERSATIONS["two turns"]["messages"]
    record = {"prompt": messages[:3], "completion": messages[3:]}
    tokenizer = build_tokenizer("Llama 3")
    for encoder in (ChatEncoder(), SFTEncoder()):
        sample = encoder.encode(record, "a.jsonl:1", tokenizer)
        assert [target for _, target in read_targets_in_context(sample, tokenizer)] == ["Six.<|eot_id|>"]
    mixed = ChatEncoder().encode({**record, "completion": "Six."}, "a.jsonl:1", tokenizer)
    assert mixed == sample


def test_an_answer_of_a_preference_stays_one_sample() -> None:
    answers = {"chosen": THOUGHTS["messages"], "rejected": CONVERSATIONS["two turns"]["messages"]}
    tokenizer = build_tokenizer("Qwen3")
    chosen, rejected = PreferenceEncoder().encode(answers, "a.jsonl:1", tokenizer)
    targets = [read_targets_in_context(sample, tokenizer)[-1][1] for sample in (chosen, rejected)]
    assert targets == ["<think>\nAn insect.\n</think>\n\nSix.<|im_end|>", "Six.<|im_end|>"]


def test_stop_tokens_of_generation_config(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("GLM-4.5")
    assert read_stop_tokens(tmp_path, tokenizer) == ()
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ids, 10**6]}))
    assert read_stop_tokens(tmp_path, tokenizer) == ("<|observation|>", "<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[0]}))
    assert read_stop_tokens(tmp_path, tokenizer) == ("<|user|>",)


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_tokens_of_the_template_are_those_of_its_turns(name: str) -> None:
    """They are an answer's and a tool call's; a model that is known to stop there is trained on the same."""
    family, tokenizer = FAMILIES[name], build_tokenizer(name)
    found, stops = find_template_stops(tokenizer, family.stops), set[str]()
    for record in CONVERSATIONS.values():
        made = []
        for known in (family.stops, (*family.stops, *found)):
            counts = ContentCounts()
            with suppress(UserError):
                made.append(ChatEncoder(stop_tokens=known).split(record, "a:1", tokenizer, counts))
            stops |= set(counts.stop_tokens)
        assert made[:1] == made[1:]
    assert found == stops


TAGGED = ("Llama 3", "Qwen2.5", "Gemma 3", "Mistral Small 3", "Zephyr")


@pytest.mark.parametrize("name", TAGGED)
def test_generation_tags_are_transformers_own_mask_and_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, tokenizer = FAMILIES[name], build_tokenizer(name)
    tagged = family.marked.replace(OPEN, "{% generation %}").replace(CLOSE, "{% endgeneration %}")
    record = CONVERSATIONS["two turns"]
    expected = read(name, record)
    monkeypatch.setattr(tokenizer, "chat_template", tagged)
    masked = tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
    theirs = [token for token, is_target in zip(masked["input_ids"], masked["assistant_masks"]) if is_target]
    assert tokenizer.decode(theirs) == "".join(read(name, record)) == "".join(expected)
    assert batch(name, record).counts.content.num_other_masks == 0


def test_generation_tags_decide_and_a_disagreement_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer("Zephyr")
    tagged = FAMILIES["Zephyr"].marked.replace(f"</s>{CLOSE}", f"{CLOSE}</s>")
    tagged = tagged.replace(OPEN, "{% generation %}").replace(CLOSE, "{% endgeneration %}")
    monkeypatch.setattr(tokenizer, "chat_template", tagged)
    assert read("Zephyr", CONVERSATIONS["two turns"]) == ["Eight.", "Six."]
    counts = batch("Zephyr", CONVERSATIONS["two turns"]).counts.content
    assert counts.num_other_masks == 2
    (part,) = counts.describe()
    assert part.startswith("in 2 turns the chat template's generation tags, which decide, mark something else")


@pytest.mark.parametrize(
    ("shown", "following"),
    [(f"<s>hi\n<u>{PROBE}\n", "\n<u>"), ("<s>hi\n", ""), (None, "")],
    ids=["shown", "not shown", "refused"],
)
def test_what_follows_a_turn_is_empty_if_a_template_does_not_show_the_next_one(
    shown: str | None, following: str
) -> None:
    renderer: Any = SimpleNamespace(try_render=lambda turns: shown)
    assert _find_following(renderer, [{"role": "assistant", "content": "hi"}], "hi") == following
